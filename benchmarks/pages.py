"""How long a report's page takes to open in a browser, with many prompts and with many rounds.

    python -m benchmarks.pages [--prompts 500] [--tokens 256] [--block 16] [--opens 5]

A made-up report of that many prompts is written as a page and opened from its file in headless Chromium, each time in a
fresh tab: until the load event, and until the frame after it is painted. The target is under 2 s for 500 prompts. Then
the longest prompt is opened. Needs Debian's packages chromium and chromium-driver, and selenium.
"""

import argparse
import random
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from dflash.metrics import Round, by_prompt, judge, summarize
from dflash.pages import report_page, write_page
from dflash.report import CheckpointInfo, PromptResult, Report, Settings, TargetInfo
from tests.dflash.pages.browsing import Browser, why_no_browser

PAINTED = """const done = arguments[0];
requestAnimationFrame(() => requestAnimationFrame(() => {
  const [entry] = performance.getEntriesByType('navigation');
  done([entry.loadEventEnd, performance.now()]);
}));"""


def main() -> None:
    """Print the times of each opening and their median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--opens", type=int, default=5)
    asked = parser.parse_args()
    if missing := why_no_browser():
        raise SystemExit(missing)
    report, rounds = made_up(asked.prompts, asked.tokens, asked.block)
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "report.html"
        started = time.process_time()
        write_page(page, report_page(report, rounds))
        print(
            f"{asked.prompts} prompts, {len(rounds)} rounds of {asked.block}: {page.stat().st_size / 1e6:.1f} MB, ",
            end="",
        )
        print(f"written in {time.process_time() - started:.2f} s of CPU")
        browser = Browser()
        try:
            measure(browser, page, asked.opens)
        finally:
            browser.close()


def measure(browser: Browser, page: Path, opens: int) -> None:
    """Open ``page`` some times, then a prompt in it, and print the seconds."""
    loaded, painted = [], []
    for number in range(opens):
        browser.open(page)
        load, paint = (value / 1000 for value in browser.driver.execute_async_script(PAINTED))
        loaded.append(load)
        painted.append(paint)
        print(f"open {number + 1}: loaded after {load:.2f} s, painted after {paint:.2f} s")
    print(f"median: loaded after {statistics.median(loaded):.2f} s, painted after {statistics.median(painted):.2f} s")
    seconds = browser.driver.execute_async_script(
        "const done = arguments[0], started = performance.now();"
        "document.querySelector('.prompts button').click();"
        "requestAnimationFrame(() => requestAnimationFrame(() => done((performance.now() - started) / 1000)));"
    )
    print(
        f"a prompt's rounds: {seconds:.2f} s, {browser.js('document.querySelectorAll(`.round`).length')} rounds shown"
    )
    browser.require_quiet()


def made_up(prompts: int, tokens: int, block: int) -> tuple[Report, list[Round]]:
    """A report of random words whose drafts are right with 0.8 each, so that τ is about 4.5 for blocks of 16."""
    rng = random.Random(0)
    texts = {token: f" {''.join(rng.choices('abcdefghijklmnop', k=rng.randint(1, 9)))}" for token in range(20_000)}
    completions = {f"prompt-{place:03d}": rng.choices(range(1, 20_000), k=tokens) for place in range(prompts)}
    rounds: list[Round] = []
    for id, ids in completions.items():
        anchor = 0
        while anchor < len(ids) - 1:
            following = ids[anchor + 1 : anchor + 1 + block]
            right = [rng.random() < 0.8 for _ in range(block - 1)]
            drafted = [
                following[slot] if slot < len(following) and good else rng.randrange(20_000)
                for slot, good in enumerate(right)
            ]
            rounds.append(judge(id, anchor, drafted, [0 if good else rng.randint(1, 900) for good in right], following))
            anchor += rounds[-1].advance
    totals = by_prompt(rounds)
    metrics = summarize(rounds, rounds[:100], {}, seed=0)
    report = Report(
        created=datetime.now(UTC),
        valid=True,
        invalid_because=[],
        checkpoint=CheckpointInfo(path="step_20000", sha256="0", format="zlab", step=20_000, config_source="made up"),
        target=TargetInfo.model_validate(
            {"path": "t", "class": "C", "tensors": 1, "kernel": "torch", "dtype": "float32", "fingerprint": "0"}
        ),
        settings=Settings(
            mode="replay",
            max_new_tokens=tokens,
            ignore_eos=False,
            thinking=None,
            block_size=block,
            mask_token_id=0,
            target_layer_ids=[1],
            prompts="made up",
            prompts_sha256="0",
            num_prompts=prompts,
            max_blocks=None,
            completions="target",
            completion_agreement=1.0,
            device="cpu",
            seed=0,
        ),
        versions={},
        metrics=metrics,
        reference_metrics=metrics,
        prompts=[
            PromptResult(
                id=id,
                text="".join(texts[token] for token in ids),
                tokens=len(ids),
                rounds=totals[id][1],
                tau=totals[id][0] / totals[id][1],
                token_ids=ids,
                reference_tau=totals[id][0] / totals[id][1],
            )
            for id, ids in completions.items()
        ],
        token_texts=texts,
        checks=[],
        timings={},
    )
    return report, rounds


if __name__ == "__main__":
    main()
