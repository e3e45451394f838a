import json
import os
from datetime import UTC, datetime

import pytest

from dflash.metrics import by_prompt, compare, judge, summarize
from dflash.pages import report_page
from dflash.render import to_markdown
from dflash.report import Check, CheckpointInfo, PromptResult, Report, ReportError, Settings, TargetInfo, read_report

ROUNDS = [
    judge("a", 0, [1, 2, 3], [0, 0, 0], [1, 2, 3, 4]),
    judge("a", 4, [5, 9, 9], [0, 1, 2], [5, 6]),
    judge("b", 0, [9, 9, 9], [1, 1, 1], [5]),
]
REFERENCE = [judge("a", 0, [9, 9, 9], [4, 4, 4], [1, 2, 3, 4]), judge("b", 0, [9, 9, 9], [4, 4, 4], [5])]


@pytest.fixture
def report():
    return Report(
        created=datetime(2026, 2, 6, tzinfo=UTC),
        valid=True,
        invalid_because=[],
        checkpoint=CheckpointInfo(path="step_400.pt", sha256="00", format="pt", step=400, config_source="key config"),
        target=TargetInfo.model_validate(
            {"path": "t", "class": "C", "tensors": 3, "kernel": "torch", "dtype": "float32", "fingerprint": "11"}
        ),
        settings=Settings(
            mode="replay",
            max_new_tokens=96,
            ignore_eos=False,
            thinking=None,
            block_size=4,
            mask_token_id=1,
            target_layer_ids=[1, 3],
            prompts="p.jsonl",
            prompts_sha256="22",
            num_prompts=2,
            max_blocks=None,
            completions="target",
            completion_agreement=1.0,
            device="cpu",
            seed=0,
        ),
        versions={"torch": "2"},
        metrics=summarize(ROUNDS, [], {}, seed=0),
        prompts=[PromptResult(id="a|b\nc", text="x", tokens=7, rounds=2, tau=3.0, token_ids=[1, 2])],
        checks=[Check(name="fc-shape", status="pass", measured=96, limit=96, explanation="fits")],
        timings={"blocks": 0.5},
    )


def with_reference(report):
    return report.model_copy(
        update={
            "reference_metrics": summarize(REFERENCE, [], {}, seed=0),
            "comparison": compare(by_prompt(ROUNDS), by_prompt(REFERENCE), seed=0),
        }
    )


def test_a_report_survives_the_file(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(with_reference(report).to_json())
    assert read_report(path) == with_reference(report)


def test_the_file_has_the_agreed_names(report):
    raw = json.loads(report.to_json())
    assert raw["schema"] == 2
    assert raw["target"]["class"] == "C"
    assert set(raw) == {
        *("schema", "created", "valid", "invalid_because", "checkpoint", "training", "relay", "target", "reference"),
        *("settings", "versions", "metrics", "reference_metrics", "comparison", "prompts", "checks", "timings"),
        *("served", "left_out", "token_texts"),
    }
    assert set(raw["metrics"]) == {
        *("tau", "rounds", "tokens", "cut_rounds", "lossless_prompts", "accepted_by_position"),
        *("acceptance_by_position", "conditional_by_position", "accuracy_by_position", "histogram", "streak"),
        *("ddtree", "random_anchor_tau", "speedup"),
    }
    assert list(raw["metrics"]["streak"]) == ["1", "2", "4", "8", "16", "64"]
    assert raw["metrics"]["ddtree"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has schema None"),
        ('{"schema": 3}', "has schema 3, this version reads 1 to 2"),
        ('{"schema": 1}', "created: Field required"),
    ],
)
def test_what_is_no_report_is_named(tmp_path, content, message):
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(ReportError, match=message):
        read_report(path)


def test_a_missing_report_is_named(tmp_path):
    with pytest.raises(ReportError, match="No such file"):
        read_report(tmp_path / "report.json")


def test_the_headline_puts_the_number_beside_the_reference(report):
    assert report.headline().startswith("τ 2.333 [")
    line = with_reference(report).headline()
    assert "reference 1.000 [1.000, 1.000]" in line
    assert "difference +1.333 [+0.000" in line


def test_a_report_that_is_not_valid_says_so_and_gives_no_number(report):
    invalid = report.model_copy(update={"valid": False, "invalid_because": ["fc-shape", "tap-source"]})
    assert invalid.headline() == "not valid: fc-shape, tap-source"
    assert to_markdown(invalid).startswith("# not valid: fc-shape, tap-source\n")


def test_the_markdown_says_what_the_headline_leaves_out(report):
    plain = to_markdown(report)
    for words in ("less the reference's", "only the first", "streamed"):
        assert words not in plain
    settings = report.settings.model_copy(update={"max_blocks": 2, "offload": True})
    text = to_markdown(with_reference(report).model_copy(update={"settings": settings}))
    said = "τ pooled less the reference's: +1.333, 95 % interval 0.000 … 2.000 by a bootstrap over 2 prompts, the same"
    assert said in text
    assert " for both: too few prompts." in text
    assert "at most 96 tokens, only the first 2 rounds of each" in text
    assert "float32, cpu, layers streamed from its files)" in text


def test_the_markdown_tables_are_whole(report):
    text = to_markdown(with_reference(report))
    assert "| τ pooled | 2.333 | 1.000 | Σ advance / rounds over all prompts; the bonus token counts |" in text
    assert "| fc-shape | pass | 96 | 96 | fits |" in text
    assert "| a\\|b\\nc | 7 | 2 | 3.000 |" in text
    for block in text.split("\n\n"):
        rows = [line.replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


def test_a_report_of_the_first_schema_is_migrated(report, tmp_path):
    raw = json.loads(report.to_json()) | {"schema": 1}
    del raw["token_texts"], raw["prompts"][0]["reference_tau"]
    (tmp_path / "report.json").write_text(json.dumps(raw))
    read = read_report(tmp_path / "report.json")
    assert (read.schema_version, read.token_texts, read.prompts[0].reference_tau) == (2, {}, None)
    assert read == report


def test_figures_that_are_no_numbers_are_missing_and_a_headline_without_one_is_no_report(report, tmp_path):
    path = tmp_path / "report.json"
    raw = json.loads(report.to_json())
    raw["metrics"]["streak"]["8"] = raw["metrics"]["accuracy_by_position"][1] = float("nan")
    raw["metrics"]["random_anchor_tau"] = float("inf")
    path.write_text(json.dumps(raw))
    metrics = read_report(path).metrics
    assert (metrics.streak["8"], metrics.accuracy_by_position[1], metrics.random_anchor_tau) == (None, None, None)
    raw["metrics"]["tau"]["pooled"] = float("nan")
    path.write_text(json.dumps(raw))
    with pytest.raises(ReportError, match=r"metrics\.tau\.pooled: Input should be a valid number"):
        read_report(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("settings.block_size", 0),
        ("settings.block_size", 10**9),
        ("settings.seed", -1),
        ("metrics.histogram", [10**400]),
        ("metrics.rounds", -1),
        ("metrics.streak", {"x": 1.0}),
        ("metrics.ddtree", {"0": 1.0}),
        ("metrics.tau.pooled", -1e308),
        ("metrics.tau.macro", 1e308),
        ("prompts.0.tau", 1e308),
        ("prompts.0.reference_tau", -1.0),
    ],
)
def test_an_edited_figure_that_nothing_could_have_measured_is_named(report, tmp_path, place, value):
    raw = json.loads(report.to_json())
    *folders, key = place.split(".")
    part = raw
    for folder in folders:
        part = part[int(folder) if folder.isdigit() else folder]
    part[key] = value
    (tmp_path / "report.json").write_text(json.dumps(raw))
    with pytest.raises(ReportError, match=place.replace(".", r"\.")):
        read_report(tmp_path / "report.json")


def test_a_path_that_is_no_text_survives_the_file(report, tmp_path):
    odd = report.checkpoint.model_copy(update={"path": os.fsdecode(b"/runs/\xff/step_4")})
    odd = report.model_copy(update={"checkpoint": odd})
    (tmp_path / "report.json").write_text(odd.to_json(), encoding="utf-8")
    assert read_report(tmp_path / "report.json") == odd
    to_markdown(odd).encode()
    report_page(odd).encode()


def test_figures_that_contradict_each_other_are_shown_all_the_same(report):
    edited = report.metrics.model_copy(update={"rounds": 0})
    shown = to_markdown(report.model_copy(update={"metrics": edited}))
    assert "| 1 | " in shown
    report_page(report.model_copy(update={"metrics": edited}))


def test_a_time_without_a_zone_is_utc(report, tmp_path):
    (tmp_path / "report.json").write_text(report.to_json().replace("2026-02-06T00:00:00Z", "2026-02-06T00:00:00"))
    assert read_report(tmp_path / "report.json").created == report.created
