"""Two weeks of watching in less than a minute: hosts that go away, crashes anywhere, one result for each attempt."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.tasks.two_weeks import World

MINUTES = 14 * 24 * 60


class Weeks(RuleBasedStateMachine):
    """Anything that can happen, an hour at the most between two things."""

    minutes = 45
    """Until the next thing happens."""
    in_all = 0
    """Looks that are lived through at the least."""
    lived: ClassVar[list[int]] = []
    """Looks of every history that came to its end with all that was promised."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.patch = pytest.MonkeyPatch()

    @initialize(seed=st.integers(0, 2**32), by_event=st.booleans())
    def begin(self, seed: int, by_event: bool) -> None:
        # hypothesis begins with the simplest that there is, of which two weeks say nothing
        self.simplest = seed == 0
        self.world = World(self.folder, seed, by_event=by_event, patch=self.patch)

    @rule()
    def nothing_happens(self) -> None:
        self.pass_by()

    @rule(kind=st.sampled_from(["step", "zlab", "file", "latest"]), takes=st.integers(1, 9))
    def a_checkpoint_is_saved(self, kind: str, takes: int) -> None:
        self.world.save(kind, takes)
        self.pass_by()

    @rule(place=st.integers(0, 20))
    def a_checkpoint_is_deleted(self, place: int) -> None:
        self.world.delete(place)
        self.pass_by()

    @rule(what=st.sampled_from(["train", "infer", "prefect", "machine"]), minutes=st.integers(1, 40))
    def something_is_away(self, what: str, minutes: int) -> None:
        self.world.down(what, minutes)
        self.pass_by()

    @rule(hours=st.integers(2, 60))
    def the_machine_is_off_for_long(self, hours: int) -> None:
        self.world.down("machine", 60 * hours)
        self.pass_by()

    @rule(place=st.integers(0, 5))
    def a_flow_is_killed(self, place: int) -> None:
        self.world.kill(place)
        self.pass_by()

    @rule()
    def everything_here_is_killed(self) -> None:
        self.world.power_cut()
        self.pass_by()

    @rule(points=st.integers(0, 40))
    def the_watch_is_killed_at_any_point(self, points: int) -> None:
        self.world.points_left = points
        self.pass_by()

    @rule(requests=st.integers(0, 12))
    def the_link_goes_down_in_the_middle_of_a_look(self, requests: int) -> None:
        self.world.requests_left = requests
        self.pass_by()

    @rule()
    def prefect_loses_its_memory(self) -> None:
        self.world.runs.lose()
        self.pass_by()

    @rule()
    def the_inference_host_is_started_anew(self) -> None:
        self.world.reboot_inference()
        self.pass_by()

    @rule()
    def the_grant_ends_or_is_given(self) -> None:
        self.world.approved = not self.world.approved
        self.pass_by()

    @rule(seconds=st.sampled_from([-7200.0, -3600.0, -30.0, 30.0, 3600.0]))
    def the_clock_is_set(self, seconds: float) -> None:
        self.world.skew += seconds
        self.pass_by()

    @invariant()
    def one_result_one_start_one_night(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                # nobody looks while the machine is off
                while not self.simplest and (missing := self.in_all - self.world.looks) > 0:
                    self.world.minutes(missing)
                self.world.settle()
                self.lived.append(self.world.looks)
        finally:
            self.patch.undo()
            shutil.rmtree(self.folder)

    def pass_by(self) -> None:
        self.world.minutes(1 if self.simplest else self.minutes)


@contextmanager
def machine(**fields: int) -> Iterator[type[Weeks]]:
    """The machine with other ``fields``, and nothing lived yet."""
    yield type("Weeks", (Weeks,), {**fields, "lived": []})


BASE = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


def test_whatever_happens_every_checkpoint_gets_what_is_due_to_it() -> None:
    with machine(minutes=17) as weeks:
        run_state_machine_as_test(
            weeks,
            settings=settings(BASE, max_examples=5, stateful_step_count=15, derandomize=True, phases=(Phase.generate,)),
        )
    assert len(weeks.lived) >= 5


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute on a core of its own
def test_two_weeks_of_looks() -> None:
    with machine(minutes=60, in_all=MINUTES) as weeks:
        run_state_machine_as_test(
            weeks,
            settings=settings(BASE, max_examples=2, stateful_step_count=300, phases=(Phase.generate,)),
        )
    assert max(weeks.lived) >= MINUTES


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_happens_in_any_order() -> None:
    with machine(minutes=17) as weeks:
        run_state_machine_as_test(
            weeks, settings=settings(BASE, max_examples=40, stateful_step_count=25, phases=(Phase.generate,))
        )
    assert len(weeks.lived) >= 40
