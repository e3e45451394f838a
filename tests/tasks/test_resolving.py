"""The closure over what wheels ask for, with a small index that answers from a table."""

from collections.abc import Sequence

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tasks.resolving import Candidate, ConflictError, Target, WheelMissingError, resolve

DEBIAN = Target(version="3.11.2", machine="x86_64", libc=("glibc", "2.36"))
JETSON = Target(version="3.12.3", machine="aarch64", libc=("glibc", "2.39"))


class Index:
    """Versions of projects with what they ask for; a question that it cannot answer is a missing wheel."""

    def __init__(self, **projects: dict[str, list[str]]) -> None:
        self.projects = {"pip": {"26.0": []}, **projects}
        self.questions: list[list[str]] = []

    def __call__(self, asked: Sequence[str], narrowed: Sequence[str]) -> list[Candidate]:
        self.questions.append(list(asked))
        return [self.best(Requirement(one), [Requirement(other) for other in narrowed]) for one in asked]

    def best(self, wanted: Requirement, narrowed: Sequence[Requirement]) -> Candidate:
        limits = [wanted, *(one for one in narrowed if one.name == wanted.name)]
        known = sorted(self.projects.get(wanted.name, {}), key=Version, reverse=True)
        for version in known:
            if all(one.specifier.contains(version) for one in limits):
                asks = tuple(self.projects[wanted.name][version])
                return Candidate(name=wanted.name, version=version, file_name="", sha256="", requires=asks)
        raise WheelMissingError(f"no {wanted}")


def chosen(requirements: list[str], index: Index, *extras: str, target: Target = DEBIAN) -> dict[str, str]:
    return {one.name: one.version for one in resolve(requirements, extras, target, index).packages}


def test_what_is_asked_for_and_what_that_asks_for() -> None:
    index = Index(a={"1.0": ["b>=2"]}, b={"1.0": [], "2.0": ["c"]}, c={"3.0": []}, d={"1.0": []})
    assert chosen(["a"], index) == {"a": "1.0", "b": "2.0", "c": "3.0"}


def test_markers_are_those_of_the_target_and_not_of_this_machine() -> None:
    asks = ['x; platform_machine == "aarch64"', 'y; python_version < "3.12"', 'z; sys_platform == "win32"', "w"]
    index = Index(**{name: {"1.0": []} for name in "xyzw"})
    assert chosen(asks, index) == {"w": "1.0", "y": "1.0"}
    assert chosen(asks, index, target=JETSON) == {"w": "1.0", "x": "1.0"}


def test_extras_are_followed_through_others() -> None:
    index = Index(
        fla={"0.6": ['core[cuda]==0.6; extra == "cuda"']}, core={"0.6": ["einops", 'triton; extra == "cuda"']}
    )
    index.projects |= {"einops": {"1.0": []}, "triton": {"3.9": []}}
    mine = ['fla[cuda]>=0.5; extra == "gpu"']
    assert chosen(mine, index) == {}
    assert chosen(mine, index, "gpu") == {"fla": "0.6", "core": "0.6", "einops": "1.0", "triton": "3.9"}


def test_a_requirement_that_comes_late_narrows_the_choice() -> None:
    index = Index(a={"1.0": []}, b={"1.0": ["c"]}, c={"1.0": ["a<1"]})
    index.projects["a"]["0.9"] = []
    assert chosen(["a", "b"], index)["a"] == "0.9"


def test_versions_that_exclude_each_other_are_named() -> None:
    index = Index(a={"1.0": [], "0.9": []}, b={"1.0": ["a<1"]}, c={"1.0": ["a>=1"]})
    with pytest.raises((ConflictError, WheelMissingError), match="a"):
        chosen(["b", "c"], index)


def test_a_missing_wheel_is_said_by_the_index() -> None:
    with pytest.raises(WheelMissingError, match="no gone"):
        chosen(["gone"], Index())


def test_a_guess_saves_questions_and_decides_nothing() -> None:
    index = Index(a={"1.0": ["b"]}, b={"1.0": ["c"]}, c={"1.0": []}, surplus={"1.0": []})
    known = {"a": ["b", "surplus"], "b": ["c"], "c": []}
    lock = resolve(["a"], (), DEBIAN, index, known.get)
    assert [one.name for one in lock.packages] == ["a", "b", "c"]
    assert len(index.questions) == 1


def test_a_guess_that_the_index_does_not_have_harms_nothing() -> None:
    index = Index(a={"1.0": []})
    lock = resolve(["a"], (), DEBIAN, index, {"a": ["gone"]}.get)
    assert [one.name for one in lock.packages] == ["a"]
    assert [len(question) for question in index.questions] == [3, 2]


def test_the_lock_is_of_its_wheels_and_of_nothing_else() -> None:
    index = Index(a={"1.0": []})
    lock = resolve(["a"], (), DEBIAN, index).with_own("dflash_pipeline-0.1.0-py3-none-any.whl", "0" * 64)
    assert [(one.name, one.version) for one in lock.packages] == [("a", "1.0"), ("dflash-pipeline", "0.1.0")]
    assert lock.pip.version == "26.0"
    other = lock.with_own("dflash_pipeline-0.1.0-py3-none-any.whl", "1" * 64)
    assert other.digest() != lock.digest()
    assert other.with_own("dflash_pipeline-0.1.0-py3-none-any.whl", "0" * 64).digest() == lock.digest()
