from tasks.evaluation_jobs import LineSplitter


def test_what_an_evaluation_prints_is_shown_line_by_line_and_escaped() -> None:
    lines: list[str] = []
    splitter = LineSplitter(lines.append)
    for piece in (b"[1/5] tok", b"enizer\n  1 of 2\r  2 of 2\n\x1b[2J", b"\xcf", b"\x84 gone"):
        splitter.write(piece)
    splitter.close()
    assert lines == ["[1/5] tokenizer", "  1 of 2", "  2 of 2", "\\x1b[2Jτ gone"]
    assert splitter.last == lines[-1]
