"""Which wheels another machine's Python needs: a closure over what they ask for, by that machine's markers.

Pure: what the index has is asked through a function. Every version is decided when a project is first met, by all that
is asked of it until then; where something met later does not accept it, all begins anew with that known.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from typing import Self

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import BaseModel, ConfigDict

from dflash.errors import DFlashError
from tasks.own_wheel import NAME

TOOL = "pip"
"""Travels along as the host's installer and is not installed."""
MOST_ROUNDS = 8
OLDEST_GLIBC = {"x86_64": 5, "i686": 5}
OLDEST_GLIBC_ELSEWHERE = 17
"""glibc 2.x of the oldest manylinux tag: manylinux1 and, for machines that came later, manylinux2014."""
LEGACY_TAGS = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


class WheelMissingError(DFlashError):
    """The index has no wheel of something for that Python and platform."""

    state_name = "WheelMissing"


class ConflictError(DFlashError):
    """What is wanted asks for versions that exclude each other."""

    state_name = "VersionConflict"


class TargetError(DFlashError):
    """A host whose Python or platform no wheel is made for."""

    state_name = "PlatformUnsupported"


class Target(BaseModel):
    """The Python that the wheels are for: CPython ``version`` on Linux."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    """All three numbers: a venv belongs to one patch release."""
    machine: str
    """As uname says it, ``x86_64``."""
    libc: tuple[str, str]
    """``("glibc", "2.36")``, or ``("musl", "1.2")``."""

    def platforms(self) -> tuple[str, ...]:
        """The platform tags that its pip takes, the best first. Raises :class:`TargetError` for a libc without any."""
        kind, release = self.libc
        major, _, minor = release.partition(".")
        if not (major.isdigit() and minor.split(".")[0].isdigit()):
            raise TargetError(
                f"libc {kind} {release!r} has no version of the form 2.36, so no wheel can be chosen for it"
            )
        newest = int(minor.split(".")[0])
        if kind == "musl":
            return (
                *(f"musllinux_{major}_{one}_{self.machine}" for one in range(newest, -1, -1)),
                f"linux_{self.machine}",
            )
        if kind != "glibc":
            raise TargetError(f"libc {kind!r} is neither glibc nor musl, and no wheels are made for another")
        tags = []
        for one in range(newest, OLDEST_GLIBC.get(self.machine, OLDEST_GLIBC_ELSEWHERE) - 1, -1):
            tags.append(f"manylinux_2_{one}_{self.machine}")
            if one in LEGACY_TAGS:
                tags.append(f"{LEGACY_TAGS[one]}_{self.machine}")
        return (*tags, f"linux_{self.machine}")

    def markers(self) -> dict[str, str]:
        """The environment markers of that Python (PEP 508), without ``extra``."""
        return {
            "implementation_name": "cpython",
            "implementation_version": self.version,
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": self.version,
            "python_version": ".".join(self.version.split(".")[:2]),
            "sys_platform": "linux",
        }


class Candidate(BaseModel):
    """One wheel of the index."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: str
    file_name: str
    sha256: str
    requires: tuple[str, ...] = ()


class Lock(BaseModel):
    """Exactly the wheels of one environment, by name, and the pip that installs them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    packages: tuple[Candidate, ...]
    pip: Candidate

    def with_own(self, file_name: str, sha256: str) -> Self:
        """The lock with this program's wheel in the place that was kept for it."""
        own = [one for one in self.packages if one.name != NAME]
        version = file_name.split("-")[1]
        own.append(Candidate(name=NAME, version=version, file_name=file_name, sha256=sha256))
        return self.model_copy(update={"packages": tuple(sorted(own, key=lambda one: one.name))})

    def digest(self) -> str:
        """sha256 of the wheels' names and hashes."""
        wheels = sorted((one.file_name, one.sha256) for one in self.packages)
        return hashlib.sha256(json.dumps(wheels).encode()).hexdigest()


Ask = Callable[[Sequence[str], Sequence[str]], Iterable[Candidate]]
"""What the index has for requirements (one a project), narrowed by further ones: one candidate each."""
Guess = Callable[[str], Sequence[str] | None]
"""What a project probably asks for, None where nobody knows: it only says what to ask the index for at once."""


def resolve(
    requirements: Sequence[str], extras: Sequence[str], target: Target, ask: Ask, guess: Guess = lambda _: None
) -> Lock:
    """The lock of this program, which has ``requirements``, with ``extras``, without the program's own wheel.

    Raises :class:`ConflictError`, and what ``ask`` raises.
    """
    narrowed: list[str] = []
    for _ in range(MOST_ROUNDS):
        closure = _Closure(target, narrowed, ask, guess)
        own = Candidate(name=NAME, version="0", file_name="", sha256="", requires=(*requirements, TOOL))
        closure.add(own)
        closure.close([Requirement(f"{NAME}[{','.join(extras)}]")])
        unmet = closure.unmet()
        if not unmet:
            packages = {name: one for name, one in closure.chosen.items() if name not in (NAME, TOOL)}
            return Lock(packages=tuple(packages[name] for name in sorted(packages)), pip=closure.chosen[TOOL])
        if set(unmet) <= set(narrowed):
            raise ConflictError(
                f"{unmet[0]} is asked for, and another requirement excludes it; relax one in the constraints"
            )
        narrowed += [one for one in unmet if one not in narrowed]
    raise ConflictError(
        f"after {MOST_ROUNDS} tries versions still exclude each other, such as {narrowed[-1]}; constrain it"
    )


class _Closure:
    """Projects chosen one breadth after the other, since pip is asked for many at once."""

    def __init__(self, target: Target, narrowed: Sequence[str], ask: Ask, guess: Guess) -> None:
        self._narrowed, self._ask, self._guess = narrowed, ask, guess
        self._markers = target.markers()
        self._asked: dict[str, list[Requirement]] = {}
        self._at_hand: dict[str, Candidate] = {}
        self._followed: set[tuple[str, str]] = set()
        self.chosen: dict[str, Candidate] = {}

    def add(self, candidate: Candidate) -> None:
        self.chosen[canonicalize_name(candidate.name)] = candidate

    def close(self, wanted: Sequence[Requirement]) -> None:
        while wanted:
            for one in wanted:
                self._asked.setdefault(canonicalize_name(one.name), []).append(one)
            if new := {canonicalize_name(one.name) for one in wanted} - set(self.chosen):
                self._choose(new, wanted)
            wanted = [following for one in wanted for following in self._follow(one)]

    def _choose(self, new: Set[str], wanted: Sequence[Requirement]) -> None:
        """Ask for ``new``, and in the same breath for what they probably bring along."""
        unknown = sorted(name for name in new if not self._accepted(name))
        if unknown:
            ahead = sorted(self._ahead(wanted) - new - set(self.chosen) - set(self._at_hand))
            for candidate in self._ask_with(list(map(self._requirement, unknown)), ahead):
                self._at_hand[canonicalize_name(candidate.name)] = candidate
        for name in new:
            self.chosen[name] = self._at_hand[name]

    def _ask_with(self, needed: Sequence[str], ahead: Sequence[str]) -> Iterable[Candidate]:
        if ahead:
            # what nobody may need after all does not have to be there
            with suppress(WheelMissingError):
                return self._ask([*needed, *ahead], self._narrowed)
        return self._ask(needed, self._narrowed)

    def _accepted(self, name: str) -> bool:
        """Whether a candidate that was asked for ahead is what is asked for now."""
        return name in self._at_hand and all(_accepts(one, self._at_hand[name]) for one in self._asked[name])

    def _ahead(self, wanted: Sequence[Requirement]) -> set[str]:
        """The projects that are guessed to be asked for next."""
        names: set[str] = set()
        while wanted:
            following = [
                each
                for one in wanted
                for each in map(Requirement, self._guess(canonicalize_name(one.name)) or ())
                if self._holds(each, "") or any(self._only_with(each, extra) for extra in one.extras)
            ]
            wanted = [each for each in following if canonicalize_name(each.name) not in names]
            names |= {canonicalize_name(each.name) for each in wanted}
        return names

    def unmet(self) -> list[str]:
        """What is asked for and not what was chosen."""
        return sorted(
            f"{name}{one.specifier}"
            for name, asked in self._asked.items()
            for one in asked
            if name != NAME and not _accepts(one, self.chosen[name])
        )

    def _requirement(self, name: str) -> str:
        specifiers = [str(one.specifier) for one in self._asked[name] if str(one.specifier)]
        return name + ",".join(dict.fromkeys(specifiers))

    def _follow(self, one: Requirement) -> Iterator[Requirement]:
        """What ``one`` brings along, by the markers, for each of its extras; once each."""
        name = canonicalize_name(one.name)
        for extra in ("", *sorted(one.extras)):
            if (name, extra) in self._followed:
                continue
            self._followed.add((name, extra))
            for text in self.chosen[name].requires:
                following = Requirement(text)
                wanted = self._only_with(following, extra) if extra else self._holds(following, "")
                if wanted:
                    yield following

    def _only_with(self, one: Requirement, extra: str) -> bool:
        return not self._holds(one, "") and self._holds(one, extra)

    def _holds(self, one: Requirement, extra: str) -> bool:
        return one.marker is None or one.marker.evaluate({**self._markers, "extra": extra})


def _accepts(one: Requirement, candidate: Candidate) -> bool:
    return one.specifier.contains(Version(candidate.version), prereleases=True)
