"""vLLM's Prometheus counters of speculative decoding: one look at them, and when they show an answer that has come.

Names: vllm/v1/spec_decode/metrics.py and vllm/v1/metrics/loggers.py of vllm-project/vllm.
"""

import asyncio
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from dflash.http_client import Http, ServerError

READ = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)
SETTLE = 5.0
"""Seconds within which a server's counters must show what it has just answered."""
POLL = 0.05
"""Seconds between two looks at them."""


@dataclass(frozen=True)
class Counters:
    """One look at vLLM's ``/metrics``, engines added up. ``busy``: requests running or waiting."""

    drafts: int
    drafted: int
    accepted: int
    by_position: dict[int, int]
    generated: int
    busy: int

    @classmethod
    def parse(cls, url: str, text: str) -> "Counters":
        """From Prometheus' text format. Raises :class:`ServerError` when the counters are not there."""
        sums: dict[str, int] = {}
        positions: dict[int, int] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name not in READ:
                        continue  # others may be NaN
                    sums[sample.name] = sums.get(sample.name, 0) + int(sample.value)
                    if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                        slot = int(sample.labels["position"])
                        positions[slot] = positions.get(slot, 0) + int(sample.value)
        except (ValueError, KeyError, OverflowError) as error:
            raise ServerError(f"server {url}/metrics: is not in Prometheus' text format ({error})") from None
        if "vllm:generation_tokens_total" not in sums:
            raise ServerError(
                f"server {url}/metrics: has none of vLLM's counters, so its rounds cannot be read; --mode served needs "
                f"SGLang or vLLM (without --disable-log-stats)"
            )
        if "vllm:spec_decode_num_drafts_total" not in sums:
            raise ServerError(
                f"server {url}: does not speculate (no vllm:spec_decode_num_drafts_total in /metrics); start vLLM with "
                f'--speculative-config \'{{"method":"dflash","model":DIR,"num_speculative_tokens":B-1}}\''
            )
        return cls(
            drafts=sums["vllm:spec_decode_num_drafts_total"],
            drafted=sums.get("vllm:spec_decode_num_draft_tokens_total", 0),
            accepted=sums.get("vllm:spec_decode_num_accepted_tokens_total", 0),
            by_position=positions,
            generated=sums["vllm:generation_tokens_total"],
            busy=sums.get("vllm:num_requests_running", 0) + sums.get("vllm:num_requests_waiting", 0),
        )


async def look(http: Http) -> Counters:
    """The counters now. Raises :class:`ServerError`."""

    async def once() -> Counters:
        return Counters.parse(http.base, await http.get_text("/metrics"))

    return await http.persistently(once)


async def settled(http: Http, before: Counters, tokens: int) -> Counters:
    """The counters when they show the answer that has come; they may be a step behind it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE
    while True:
        after = await look(http)
        generated = after.generated - before.generated
        shown = generated == tokens and not after.busy
        if shown or generated > tokens or generated < 0 or loop.time() > deadline:
            return after
        await asyncio.sleep(POLL)
