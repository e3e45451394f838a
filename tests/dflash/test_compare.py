"""Two reports compared: what the difference is, and which reports must not be compared."""

import json

import pytest

from dflash.compare import NotComparableError, compare_reports
from dflash.metrics import NoRoundsError, by_prompt, judge, summarize
from dflash.report import CheckpointInfo, PromptResult, Report, Settings, TargetInfo


def report_of(right, *, prompts=64, **changes):
    """A report in which prompt i accepts ``right + i % 2`` of three drafts in its only round."""
    rounds = [
        judge(str(place), 0, [1 if slot < right + place % 2 else 9 for slot in range(3)], [0, 0, 0], [1, 1, 1, 1])
        for place in range(prompts)
    ]
    totals = by_prompt(rounds)
    made = Report.model_validate(
        {
            "created": "2026-02-06T00:00:00Z",
            "valid": True,
            "invalid_because": [],
            "checkpoint": CheckpointInfo(path=f"right{right}", sha256="0", format="pt", step=3, config_source="x"),
            "target": TargetInfo.model_validate(
                {"path": "t", "class": "C", "tensors": 1, "kernel": "torch", "dtype": "float32", "fingerprint": "f"}
            ),
            "settings": Settings(
                mode="replay",
                max_new_tokens=5,
                ignore_eos=False,
                thinking=None,
                block_size=4,
                mask_token_id=1,
                target_layer_ids=[1],
                prompts="p",
                prompts_sha256="2",
                num_prompts=prompts,
                max_blocks=None,
                completions="target",
                completion_agreement=1.0,
                device="cpu",
                seed=0,
            ),
            "versions": {"torch": "2"},
            "metrics": summarize(rounds, [], {}, seed=0),
            "prompts": [
                PromptResult(id=id, text="x", tokens=5, rounds=count, tau=advance / count, token_ids=[1] * 5)
                for id, (advance, count) in totals.items()
            ],
            "checks": [],
            "timings": {},
        }
    )
    return changed(made, **changes)


def changed(report, **changes):
    """The report with fields of it, of its settings or of its target changed."""
    for name, value in changes.items():
        where = next(
            (part for part in ("settings", "target") if name in type(getattr(report, part)).model_fields), None
        )
        if where is None:
            report = report.model_copy(update={name: value})
        else:
            report = report.model_copy(update={where: getattr(report, where).model_copy(update={name: value})})
    return report


def test_the_difference_is_the_first_less_the_second():
    better = compare_reports(report_of(2), report_of(1))
    assert better.comparison.difference == 1.0
    assert better.comparison.verdict == "better"
    assert compare_reports(report_of(1), report_of(2)).comparison.verdict == "worse"
    assert compare_reports(report_of(1), report_of(1)).comparison.verdict == "no difference shown"
    assert better.headline() == "better: τ +1.000 [+1.000, +1.000] over 64 prompts"


def test_few_prompts_give_the_difference_and_no_verdict():
    result = compare_reports(report_of(2, prompts=63), report_of(1, prompts=63))
    assert (result.comparison.difference, result.comparison.verdict) == (1.0, "too few prompts")
    assert "64 are needed" in result.headline()


def test_each_prompt_stands_beside_itself():
    [first, second, *_] = compare_reports(report_of(2), report_of(1)).prompts
    assert (first.id, first.ours, first.theirs, first.same_completion) == ("0", 3.0, 2.0, True)
    assert (second.id, second.ours, second.theirs) == ("1", 4.0, 3.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompts_sha256": "3"}, "different prompt sets"),
        ({"mode": "decode"}, r"different modes \(replay and decode\)"),
        ({"fingerprint": "g"}, r"different targets \(f and g\)"),
        ({"block_size": 8}, r"different block sizes \(4 and 8\)"),
        ({"thinking": True}, "different thinking modes"),
        ({"max_new_tokens": 6}, r"different completion lengths \(5 and 6\)"),
        ({"ignore_eos": True}, r"different ends of a completion \(--ignore-eos\) \(False and True\)"),
        ({"max_blocks": 3}, r"different limits of rounds \(--max-blocks\) \(None and 3\)"),
        ({"temperature": 0.5, "sampler": "rejection"}, r"\(greedy at temperature 0 and rejection at temperature 0.5\)"),
        ({"valid": False, "invalid_because": ["tap-source"]}, r"second report is not valid \(tap-source\)"),
    ],
)
def test_reports_of_different_things_are_refused_with_the_reason(change, says):
    with pytest.raises(NotComparableError, match=says):
        compare_reports(report_of(1), report_of(1, **change))


def test_another_part_of_the_same_prompt_file_is_another_prompt_set():
    with pytest.raises(NotComparableError, match="different prompt sets"):
        compare_reports(report_of(1, prompts=64), report_of(1, prompts=65))


def test_what_may_differ_is_said():
    other = report_of(1, kernel="fla", completions="http://server")
    other = other.model_copy(update={"prompts": [one.model_copy(update={"token_ids": [2]}) for one in other.prompts]})
    notes = compare_reports(report_of(1), other).notes
    assert "kernel: torch and fla" in notes
    assert any("64 of 64 prompts have different completions" in note for note in notes)


def test_reports_without_a_prompt_in_common_are_refused():
    none = [one.model_copy(update={"tau": None, "rounds": 0}) for one in report_of(1).prompts]
    with pytest.raises(NoRoundsError, match="nothing to compare"):
        compare_reports(report_of(1), report_of(1).model_copy(update={"prompts": none}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tau": float("nan")}, "prompts.0: Value error, tau is null where there is no round, and only there"),
        ({"tau": float("inf")}, "prompts.0: Value error, tau is null where there is no round, and only there"),
        ({"tau": "1e999"}, "prompts.0.tau: Input should be a finite number"),
        ({"tau": -1.0}, "prompts.0.tau: Input should be greater than or equal to 0"),
        ({"rounds": -1}, "prompts.0.rounds: Input should be greater than or equal to 0"),
        ({"rounds": 0}, "prompts.0: Value error, tau is null where there is no round, and only there"),
        ({"tau": None}, "prompts.0: Value error, tau is null where there is no round, and only there"),
    ],
)
def test_a_report_with_figures_that_cannot_be_is_refused(run_dflash, tmp_path, change, says):
    (tmp_path / "whole").write_text(report_of(1).to_json())
    raw = json.loads(report_of(1).to_json())
    raw["prompts"][0] |= change
    (tmp_path / "damaged").write_text(json.dumps(raw).replace('"1e999"', "1e999"))
    done = run_dflash("compare", tmp_path / "damaged", tmp_path / "whole")
    assert (done.returncode, done.out) == (1, "")
    assert says in done.err


def test_a_report_from_before_there_were_verdicts_is_still_read(run_dflash, tmp_path):
    report = report_of(1)
    raw = json.loads(report.to_json())
    del raw["metrics"]["speedup"]
    raw |= {"reference_metrics": raw["metrics"], "comparison": {"difference": 0.5, "ci95": None, "prompts": 64}}
    for name in ("temperature", "sampler", "served_model", "retokenized", "offload"):
        del raw["settings"][name]
    for name in ("served", "left_out"):
        del raw[name]
    (tmp_path / "old").write_text(json.dumps(raw))
    (tmp_path / "new").write_text(report.to_json())
    done = run_dflash("compare", tmp_path / "old", tmp_path / "new")
    assert done.returncode == 0, done.err
    assert done.out.splitlines()[-1].startswith("no difference shown: ")


def test_the_command_prints_the_verdict_and_as_json_the_whole_result(run_dflash, tmp_path):
    for name, right in (("a", 2), ("b", 1)):
        (tmp_path / name).write_text(report_of(right).to_json())
    shown = run_dflash("compare", tmp_path / "a", tmp_path / "b")
    assert shown.returncode == 0
    assert shown.out.splitlines()[-1] == "better: τ +1.000 [+1.000, +1.000] over 64 prompts"
    raw = json.loads(run_dflash("compare", tmp_path / "a", tmp_path / "b", "--json").out)
    assert raw["comparison"]["verdict"] == "better"
    (tmp_path / "b").write_text(report_of(1, block_size=8).to_json())
    refused = run_dflash("compare", tmp_path / "a", tmp_path / "b")
    assert (refused.returncode, refused.out) == (1, "")
    assert refused.err.startswith("error: the reports have different block sizes")
