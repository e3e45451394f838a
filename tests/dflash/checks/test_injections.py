"""Each check passes on a clean pair and fails on the fault it is there to find, planted in what is measured."""

import pytest
import torch

from tests.dflash.checks.bench import Bench, tiny_bench
from tests.dflash.checks.injections import INJECTIONS, Injection


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


@pytest.mark.slow
@pytest.mark.parametrize("injection", INJECTIONS, ids=name)
def test_the_fault_is_found_in_bfloat16(injection: Injection, half: dict[str, Bench]) -> None:
    clean, spoiled = injection.clean(half[injection.pair]), injection.spoiled(half[injection.pair])
    assert clean.status == "pass", clean.explanation
    assert spoiled.status == "fail", spoiled.explanation


def test_each_of_the_eight_faults_has_an_injection() -> None:
    assert {injection.fault for injection in INJECTIONS} - {""} == set("12345678")
