"""A Prefect server in a thread of this process, on a fixed port of the loopback interface.

It ends with the process, however that ends, so no server of an earlier one is ever left to hold the port.
"""

import asyncio
import threading
import time
import urllib.error
import urllib.request

from dflash.errors import DFlashError
from flows.prefect_home import EMBEDDED_SERVER_START_SECONDS

LOOPBACK = "127.0.0.1"
STOP_SECONDS = 20.0


class PortTakenError(DFlashError):
    """The port is another program's."""

    state_name = "PortTaken"


class ServerError(DFlashError):
    """The Prefect server did not start, or ended by itself."""

    state_name = "ServerDown"


def api_url(port: int) -> str:
    """The address of the API of a server on ``port``."""
    return f"http://{LOOPBACK}:{port}/api"


def answers(api: str, *, timeout: float = 2.0) -> bool:
    """Whether a Prefect server answers at ``api``."""
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=timeout) as answer:  # noqa: S310 - http only, ours
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


class EmbeddedServer:
    """One server over the database that Prefect's settings name."""

    def __init__(self, port: int) -> None:
        """Raises :class:`PortTakenError`; the environment has to be final, for Prefect's server is imported here."""
        self.port = port
        asyncio.run(_try(port))
        import uvicorn
        from prefect.server.api.server import create_app

        app = create_app(final=True)
        self._server = uvicorn.Server(
            uvicorn.Config(app, host=LOOPBACK, port=port, log_level="error", timeout_graceful_shutdown=5)
        )
        self._thread = threading.Thread(target=self._server.run, name="prefect-server", daemon=True)

    def start(self, patience: float = EMBEDDED_SERVER_START_SECONDS) -> None:
        """Return when the API answers. Raises :class:`ServerError` when it does not within ``patience`` seconds."""
        self._thread.start()
        deadline = time.monotonic() + patience
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise ServerError(
                    f"the Prefect server on {LOOPBACK}:{self.port} did not start within {patience:g} s: what it "
                    "printed above says why; the database may be on a full or read-only disk"
                )
            time.sleep(0.05)

    @property
    def alive(self) -> bool:
        """Whether it is still there."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End it, and give requests under way some seconds."""
        self._server.should_exit = True
        self._thread.join(STOP_SECONDS)


async def _try(port: int) -> None:
    try:
        listening = await asyncio.start_server(lambda reader, writer: None, LOOPBACK, port)
    except OSError as error:
        other = "a Prefect server answers there" if answers(api_url(port)) else "it is no Prefect server"
        raise PortTakenError(
            f"port {port} of {LOOPBACK} cannot be used ({error.strerror or error}; {other}): end that program, or "
            "name another port with --port"
        ) from None
    listening.close()
    await listening.wait_closed()
