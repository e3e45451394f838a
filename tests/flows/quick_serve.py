"""``dflash-ops`` with a watch that looks more often than once a minute, and waits less long before it tries again.

Run as ``python -m tests.flows.quick_serve SECONDS serve …``. Everything else is as it is.
"""

import sys

from flows.__main__ import main


def hurry(seconds: float) -> None:
    """Look every ``seconds``; what waits for minutes waits for some looks."""
    from flows import watching
    from tasks import ledger, watch, watcher

    for module in (watching, watch, watcher):
        module.LOOK_SECONDS = seconds  # type: ignore[attr-defined]
    watch.PAUSE_SECONDS, watch.LONGEST_PAUSE, watch.DEAD_SECONDS = seconds, 10 * seconds, max(20.0, 10 * seconds)
    ledger.RETRY_SECONDS = 5 * seconds
    watcher.LONGEST_BACKOFF = 5 * seconds


if __name__ == "__main__":
    hurry(float(sys.argv.pop(1)))
    main()
