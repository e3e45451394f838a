import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.metrics import (
    STREAK_WIDTHS,
    NoRoundsError,
    Round,
    TreeRound,
    acceptance_by_position,
    accepted_by_position,
    accuracy_by_position,
    by_prompt,
    compare,
    conditional_by_position,
    histogram,
    interval,
    judge,
    mean_streak,
    speedup,
    streak,
    summarize,
    tau,
    tau_pooled,
)


def walk_text(prompt: str, completion: list[int], draft_of: "Drafts", block_size: int) -> list[Round]:
    """The walk over one completion, written as serving does it: a token at a time, no shared code."""
    rounds, emitted = [], 1
    while emitted < len(completion):
        drafted, ranks = draft_of(emitted - 1)
        one = judge(prompt, emitted - 1, drafted, ranks, completion[emitted : emitted + block_size])
        rounds.append(one)
        emitted += one.advance
    return rounds


class Drafts:
    """Seeded drafts over a completion: each slot right with some probability, with a rank to match."""

    def __init__(self, completion: list[int], block_size: int, right: list[bool], ranks: list[int]) -> None:
        self.completion, self.block_size, self.right, self.ranks = completion, block_size, right, ranks

    def __call__(self, anchor: int) -> tuple[list[int], list[int]]:
        drafted, ranks = [], []
        for slot in range(1, self.block_size):
            place = anchor * self.block_size + slot
            right = self.right[place % len(self.right)]
            wanted = self.completion[anchor + slot] if anchor + slot < len(self.completion) else 0
            drafted.append(wanted if right else wanted + 1)
            ranks.append(0 if right else 1 + self.ranks[place % len(self.ranks)])
        return drafted, ranks


# Three rounds of block 4 over the completion 10 11 12 13 14 15 16 (anchor positions within it), worked out by hand:
#   anchor 10: drafts 11 12 99 -> 2 accepted, bonus 13, advance 3
#   anchor 13: drafts 99 15 16 -> 0 accepted, bonus 14, advance 1
#   anchor 14: drafts 15 16 99 -> only two slots inside, both accepted, the bonus lies beyond the end: advance 2, cut
ROUNDS = [
    judge("a", 0, [11, 12, 99], [0, 0, 5], [11, 12, 13, 14]),
    judge("a", 3, [99, 15, 16], [1, 0, 0], [14, 15, 16]),
    judge("a", 4, [15, 16, 99], [0, 0, 9], [15, 16]),
]
# A second prompt: completion 20 21 22, one round, everything right up to a bonus inside: 1 accepted, advance 2.
OTHER = [judge("b", 0, [21, 99, 99], [0, 3, 1], [21, 22])]


def test_a_round_over_the_end_is_cut_and_its_slots_beyond_are_none():
    last = ROUNDS[2]
    assert (last.accepted, last.advance, last.cut) == (2, 2, True)
    assert last.right == (15, 16, None)
    assert last.rank_of_right == (0, 0, None)
    assert last.drafted == (15, 16, 99)


def test_a_last_round_whose_bonus_is_the_last_token_is_not_cut():
    assert (OTHER[0].accepted, OTHER[0].advance, OTHER[0].cut) == (1, 2, False)


def test_a_full_block_right_at_the_end_is_cut_by_its_bonus():
    one = judge("a", 0, [1, 2, 3], [0, 0, 0], [1, 2, 3])
    assert (one.accepted, one.advance, one.cut) == (3, 3, True)


def test_advances_add_up_to_the_tokens_without_the_first():
    assert [one.advance for one in ROUNDS] == [3, 1, 2]
    assert sum(one.advance for one in ROUNDS) == 7 - 1


def test_pooled_and_macro_tau():
    assert tau_pooled(ROUNDS[1:] + OTHER) == (1 + 2 + 2) / 3
    both = tau(by_prompt(ROUNDS[1:] + OTHER), seed=0)
    assert both.pooled == (1 + 2 + 2) / 3
    assert both.macro == ((1 + 2) / 2 + 2) / 2


def test_positions_count_only_slots_inside_the_completion():
    rounds = ROUNDS + OTHER
    # Inside: slot 1 in 4 rounds, slot 2 in 4, slot 3 in 2 (the first two of prompt a).
    assert accepted_by_position(rounds) == [3, 2, 0]
    assert acceptance_by_position(rounds) == [3 / 4, 2 / 4, 0 / 2]
    # Slot 3 inside with slots 1 and 2 accepted: the first round only.
    assert conditional_by_position(rounds) == [3 / 4, 2 / 3, 0 / 1]
    # Right whatever came before: slot 2 in all but b's, slot 3 in the second round.
    assert accuracy_by_position(rounds) == [3 / 4, 3 / 4, 1 / 2]


def test_a_position_beyond_the_end_is_in_no_denominator():
    rounds = [judge("a", 0, [1, 2, 3], [0, 0, 0], [1, 2, 3, 4]), judge("b", 0, [1, 2, 3], [0, 0, 0], [1])]
    assert accepted_by_position(rounds) == [2, 1, 1]
    assert acceptance_by_position(rounds) == [1.0, 1.0, 1.0]
    assert conditional_by_position(rounds) == [1.0, 1.0, 1.0]
    assert accuracy_by_position(rounds) == [1.0, 1.0, 1.0]


def test_a_position_no_round_reaches_has_no_figure():
    rounds = [judge("a", 0, [1, 2, 3], [0, 0, 0], [1])]
    assert acceptance_by_position(rounds) == [1.0, None, None]
    assert conditional_by_position(rounds) == [1.0, None, None]
    assert accuracy_by_position(rounds) == [1.0, None, None]


def test_histogram_has_an_entry_for_every_advance():
    assert histogram(ROUNDS + OTHER) == [1, 2, 1, 0]


def test_streak_is_drafts_only_and_ends_at_the_first_slot_outside_the_width():
    one = judge("a", 0, [1, 9, 9], [0, 3, 8], [1, 2, 3, 4])
    assert [streak(one, width) for width in (1, 2, 4, 8, 16)] == [1, 1, 2, 2, 3]


def test_summary_puts_every_figure_under_its_name():
    metrics = summarize(ROUNDS + OTHER, OTHER, {}, seed=0)
    assert metrics.tau.pooled == 2.0
    assert (metrics.rounds, metrics.tokens, metrics.cut_rounds) == (4, 10, 1)
    assert metrics.streak["1"] == (2 + 0 + 2 + 1) / 4
    assert metrics.random_anchor_tau == 2.0
    assert summarize(ROUNDS, [], {}, seed=0).random_anchor_tau is None


def test_no_round_is_an_error_of_its_own():
    with pytest.raises(NoRoundsError, match="longer than one token"):
        summarize([], [], {}, seed=0)


def test_interval_needs_two_prompts_and_is_seeded():
    assert interval(by_prompt(ROUNDS), seed=0) is None
    many = [judge(str(place), 0, [1, 2 + place % 2, 3], [0, 0, 0], [1, 2, 3, 4]) for place in range(40)]
    low, high = interval(by_prompt(many), seed=1)
    assert (low, high) == interval(by_prompt(many), seed=1)
    assert low < tau_pooled(many) == 3.0 < high
    # 40 prompts, half with advance 4 and half with 2: standard error 1/sqrt(40).
    assert high - low == pytest.approx(2 * 1.96 / 40**0.5, rel=0.1)


def test_comparison_is_paired_by_prompt_not_by_order():
    ours = [judge(str(place), 0, [1, 2 + place % 2], [0, 0], [1, 2, 3]) for place in range(20)]
    same = compare(by_prompt(ours), by_prompt(ours[::-1]), seed=0)
    assert (same.difference, same.ci95, same.prompts) == (0.0, (0.0, 0.0), 20)
    worse = [judge(str(place), 0, [9, 9], [0, 0], [1, 2, 3]) for place in range(20)]
    assert compare(by_prompt(ours), by_prompt(worse), seed=0).ci95[0] > 0


def test_a_verdict_needs_64_prompts_and_an_interval_beside_zero():
    def alike(prompts: int, right: int) -> dict[str, tuple[int, int]]:
        return {str(place): (right + place % 2, 1) for place in range(prompts)}

    def verdict(ours: dict[str, tuple[int, int]], theirs: dict[str, tuple[int, int]]) -> str:
        return compare(ours, theirs, seed=0).verdict

    assert verdict(alike(64, 3), alike(64, 2)) == "better"
    assert verdict(alike(64, 2), alike(64, 3)) == "worse"
    assert verdict(alike(64, 2), alike(64, 2)) == "no difference shown"
    assert verdict(alike(63, 3), alike(63, 2)) == "too few prompts"
    # As many prompts gain as lose.
    swapped = {prompt: (5 - advance, 1) for prompt, (advance, _) in alike(64, 2).items()}
    assert verdict(alike(64, 2), swapped) == "no difference shown"


def test_speedup_is_what_a_round_saves_over_plain_steps():
    assert speedup(4.0, draft=1.0, verify=3.0, step=2.0).expected == 4.0 * 2.0 / (1.0 + 3.0)


def test_each_tree_has_its_own_walk_in_the_summary():
    trees = {8: [TreeRound("a", 0, 3, 4), TreeRound("a", 4, 1, 2)], 16: [TreeRound("a", 0, 5, 6)]}
    assert summarize(ROUNDS, [], trees, seed=0).ddtree == {"8": 3.0, "16": 6.0}
    assert summarize(ROUNDS, [], {}, seed=0).ddtree is None


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[list[int]], list[Round], int]:
    block_size = draw(st.integers(2, 9))
    completions = draw(st.lists(st.lists(st.integers(0, 50), min_size=2, max_size=40), min_size=1, max_size=4))
    right = draw(st.lists(st.booleans(), min_size=1, max_size=60))
    ranks = draw(st.lists(st.integers(0, 80), min_size=1, max_size=60))
    rounds = [
        one
        for place, completion in enumerate(completions)
        for one in walk_text(str(place), completion, Drafts(completion, block_size, right, ranks), block_size)
    ]
    return completions, rounds, block_size


@given(walks())
def test_figures_agree_with_each_other(walked):
    completions, rounds, block_size = walked
    metrics = summarize(rounds, [], {}, seed=0)
    assert sum(one.advance for one in rounds) == sum(len(completion) - 1 for completion in completions)
    assert metrics.tokens == sum(map(len, completions))
    assert metrics.tau.pooled == (metrics.tokens - len(completions)) / metrics.rounds
    assert 1 <= metrics.tau.pooled <= block_size
    assert sum(metrics.histogram) == metrics.rounds == len(rounds)
    assert sum(place * count for place, count in enumerate(metrics.histogram, 1)) == metrics.tokens - len(completions)
    assert metrics.tau.pooled == pytest.approx(metrics.streak["1"] + 1 - metrics.cut_rounds / metrics.rounds)
    assert sum(metrics.accepted_by_position) == sum(one.accepted for one in rounds)
    assert metrics.accepted_by_position == sorted(metrics.accepted_by_position, reverse=True)
    # A cut round is its prompt's last.
    last = {one.prompt: one for one in rounds}
    assert all(one is last[one.prompt] for one in rounds if one.cut)


@given(walks())
def test_streak_grows_with_its_width(walked):
    _, rounds, _ = walked
    for one in rounds:
        lengths = [streak(one, width) for width in STREAK_WIDTHS]
        assert lengths == sorted(lengths)
        assert lengths[0] == one.accepted


@given(st.lists(st.integers(0, 50), min_size=2, max_size=60), st.integers(2, 9))
def test_an_oracle_drafter_advances_by_whole_blocks(completion, block_size):
    oracle = Drafts(completion, block_size, [True], [0])
    rounds = walk_text("a", completion, oracle, block_size)
    assert all(one.advance == block_size for one in rounds[:-1])
    assert mean_streak(rounds[:-1], 1) == block_size - 1 if rounds[:-1] else True
    assert len(rounds) == -(-(len(completion) - 1) // block_size)
