"""``dflash-ops guard plan -- COMMAND``: what a command would ask for and do, and whether that is approved."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dflash.errors import UsageError
from tasks.actions import escape

PLAN = "--plan"


def plan(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="A dflash-ops command, after --")],
) -> None:
    """Show what COMMAND would ask for and do, and whether it is approved; nothing changes and no request is left.

    What a relay may read already it looks at, to tell how much would move.
    """
    root: Any = context.find_root().command
    code = root.main(with_plan(root, command), prog_name="dflash-ops", standalone_mode=False)
    if code:
        raise typer.Exit(code)


def with_plan(root: Any, argv: Sequence[str]) -> list[str]:
    """``argv`` with ``--plan`` right behind the command's name, where no ``--`` of the command's own hides it.

    Raises :class:`UsageError` for a command that ``root`` does not have or that touches no host.
    """
    found, names = root, 0
    while isinstance(found, TyperGroup) and names < len(argv):
        inner = found.commands.get(argv[names])
        if inner is None:
            raise UsageError(
                f"'{escape(argv[names])}' is not a command of {' '.join(['dflash-ops', *argv[:names]])}; give its "
                "whole name first, and its options behind that"
            )
        found, names = inner, names + 1
    if not any(PLAN in parameter.opts for parameter in found.params):
        raise UsageError(f"'{escape(' '.join(argv[:names]))}' touches no host, so there is no plan of it; just run it")
    return [*argv[:names], PLAN, *argv[names:]]
