"""What becomes of a report's files: pages without a browser, rounds that do not fit, pictures, and the commands."""

import json
import re
import struct
import sys
from pathlib import Path

import pytest

from dflash.compare import NotComparableError, compare_reports
from dflash.pages import comparison_page, report_page
from dflash.pages.document import document
from dflash.pages.markup import Html, tag, text
from dflash.pages.report_record import command
from dflash.pages.rounds_view import commonest_misses, misses_by_rank
from dflash.plots import NoPlotsError, comparison_plots, report_plots
from dflash.report import read_report
from dflash.rounds_file import RoundsError, read_rounds
from tests.dflash.pages.reports import WRONG, made, words, write
from tests.dflash.pairs import write_drafter, write_prompts, write_target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A report with its rounds."""
    write(tmp_path, *made({"a": words(30), "b": words(25, start=9)}))
    return tmp_path


def changed_line(folder: Path, number: int, **changes: object) -> None:
    path = folder / "rounds.jsonl"
    lines = path.read_text().splitlines()
    lines[number] = json.dumps(json.loads(lines[number]) | changes)
    path.write_text("\n".join(lines) + "\n")


def test_rounds_survive_the_file(folder: Path) -> None:
    _, rounds = made({"a": words(30), "b": words(25, start=9)})
    assert read_rounds(folder / "rounds.jsonl", read_report(folder / "report.json")) == rounds


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), r"rounds\.jsonl:\d+: Invalid JSON"),
        (lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:-1])), "rounds here and"),
        (lambda path: path.write_bytes(b""), "has no rounds here"),
        (lambda path: changed_line(path.parent, 1, prompt="c"), "in the report, or another τ"),
        (lambda path: changed_line(path.parent, 1, anchor=99), "does not fit the report's completion"),
        (lambda path: changed_line(path.parent, 1, right=[9] * 7), "does not fit the report's completion"),
        (lambda path: changed_line(path.parent, 1, drafted=[1]), "does not fit the report's completion"),
        (lambda path: changed_line(path.parent, 1, accepted="many"), r"rounds\.jsonl:2: accepted"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    ],
)
def test_rounds_that_are_not_the_reports_are_refused(run_dflash, folder: Path, damage, says: str) -> None:
    damage(folder / "rounds.jsonl")
    with pytest.raises(RoundsError, match=says):
        read_rounds(folder / "rounds.jsonl", read_report(folder / "report.json"))
    done = run_dflash("report", "html", folder)
    assert done.returncode == 1
    assert done.err.startswith("error: ")
    assert not (folder / "report.html").exists()


def test_a_report_without_its_rounds_still_has_a_page(run_dflash, folder: Path) -> None:
    (folder / "rounds.jsonl").unlink()
    done = run_dflash("report", "html", folder / "report.json")
    assert (done.returncode, done.out) == (0, f"{folder / 'report.html'}\n")
    assert "completions are plain text" in (folder / "report.html").read_text()


def test_the_page_asks_the_network_for_nothing_and_runs_only_its_own_scripts(folder: Path) -> None:
    page = report_page(*made({"a": words(30)}))
    assert re.findall(r"(?:src|href)=\"(?!#|data:)[^\"]*", page) == []
    assert not re.search(r"@import|url\((?!data:)", page)
    policy = re.search(r"Content-Security-Policy\" content=\"([^\"]*)", page)
    assert policy is not None
    assert "default-src &#x27;none&#x27;" in policy[1]
    assert policy[1].count("sha256-") == page.count("<script>") == 3


def test_text_cannot_become_markup_and_data_cannot_end_its_block() -> None:
    assert tag("b", "<i>&", title='"x"') == '<b title="&quot;x&quot;">&lt;i&gt;&amp;</b>'
    assert text("a\u202eb\nc") == "a\\u202eb\\nc"
    page = document("t", Html(""), scripts=[], data={"x": ["</script>", "<!--", float("nan"), "\ud800"]})
    assert page.count("</script>") == 1
    assert "null" in page
    page.encode()


def test_misses_are_counted_by_the_place_of_the_right_token() -> None:
    _, rounds = made({"a": words(60)})
    wrong = [
        (one.right[one.accepted], one.rank_of_right[one.accepted])
        for one in rounds
        if one.accepted < 7 and one.right[one.accepted] is not None
    ]
    bins = dict(misses_by_rank(rounds))
    assert sum(bins.values()) == len(wrong)
    assert bins["2"] == sum(rank == 1 for _, rank in wrong)
    assert bins["17–64"] == sum(16 <= rank <= 63 for _, rank in wrong)
    (first, *_) = commonest_misses(rounds, 50)
    assert first.drafted == WRONG
    assert first.count == max([token for token, _ in wrong].count(token) for token, _ in wrong)


def test_the_command_that_measures_again_is_understood(run_dflash) -> None:
    report, _ = made({"a": words(30)})
    said = command(report.model_copy(update={"settings": report.settings.model_copy(update={"ignore_eos": True})}))
    assert said.startswith("dflash evaluate --target t --checkpoint runs/step_400 ")
    done = run_dflash(*said.split()[1:])
    assert done.returncode == 2
    assert "'--target'" in done.err, "the target is all that is wrong with it here"


def test_the_command_that_measures_again_asks_the_same_prompts() -> None:
    report, _ = made({"a": words(30), "b": words(30)})
    assert " --num-prompts 2 " in command(report)
    overlapping = report.model_copy(update={"left_out": ["c"]})
    assert " --num-prompts 3 " in command(overlapping)
    assert "--training-data TRAINING.jsonl" in command(overlapping)
    given = report.checkpoint.model_copy(update={"config_source": "--drafter-config"})
    assert "--drafter-config CONFIG.json" in command(report.model_copy(update={"checkpoint": given}))


def test_a_page_names_the_host_where_the_report_does() -> None:
    report, _ = made({"a": words(30)})
    assert "<dt>host</dt><dd>–</dd>" in report_page(report)
    on = report.settings.model_copy(update={"host": "<gpu>1"})
    assert "<dt>host</dt><dd>&lt;gpu&gt;1</dd>" in report_page(report.model_copy(update={"settings": on}))


def test_no_sentence_of_a_report_that_is_not_valid_reads_as_if_it_were() -> None:
    report, _ = made({"a": words(30)})
    assert "not to be believed" not in report_page(report).partition("<main")[2]
    failed = report.checks[0].model_copy(update={"status": "fail"})
    page = report_page(report.model_copy(update={"valid": False, "invalid_because": ["fc-shape"], "checks": [failed]}))
    assert "As measured, and not to be believed. A round emits" in page
    assert 'class="ruler not-valid"' in page


@pytest.mark.slow
def test_pictures_are_png_and_svg_with_units(tmp_path: Path) -> None:
    report, rounds = made({"a": words(30), "$b$": words(25, start=9)})
    report = report.model_copy(update={"reference_metrics": report.metrics})
    files = report_plots(report, rounds, tmp_path)
    assert [path.name for path in files] == [
        *("report.png", "report.svg", "positions.png", "positions.svg", "lengths.png", "lengths.svg"),
    ]
    data = files[0].read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    pair = compare_reports(report, report)
    assert [path.name for path in comparison_plots([pair], tmp_path)] == ["comparison.png", "comparison.svg"]
    assert width > 1000
    assert height > 600
    drawn = files[1].read_text()
    for said in ("τ in tokens per round", "slot of the block", "share of rounds in %", "share of the misses in %"):
        assert said in drawn


@pytest.mark.slow
def test_the_same_report_gives_the_same_pictures(tmp_path: Path) -> None:
    report, rounds = made({"a": words(30)})
    one, two = (report_plots(report, rounds, tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_without_matplotlib_plots_are_refused_with_the_mend(run_dflash, folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report, rounds = made({"a": words(30)})
    with pytest.raises(NoPlotsError, match=r"pip install 'dflash-pipeline\[model\]'"):
        report_plots(report, rounds, folder / "plots")
    assert run_dflash("report", "html", folder).returncode == 0, "pages need no matplotlib"


def test_several_reports_are_compared_with_the_first(run_dflash, tmp_path: Path) -> None:
    texts = {f"prompt {place}": words(20 + place % 5) for place in range(64)}
    for name, better in (("a", 3), ("b", 0), ("c", 1)):
        write(tmp_path / name, *made(texts, better=better))
    paths = [tmp_path / name / "report.json" for name in "abc"]
    page = tmp_path / "page.html"
    told = run_dflash("compare", *paths, "--json", "--html", page)
    assert told.returncode == 0, told.err
    first, second = json.loads(told.out)
    assert first["comparison"]["verdict"] == second["comparison"]["verdict"] == "better"
    assert first["comparison"]["difference"] > second["comparison"]["difference"] > 0
    said = page.read_text()
    assert f"A step 400 is better than B step 400 by τ {first['comparison']['difference']:+.3f}" in said
    assert said.count('<section id="against-') == 2


def test_a_comparison_refuses_what_compare_refuses() -> None:
    good, _ = made({"a": words(20)})
    with pytest.raises(NotComparableError, match="not valid"):
        comparison_page([good, good.model_copy(update={"valid": False, "invalid_because": ["kernel"]})])
    with pytest.raises(ValueError, match="two reports"):
        comparison_page([good])


@pytest.mark.slow
def test_an_evaluation_draws_its_charts_when_asked(run_dflash, tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_drafter(tmp_path / "drafter")
    write_prompts(tmp_path / "prompts.jsonl")
    done = run_dflash(
        *("evaluate", "--target", tmp_path / "target", "--checkpoint", tmp_path / "drafter", "--device", "cpu"),
        *("--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 12, "--ignore-eos", "--plots"),
        *("--output", tmp_path / "report"),
    )
    assert done.returncode == 0, done.err
    assert (tmp_path / "report" / "plots" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_place_that_cannot_be_written_is_named_with_the_mend(run_dflash, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    page = run_dflash("report", "html", folder, "--output", file / "report.html")
    assert page.returncode == 1
    assert f"{file / 'report.html'} could not be written (File exists); make room, or name another place" in page.err
    plots = run_dflash("report", "html", folder, "--plots", file)
    assert plots.returncode == 1
    assert f"the plots could not be written to {file} (File exists)" in plots.err
