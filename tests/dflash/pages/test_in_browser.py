"""Pages in a real browser, each figure shown held against the report's own JSON."""

import pytest

from dflash.pages import comparison_page, report_page, trend_page, write_page
from dflash.report import read_report
from dflash.trend import read_trend
from tests.dflash.pages.browsing import Browser
from tests.dflash.pages.conftest import Measured
from tests.dflash.pages.reports import made, words, write

STEP = 100


def shown(value, digits=3, sign=""):
    return "–" if value is None else f"{value:{sign}.{digits}f}"


def share(value):
    return "–" if value is None else f"{100 * value:.1f} %"


def test_every_figure_of_the_report_is_that_of_its_json(browser: Browser, measured: Measured) -> None:
    report = measured.report(STEP)
    ours, theirs = report["metrics"], report["reference_metrics"]
    browser.open(measured.folder / f"step_{STEP}" / "report.html")

    assert (
        browser.text("#headline")
        == f"τ {shown(ours['tau']['pooled'])} beside the reference's {shown(theirs['tau']['pooled'])}"
    )
    assert browser.text("#tau") == shown(ours["tau"]["pooled"])
    low, high = ours["tau"]["ci95"]
    assert browser.text("#tau-interval") == f"95 % interval {shown(low)} to {shown(high)}"
    assert shown(report["comparison"]["difference"], sign="+") in browser.text("#sentence")
    assert browser.text("#card-macro") == shown(ours["tau"]["macro"])
    assert browser.text("#card-random") == shown(ours["random_anchor_tau"])
    assert browser.text("#card-tree") == shown(ours["ddtree"]["64"])
    assert browser.text("#card-rounds") == f"{ours['rounds']:,}"
    assert browser.text("#card-tokens") == f"{ours['tokens']:,}"

    for key in ("acceptance", "conditional", "accuracy"):
        both = zip(ours[f"{key}_by_position"], theirs[f"{key}_by_position"], strict=True)
        expected = [[str(slot), share(one), share(other)] for slot, (one, other) in enumerate(both, start=1)]
        assert browser.table(f"figure:has(#chart-{key})") == expected
    assert browser.table("figure:has(#chart-histogram)") == [
        [str(advance), f"{one:,}", share(one / ours["rounds"]), f"{other:,}", share(other / theirs["rounds"])]
        for advance, (one, other) in enumerate(zip(ours["histogram"], theirs["histogram"], strict=True), start=1)
    ]
    assert browser.table("figure:has(#chart-streak)") == [
        [f"top-{width}", shown(value), shown(theirs["streak"][width])] for width, value in ours["streak"].items()
    ]
    assert browser.table("figure:has(#chart-ddtree)") == [
        [f"{nodes} nodes", shown(value), shown(theirs["ddtree"][nodes])] for nodes, value in ours["ddtree"].items()
    ]
    assert browser.table("figure:has(#chart-anchors)") == [
        ["walk", shown(ours["tau"]["pooled"]), shown(theirs["tau"]["pooled"])],
        ["random anchors", shown(ours["random_anchor_tau"]), shown(theirs["random_anchor_tau"])],
    ]
    browser.screenshot("report")
    browser.require_quiet()


def test_checks_and_provenance_are_those_of_the_json(browser: Browser, measured: Measured) -> None:
    report = measured.report(STEP)
    browser.open(measured.folder / f"step_{STEP}" / "report.html")
    words_of = {"pass": "✓ passed", "warn": "! warning", "fail": "✕ failed", "skipped": "– not verified"}
    rows = browser.table("#checks")
    expected = {(one["name"], words_of[one["status"]], one["explanation"]) for one in report["checks"]}
    assert {(row[0], row[1], row[4]) for row in rows} == expected
    assert len(rows) == len(report["checks"])
    facts = " ".join(browser.texts("#provenance dd"))
    for told in (
        report["checkpoint"]["sha256"],
        report["target"]["fingerprint"],
        report["reference"]["sha256"],
        report["settings"]["prompts_sha256"],
        report["target"]["kernel"],
        *report["versions"].values(),
    ):
        assert told in facts
    assert f"--checkpoint {report['checkpoint']['path']}" in browser.text(".command")


def test_a_chart_is_read_by_the_arrow_keys_and_says_the_reports_figures(browser: Browser, measured: Measured) -> None:
    report = measured.report(STEP)
    browser.open(measured.folder / f"step_{STEP}" / "report.html")
    both = zip(
        report["metrics"]["acceptance_by_position"], report["reference_metrics"]["acceptance_by_position"], strict=True
    )
    for slot, (ours, theirs) in enumerate(both, start=1):
        browser.press("#chart-acceptance svg", "ARROW_RIGHT")
        lines = browser.texts("#chart-acceptance .tip > *")
        assert lines == [f"slot {slot}", f"drafter: {share(ours)}", f"reference: {share(theirs)}"]
    marks = browser.js("document.querySelectorAll('#chart-acceptance .mark').length")
    assert marks == 2 * len(report["metrics"]["acceptance_by_position"])
    heights = browser.js(
        "[...document.querySelectorAll('#chart-histogram .s-drafter .bar')].map(e => +e.getAttribute('height'))"
    )
    counts = report["metrics"]["histogram"]
    assert [height / max(heights) for height in heights] == pytest.approx(
        [one / max(counts) for one in counts], abs=1e-3
    )


def test_prompts_are_sorted_searched_and_opened(browser: Browser, measured: Measured) -> None:
    report = measured.report(STEP)
    prompts = {one["id"]: one for one in report["prompts"]}
    browser.open(measured.folder / f"step_{STEP}" / "report.html")
    names = "#prompts .prompts > li:not([hidden]) .id"
    assert browser.texts(names) == list(prompts)
    assert browser.texts("#prompts .tau") == [shown(one["tau"]) for one in prompts.values()]
    differences = [shown(one["tau"] - one["reference_tau"], sign="+") for one in prompts.values()]
    assert browser.texts("#prompts .difference") == differences

    browser.do("const s = document.querySelector('.sort'); s.value = 'tau'; s.dispatchEvent(new Event('change'))")
    falling = sorted(prompts, key=lambda id: -prompts[id]["tau"])
    assert [prompts[id]["tau"] for id in browser.texts(names)] == [prompts[id]["tau"] for id in falling]
    browser.do("document.querySelector('.direction').click()")
    assert [prompts[id]["tau"] for id in browser.texts(names)] == [prompts[id]["tau"] for id in reversed(falling)]

    wanted = next(iter(prompts))
    browser.press(".find", wanted)
    assert browser.texts(names) == [id for id in browser.texts("#prompts .id") if wanted in id]
    assert browser.text(".found") == f"1 of {len(prompts)} prompts"


def test_an_opened_prompt_shows_its_rounds_token_by_token(browser: Browser, measured: Measured) -> None:
    report = measured.report(STEP)
    texts = {int(token): text for token, text in report["token_texts"].items()}
    prompt = report["prompts"][0]
    rounds = [one for one in measured.rounds(STEP) if one["prompt"] == prompt["id"]]
    browser.open(measured.folder / f"step_{STEP}" / "report.html")
    browser.press("#prompts .prompts > li > button", "ENTER")

    accepted = browser.js(
        "[...document.querySelectorAll('.round')].map(r => r.querySelector('.accepted')?.textContent ?? '')"
    )
    assert accepted == ["".join(texts[token] for token in one["drafted"][: one["accepted"]]) for one in rounds]
    missed = [
        one for one in rounds if one["accepted"] < len(one["right"]) and one["right"][one["accepted"]] is not None
    ]
    assert len(missed) > 5
    told = browser.js("[...document.querySelectorAll('.round .missed')].map(e => e.textContent)")
    assert told == [texts[one["right"][one["accepted"]]] for one in missed]
    assert browser.texts(".round sup") == [f"#{one['rank_of_right'][one['accepted']] + 1}" for one in missed]
    drafts = browser.js("[...document.querySelectorAll('.round del')].map(e => e.textContent)")
    seen = [texts[one["drafted"][one["accepted"]]] for one in missed]
    assert drafts == [text.replace(" ", "␣").replace("\n", "⏎") for text in seen]
    assert browser.js(WITHOUT_DRAFTS) == prompt["text"]

    browser.press(".round", "ARROW_RIGHT", "ARROW_RIGHT")
    third = rounds[2]
    slots = browser.table(".lens")
    assert slots[1][1:] == [texts[token].replace(" ", "␣").replace("\n", "⏎") for token in third["drafted"]]
    assert slots[3][1:] == ["–" if rank is None else f"#{rank + 1}" for rank in third["rank_of_right"]]
    assert f"{third['accepted']} of {len(third['drafted'])} drafts accepted" in browser.text(".lens p")
    browser.do("document.querySelector('.bar-of-tools button').click()")
    assert browser.js("getComputedStyle(document.querySelector('.round del')).display") == "none"
    browser.screenshot("prompt")
    browser.require_quiet()


WITHOUT_DRAFTS = """(() => {
  const flow = document.querySelector('.tokens').cloneNode(true);
  flow.querySelectorAll('del, sup').forEach(e => e.remove());
  return flow.textContent;
})()"""


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_no_page_is_wider_than_its_window_or_leaves_text_hard_to_read(
    browser: Browser, measured: Measured, width: int, dark: bool
) -> None:
    browser.resize(width)
    browser.dark(dark)
    browser.open(measured.folder / f"step_{STEP}" / "report.html", "#walk-0")
    assert browser.js("document.documentElement.scrollWidth") <= width
    assert browser.js("document.querySelectorAll('.round').length") > 0, "the address opens the prompt that it names"
    browser.screenshot(f"report-{width}-{'dark' if dark else 'light'}")
    hard = browser.js(CONTRAST)
    assert hard == []
    browser.require_quiet()


# WCAG's contrast of every text with the first opaque ground behind it, where that is under 4.5
CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = (c) => c.slice(0, 3).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor);
    if (c[3] === 255) return c; } return [255, 255, 255, 255]; };
  const found = new Set();
  for (const e of document.querySelectorAll('main *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || !e.checkVisibility()) continue;
    const style = getComputedStyle(e);
    if (e.closest('svg') || rgba(style.color)[3] < 255) continue;
    const [a, b] = [light(rgba(style.color)), light(ground(e))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.add(`${e.className || e.tagName}: ${contrast.toFixed(2)}`);
  }
  return [...found];
})()"""


def test_the_switch_turns_the_page_dark_and_it_stays(browser: Browser, measured: Measured) -> None:
    page = measured.folder / f"step_{STEP}" / "report.html"
    browser.open(page)
    before = browser.js("getComputedStyle(document.body).backgroundColor")
    browser.do("document.querySelector('#theme').click()")
    after = browser.js("getComputedStyle(document.body).backgroundColor")
    assert before != after
    browser.open(page)
    assert browser.js("getComputedStyle(document.body).backgroundColor") == after
    browser.do("localStorage.clear()")


def test_the_trend_says_what_the_reports_say(browser: Browser, measured: Measured) -> None:
    trend = read_trend(measured.folder)
    write_page(measured.folder / "trend.html", trend_page(trend, "tiny"))
    browser.open(measured.folder / "trend.html")
    reports = {step: measured.report(step) for step in (400, 100)}
    rows = browser.table("#series-0 div.panel:has(h3)")
    assert [row[0] for row in rows] == ["400", "100"]
    assert [row[2] for row in rows] == [shown(one["metrics"]["tau"]["pooled"]) for one in reports.values()]
    assert [row[4] for row in rows] == [shown(one["reference_metrics"]["tau"]["pooled"]) for one in reports.values()]
    best = max(reports, key=lambda step: reports[step]["metrics"]["tau"]["pooled"])
    assert [row[0] for row in rows if "best" in row[1]] == [str(best)]
    browser.press("#chart-tau-0 svg", "ARROW_RIGHT")
    first = reports[100]["metrics"]["tau"]
    assert browser.texts("#chart-tau-0 .tip > *")[:2] == ["step 100", f"τ: {shown(first['pooled'])}"]
    assert browser.js("document.querySelectorAll('#chart-tau-0 .s-drafter a .mark').length") == len(reports)
    browser.screenshot("trend")
    browser.require_quiet()
    browser.do("document.querySelector('#series-0 table a').click()")
    assert browser.text("#tau") == shown(reports[400]["metrics"]["tau"]["pooled"]), "a step leads to its own page"


def test_the_comparison_says_what_the_reports_say(browser: Browser, measured: Measured, tmp_path) -> None:
    raw = [measured.report(step) for step in (400, 100)]
    paths = [measured.folder / f"step_{step}" / "report.json" for step in (400, 100)]
    write_page(tmp_path / "comparison.html", comparison_page([read_report(path) for path in paths]))
    browser.open(tmp_path / "comparison.html")
    difference = raw[0]["metrics"]["tau"]["pooled"] - raw[1]["metrics"]["tau"]["pooled"]
    assert browser.text("#difference-B").startswith(f"{shown(difference, sign='+')} [")
    ours, theirs = ({one["id"]: one["tau"] for one in report["prompts"]} for report in raw)
    order = sorted(ours, key=lambda id: theirs[id] - ours[id])
    expected = [shown(ours[id] - theirs[id], sign="+") for id in order]
    assert browser.texts("#against-B .prompts .tau") == expected
    won = sum(ours[id] > theirs[id] for id in ours)
    assert f"A is ahead on {won} prompts" in browser.text("#against-B > .lead")
    browser.do("document.querySelector('#against-B .prompts button').click()")
    assert browser.js("document.querySelector('#against-B .plain').textContent") in [
        one["text"] for one in raw[0]["prompts"]
    ]
    browser.screenshot("comparison")
    browser.require_quiet()


HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


def test_what_a_prompt_says_stays_text(browser: Browser, tmp_path) -> None:
    arabic, bell = "مرحبا", "\x07"
    pieces = [HOSTILE, " ", arabic, bell, "\u202ereversed", "\ud83d\ude00", *words(20)]
    report, rounds = made({f"<b>{HOSTILE}\u202e": pieces, "plain": words(30)})
    checks = [report.checks[0].model_copy(update={"explanation": HOSTILE, "name": HOSTILE})]
    report = report.model_copy(update={"checks": checks, "versions": {HOSTILE: HOSTILE}})
    write_page(tmp_path / "page.html", report_page(report, rounds))
    browser.open(tmp_path / "page.html", "#walk-0")
    assert browser.js("window.hacked ?? null") is None
    assert browser.js("document.querySelectorAll('main img, main b b, main script').length") == 0
    assert browser.texts("#prompts .id")[0] == f"<b>{HOSTILE}\\u202e"
    told = browser.js("document.querySelector('.tokens').textContent")
    assert all(one in told for one in (HOSTILE, arabic, "\\x07", "\\u202ereversed"))
    assert not any(one in told for one in (bell, "\u202e"))
    browser.require_quiet()


def test_a_script_that_got_in_all_the_same_would_not_run(browser: Browser, tmp_path) -> None:
    report, rounds = made({"a": words(30)})
    page = report_page(report, rounds).replace(
        "</main>", "<script>window.hacked = 1</script><img src='http://127.0.0.1:9/'></main>"
    )
    write_page(tmp_path / "page.html", page)
    browser.open(tmp_path / "page.html")
    assert browser.js("window.hacked ?? null") is None
    refused = " ".join(entry["message"] for entry in browser.driver.get_log("browser"))
    assert "script-src" in refused
    assert "img-src" in refused


@pytest.mark.slow
def test_ten_thousand_rounds_open_some_at_a_time(browser: Browser, tmp_path) -> None:
    report, rounds = made({"long": words(45_100)})
    assert len(rounds) > 10_000
    write_page(tmp_path / "page.html", report_page(report, rounds))
    browser.open(tmp_path / "page.html", "#walk-0")
    assert browser.js("document.querySelectorAll('.round').length") == 400
    assert browser.texts(".bar-of-tools button")[-1] == f"show more: 400 of {len(rounds)} rounds"
    browser.do("document.querySelector('.bar-of-tools button:last-child').click()")
    assert browser.js("document.querySelectorAll('.round').length") == 800
    browser.require_quiet()


def test_of_many_prompts_some_are_shown_and_all_are_found(browser: Browser, tmp_path) -> None:
    report, rounds = made({f"prompt {number}": words(12, start=number) for number in range(150)})
    write_page(tmp_path / "page.html", report_page(report, rounds))
    browser.open(tmp_path / "page.html")
    visible = "[...document.querySelectorAll('.prompts > li')].filter(e => !e.hidden).length"
    assert browser.js(visible) == 100
    browser.press(".find", "prompt 149")
    assert browser.js(visible) == 1
    browser.do("const f = document.querySelector('.find'); f.value = ''; f.dispatchEvent(new Event('input'))")
    browser.do("document.querySelector('.all').click()")
    assert browser.js(visible) == 150


@pytest.mark.parametrize("kind", ["not valid", "old", "served", "missing"])
def test_every_kind_of_report_makes_a_page(browser: Browser, tmp_path, kind: str) -> None:
    report, rounds = made({"a": words(30), "b": words(40, start=7)})
    if kind == "not valid":
        failed = report.checks[0].model_copy(update={"status": "fail", "explanation": "fc takes 4 of 5 taps"})
        report = report.model_copy(update={"valid": False, "invalid_because": ["fc-shape"], "checks": [failed]})
    if kind == "old":
        report = report.model_copy(update={"token_texts": {}})
    if kind == "served":
        metrics = report.metrics.model_copy(
            update={"accuracy_by_position": [], "streak": {}, "random_anchor_tau": None}
        )
        report, rounds = report.model_copy(update={"metrics": metrics, "token_texts": {}}), []
    if kind == "missing":
        nothing = [None] * 7
        metrics = report.metrics.model_copy(update={"accuracy_by_position": nothing, "streak": {"1": None, "2": 2.0}})
        report = report.model_copy(update={"metrics": metrics})
    path = write(tmp_path, report)
    write_page(tmp_path / "page.html", report_page(read_report(path), rounds))
    browser.open(tmp_path / "page.html", "#walk-1")
    if kind == "not valid":
        assert browser.text("#headline") == "not valid: fc-shape"
        assert "fc takes 4 of 5 taps" in browser.text(".alarm")
        assert browser.js("getComputedStyle(document.querySelector('#tau')).color") == "rgba(0, 0, 0, 0)"
    else:
        assert browser.text("#headline") == f"τ {shown(report.metrics.tau.pooled)}"
    if kind in ("old", "served"):
        assert browser.js("document.querySelector('#walk-1 .plain').textContent") == report.prompts[1].text
    if kind == "missing":
        assert {row[1] for row in browser.table("figure:has(#chart-accuracy)")} == {"–"}
        assert browser.table("figure:has(#chart-streak)") == [["top-1", "–"], ["top-2", "2.000"]]
    browser.screenshot(kind.replace(" ", "-"))
    browser.require_quiet()
