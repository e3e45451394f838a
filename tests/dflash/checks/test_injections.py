"""Each check passes on a clean pair and fails on the fault it is there to find, planted in what is measured."""

import re
from dataclasses import replace

import pytest
import torch

from dflash.checks import CHECKS, all_checks
from dflash.metrics import tau_pooled
from tests.dflash.checks.bench import Bench, tiny_bench
from tests.dflash.checks.injections import IN_THE_PATH, INJECTIONS, Injection, four_taps_of_five
from tests.dflash.checks.mutate import mutate

WHAT_TO_DO = re.compile(r"\b(look|load|give|take|train|compare|mend|expand|serve|copy|must|use|name)\b")


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    directory = tmp_path_factory.mktemp("benches")
    return {kind: tiny_bench(kind, directory) for kind in ("dense", "hybrid")}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    directory = tmp_path_factory.mktemp("half")
    return {kind: tiny_bench(kind, directory, dtype=torch.bfloat16) for kind in ("dense", "hybrid")}


def name(injection: Injection) -> str:
    return f"{injection.check}: {injection.title}"


@pytest.mark.parametrize("injection", INJECTIONS, ids=name)
def test_the_fault_is_found_and_only_the_fault(injection: Injection, benches: dict[str, Bench]) -> None:
    clean, spoiled = injection.clean(benches[injection.pair]), injection.spoiled(benches[injection.pair])
    assert (clean.name, clean.status) == (injection.check, "pass"), clean.explanation
    assert (spoiled.name, spoiled.status) == (injection.check, "fail"), spoiled.explanation
    assert WHAT_TO_DO.search(spoiled.explanation), spoiled.explanation


@pytest.mark.slow
@pytest.mark.parametrize("injection", INJECTIONS, ids=name)
def test_the_fault_is_found_in_bfloat16(injection: Injection, half: dict[str, Bench]) -> None:
    clean, spoiled = injection.clean(half[injection.pair]), injection.spoiled(half[injection.pair])
    assert clean.status == "pass", clean.explanation
    assert spoiled.status == "fail", spoiled.explanation


def test_the_anchor_in_the_context_is_found_though_no_tau_tells(
    benches: dict[str, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the leak τ does not fall on either pair; only perturbing the states shows it."""
    clean = {kind: bench.evidence() for kind, bench in benches.items()}
    mutate(monkeypatch, *IN_THE_PATH["context with the anchor"])
    for kind, bench in benches.items():
        leaking = replace(bench, memo={}).evidence()
        assert tau_pooled(leaking.rounds) >= tau_pooled(clean[kind].rounds)
        assert CHECKS["context-strictly-before-anchor"](leaking).status == "fail"


def test_a_self_consistent_drafter_with_a_tap_less_fails_by_its_taps_alone(benches: dict[str, Bench]) -> None:
    whole = benches["dense"]
    less = four_taps_of_five(pytest.MonkeyPatch(), whole)
    for bench in (less, replace(less, reference=whole.checkpoint)):
        found = all_checks(bench.evidence())
        assert [check.name for check in found if check.status == "fail"] == ["taps-as-reference"]
        assert "tap 5 is missing" in next(check.explanation for check in found if check.status == "fail")


def test_each_of_the_eight_faults_has_an_injection() -> None:
    assert {injection.fault for injection in INJECTIONS} - {""} == set("12345678")
