"""A night in words: its line, the message that people get, and the page that Prefect shows."""

from tasks.night_record import Night, NightComparison


def verdict_line(night: Night) -> str:
    """One line that answers whether somebody has to look, and the figures behind it."""
    assert night.newest is not None
    assert night.newest.tau is not None
    figures = [f"{night.newest.name} τ {night.newest.tau:.3f}"]
    figures += [f"{_against(one)} {_figures(one)} {one.verdict}" for one in night.comparisons]
    if not night.comparisons:
        figures.append("nothing to compare it with yet")
    return f"{_summary(night)}: {'; '.join(figures)}"


def message(night: Night) -> tuple[str, str]:
    """Subject and body, plain text, of what people are told about a night."""
    summary = night.verdict.partition(":")[0]
    lines = [night.verdict]
    if night.alarm == "raised":
        lines.append(
            "On this night and the last one the newest checkpoint was shown to be more than 2 % of τ worse than the "
            "best so far or than the one of a day before. Look at the training before it goes on."
        )
    if night.best is not None and night.best.tau is not None:
        lines.append(f"best now: {night.best.name}, τ {night.best.tau:.3f}")
    lines += [f"note: {note}" for note in night.notes]
    if night.newest is not None and night.newest.report is not None:
        lines.append(f"report: {night.newest.report}")
    return f"DFlash {night.date}: {summary}", "\n".join(lines)


def page(night: Night) -> str:
    """The night as markdown."""
    lines = [f"# {night.date}: {_cell(night.verdict)}", ""]
    if night.comparisons:
        lines += ["| against | its τ | difference | interval | verdict |", "|---|---|---|---|---|"]
    for one in night.comparisons:
        low, high = one.interval
        cells = (_against(one), f"{one.tau:.3f}", f"{one.difference:+.3f}", f"{low:+.3f} … {high:+.3f}", one.verdict)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    if night.comparisons:
        lines += [
            "",
            "The intervals hold at 95 % all together, and that of the best so far for every one of the "
            f"{night.candidates} it was chosen among.",
        ]
    lines += ["", *(f"- {_cell(note)}" for note in night.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _summary(night: Night) -> str:
    if night.alarm != "none":
        return "ALARM, fell on two nights running" if night.alarm == "raised" else "ALARM continues"
    if night.down:
        return "fell, an alarm if it does on the next night too"
    verdicts = {one.kind: one.verdict for one in night.comparisons}
    if "too few prompts" in verdicts.values():
        return "too few prompts for a verdict"
    if verdicts.get("best") == "better":
        return "better than every one before"
    return "no fall shown"


def _against(one: NightComparison) -> str:
    match one.kind:
        case "best":
            return f"best so far ({one.name})"
        case "day before":
            return f"a day before ({one.name})"
        case _:
            return "reference"


def _figures(one: NightComparison) -> str:
    low, high = one.interval
    return f"{one.difference:+.3f} [{low:+.3f}, {high:+.3f}]"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
