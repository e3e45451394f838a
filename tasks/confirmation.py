"""Whether a drafter may be promoted: which checkpoint is meant, and what prompts say that it was not chosen by."""

from pathlib import Path

from dflash.compare import compare_reports
from dflash.errors import UsageError
from dflash.overlap import grams
from dflash.prompts import ChatPrompt, RawPrompt, read_prompts
from dflash.report import Comparison, Report, ReportError, read_report
from tasks.actions import escape
from tasks.audit import Audit, select
from tasks.evaluation import Suite
from tasks.inventory import Host
from tasks.ledger import Ledger, Seen
from tasks.nights import EXPORTED, NIGHTLY_PROMPTS, PROMOTED, PROMOTION_PROMPTS, SpentSuiteError, shipped
from tasks.promotion import PromotionError


class NotConfirmedError(PromotionError):
    """The second suite does not show that the drafter is better than what is served now."""

    state_name = "NotConfirmed"


class NoSuchStepError(UsageError):
    """No checkpoint of that step was seen, or several were."""


def find_step(ledger: Ledger, step: int, identity: str | None = None) -> Seen:
    """The checkpoint of ``step`` that was seen, of several the one whose identity begins with ``identity``.

    Raises :class:`NoSuchStepError`.
    """
    found = [one for one in ledger.checkpoints() if one.step == step]
    if identity is not None:
        found = [one for one in found if one.identity.startswith(identity)]
    if len(found) == 1:
        return found[0]
    if not found:
        newest = ", ".join(str(one.step) for one in ledger.checkpoints(limit=5) if one.step is not None) or "none"
        raise NoSuchStepError(f"no checkpoint of step {step} was seen; the newest seen are of steps {newest}")
    known = ", ".join(f"{escape(one.identity)} ({escape(one.host)}:{escape(one.path)})" for one in found)
    raise NoSuchStepError(f"{len(found)} checkpoints are of step {step}: {known}; say which with --identity")


def require_unseen(suite: Suite, ledger: Ledger) -> str:
    """The sha256 of the prompts of ``suite``, by which nothing was chosen.

    Raises :class:`~tasks.nights.SpentSuiteError` when a night was compared on them, or when one of them shares a run of
    13 words with the shipped nightly prompts.
    """
    asked = read_prompts(suite.prompts)
    spent = {
        content.get("prompts_sha256")
        for digest in {attempt.suite for attempt in ledger.attempts()}
        for _, content in ledger.nights(digest)
    }
    nightly = read_prompts(shipped(NIGHTLY_PROMPTS))
    chosen_by = {gram for prompt in nightly.prompts for gram in _grams(prompt)}
    shared = [prompt.id for prompt in asked.prompts if chosen_by.intersection(_grams(prompt))]
    if asked.sha256 in spent | {nightly.sha256}:
        raise SpentSuiteError(f"{suite.prompts} is what drafters are chosen by every night; confirm on other prompts")
    if shared:
        raise SpentSuiteError(
            f"{suite.prompts} shares texts with the nightly prompts ({escape(', '.join(shared[:5]))}), by which "
            "drafters are chosen; take them out, or confirm on other prompts"
        )
    return asked.sha256


def confirm(candidate: Report, served: Report | None) -> tuple[str, Comparison]:
    """The line and the figures of the candidate against what is ``served``, else against the reference.

    Raises :class:`PromotionError` for a report that must not be believed or has nothing to compare with, and what
    :func:`dflash.compare.compare_reports` raises.
    """
    if not candidate.valid:
        raise PromotionError(f"the report is not valid ({', '.join(candidate.invalid_because)}): it confirms nothing")
    if served is not None:
        compared = compare_reports(candidate, served)
        return f"against what is served now, {compared.headline()}", compared.comparison
    if candidate.comparison is None:
        raise PromotionError("the report has no reference drafter to compare with: name one in hosts.yaml")
    one = candidate.comparison
    interval = "" if one.ci95 is None else f" [{one.ci95[0]:+.3f}, {one.ci95[1]:+.3f}]"
    line = f"against the reference, {one.verdict}: τ {one.difference:+.3f}{interval} over {one.prompts} prompts"
    return line, one


def require_confirmed(line: str, found: Comparison) -> None:
    """Raise :class:`NotConfirmedError` unless the drafter is shown to be better."""
    if found.verdict != "better":
        raise NotConfirmedError(
            f"not confirmed: {line}. Promote another one, or say with --unconfirmed REASON why this one nevertheless"
        )


def promotion_suite() -> Suite:
    """What confirms a promotion when nobody says otherwise."""
    return Suite(prompts=shipped(PROMOTION_PROMPTS), thinking="off")


def measured_on(ledger: Ledger, checkpoint: Seen, suite: str, host: Host) -> Report | None:
    """The last valid report about ``checkpoint`` in ``suite`` that was made on ``host``; None when there is none."""
    for attempt in ledger.attempts(checkpoint.identity, suite):
        if attempt.state == "evaluated" and attempt.report is not None and attempt.on == host.name:
            try:
                return read_report(Path(attempt.report) / "report.json")
            except ReportError:
                continue
    return None


def weights_of(audit: Audit, host: Host, directory: str) -> str | None:
    """The sha256 of the weights that were exported to ``directory`` on ``host``; None when none were."""
    for entry in reversed(select(audit.entries(), event=EXPORTED, host=host.name)):
        if entry.get("directory") == directory:
            return str(entry.get("weights"))
    return None


def served_checkpoint(audit: Audit, ledger: Ledger, host: Host, directory: str | None) -> Seen | None:
    """The checkpoint that was promoted to ``directory``, which the link of ``host`` names; None when none was."""
    for entry in reversed(select(audit.entries(), event=PROMOTED, host=host.name)):
        if directory is not None and entry.get("directory") == directory:
            return ledger.checkpoint(str(entry.get("identity")))
    return None


def _grams(prompt: RawPrompt | ChatPrompt) -> set[int]:
    texts = [prompt.prompt] if isinstance(prompt, RawPrompt) else [one.content for one in prompt.messages]
    return {gram for text in texts for gram in grams(text)}
