"""The only module that opens a connection or starts ssh.

Who a host is, its server's key says: after the key exchange and before anything is authenticated, whatever the name,
address, port or route was. The control plane is fabric over paramiko; bulk bytes go through OpenSSH processes, which
are several times faster. Neither ever asks an agent, searches for keys or learns a host key.
"""

import os
import shlex
import shutil
import subprocess  # noqa: TID251 - ssh itself; everything else goes through tasks/process.py
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import fabric  # noqa: TID251 - the module for it
import paramiko  # noqa: TID251 - the module for it

from dflash.errors import DFlashError
from tasks.actions import said
from tasks.approvals import Approval, ApprovalStore
from tasks.audit import Audit
from tasks.client_enforcement import CLIENT_WARNING, check_certificate
from tasks.errors import Refused
from tasks.inventory import Host, Inventory
from tasks.inventory import load as load_inventory
from tasks.process import Popen, Stream, last_line
from tasks.routes import (
    CONNECT_SECONDS,
    GCM,
    KEEPALIVE_SECONDS,
    Route,
    RouteError,
    Settings,
    ciphers,
    host_key_types,
    parse_settings,
    render_configuration,
    render_known_hosts,
    route,
)
from tasks.scratch import Scratch
from tasks.sent_gate import held_argv

PIPE_BYTES = 1 << 20
NETWORK_ERRORS = (paramiko.SSHException, OSError, EOFError)


class HostKeyError(DFlashError):
    """A server showed a key that is not pinned for the host; nothing was authenticated."""

    state_name = "HostKeyMismatch"


class ConnectionFailed(DFlashError):
    """A host could not be reached or did not let the operator in."""

    state_name = "HostUnreachable"


class Connector:
    """Opens connections and ssh processes to the hosts of one inventory.

    :meth:`start_gate`, which takes an approval, is the only way to a protected host: :meth:`connect` and :meth:`start`
    raise :class:`~tasks.errors.Refused` for one, also when it answers under the name of another host.

    ``warn`` is told once for each host when only this program enforces what was approved there.
    """

    def __init__(
        self, inventory: Inventory, store: ApprovalStore, audit: Audit, warn: Callable[[str], None] | None = None
    ) -> None:
        self.inventory = inventory
        self.store = store
        self.audit = audit
        self.warn = warn or _warn_on_stderr
        self._warned: set[str] = set()
        self._folder = Scratch("dflash-ssh-")

    @classmethod
    def load(cls, hosts: Path | None = None) -> Self:
        """The connector of ``hosts`` (a hosts.yaml, see :func:`tasks.inventory.load`) and this machine's state."""
        inventory, audit = load_inventory(hosts), Audit()
        return cls(inventory, ApprovalStore(inventory, audit), audit)

    def connect(self, host: Host) -> fabric.Connection:
        """An open fabric connection to an unprotected ``host``, logged in with its one key.

        :raises Refused: ``host`` is protected, or the server's key is a protected host's.
        :raises HostKeyError: the server's key is not pinned for ``host``.
        :raises ConnectionFailed: it could not be reached, or the login was refused.
        """
        self._refuse_protected(host)
        way = self._route(host)
        if way.identity_file is None:
            raise ConnectionFailed(f"{host.name}: no private key was found; name identity_file for it in hosts.yaml")
        connection = self._connection(way, PinnedKeys(self.inventory, host), host_key_types(host))
        try:
            connection.open()
        except (DFlashError, *NETWORK_ERRORS) as error:
            _close(connection)
            raise self._explained(host, error) from error
        connection.transport.set_keepalive(KEEPALIVE_SECONDS)
        return connection

    def start(self, host: Host, argv: Sequence[str], *, stdin: Stream, stdout: Stream, stderr: Stream) -> Popen[bytes]:
        """An OpenSSH process that runs ``argv`` on an unprotected ``host``, for bulk bytes; its pipes hold 1 MiB.

        It dies with the thread that called this. Its exit status 255 is ssh's own: :meth:`failure` says what it means.

        :raises Refused: ``host`` is protected.
        """
        self._refuse_protected(host)
        return self._spawn(self._route(host), None, [shlex.join(argv)], stdin, stdout, stderr)

    def start_gate(
        self,
        approval: Approval,
        host: Host,
        *,
        stdin: Stream,
        stdout: Stream,
        stderr: Stream,
        options: Sequence[str] = (),
    ) -> Popen[bytes]:
        """An OpenSSH process that speaks to the gate of ``host`` with the certificate of ``approval``.

        Which program runs there its sshd decides (ForceCommand), so no command is sent. ``options`` of ssh ask for more
        than that, which the host has to refuse (the guard's doctor looks whether it does). Otherwise as :meth:`start`.

        With ``enforcement: client`` the certificate is verified here, and the gate program is sent along and held to
        what it says; the login is the ordinary one.

        :raises Refused: the approval is for another host, or its certificate is not in force.
        """
        way = self.check_gate(approval, host)
        if host.enforcement == "client":
            command = shlex.join(held_argv(check_certificate(self.inventory, approval, host), host))
            self._warn_of_client_enforcement(host)
            return self._spawn(way, None, [command], stdin, stdout, stderr, options)
        login = (approval.key_path, approval.certificate_path)
        return self._spawn(way, login, [], stdin, stdout, stderr, options)

    def check_gate(self, approval: Approval, host: Host) -> Route:
        """The way that :meth:`start_gate` would take; raises what can be told before anything is spent."""
        if approval.host != host.name:
            raise Refused(f"approval {approval.id} is for {approval.host}, not for {host.name}; ask for one of its own")
        if host.enforcement == "client":
            check_certificate(self.inventory, approval, host)
        _program("setpriv")
        return self._route(host)

    def offer(self, host: Host, keys: Sequence[Path], options: Sequence[str] = (), *, seconds: float = 30.0) -> str:
        """Ask the sshd of ``host``, protected or not, whether it would take ``keys``, and return what ``ssh -vv`` said.

        ``keys`` are files that hold public keys or certificates and nothing else, so that no signature can be made and
        nobody is let in whatever the answer is; a session is not even asked for.

        :raises ConnectionFailed: one of ``keys`` is not a public key.
        """
        # not -v: that would have the machines on the way talk too
        asked = ["-N", "-o", "LogLevel=DEBUG2", *options]
        plain = None
        for key in keys:
            if key.suffix != ".pub" or "PRIVATE KEY" in key.read_text("ascii", "replace"):
                raise ConnectionFailed(f"{key} is not the file of a public key; only such are offered")
            certified = key.stem.endswith("-cert")
            plain = plain if certified else plain or key
            asked += ["-o", f"{'CertificateFile' if certified else 'IdentityFile'}={key}"]
        way = self._route(host)
        # the key of the operator's own that leads there stays out of it
        alone = Route(way.host, way.hostname, plain, way.jump)
        child = self._spawn(alone, None, [], subprocess.DEVNULL, subprocess.DEVNULL, subprocess.PIPE, asked)
        try:
            return child.communicate(timeout=seconds)[1].decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            # let in without any key: it waits for work that never comes
            child.kill()
            return child.communicate()[1].decode("utf-8", "replace")

    def failure(self, host: Host, stderr: str) -> DFlashError:
        """What exit status 255 of an ssh process with this ``stderr`` means.

        When ssh did not take the server's key, the server is asked for it once more, to name it and its owner.
        """
        if "Host key verification failed" in stderr or "no matching host key type" in stderr:
            return self._host_key_failure(host)
        return ConnectionFailed(
            f"{host.name} ({host.address} port {host.port}): {said(last_line(stderr)) or 'ssh ended without a word'}"
        )

    def _warn_of_client_enforcement(self, host: Host) -> None:
        if host.name not in self._warned:
            self._warned.add(host.name)
            self.warn(CLIENT_WARNING.format(host=host.name))

    def _refuse_protected(self, host: Host) -> None:
        if host.protected:
            refused = Refused(
                f"{host.name} is protected: nothing happens there without an approval of exactly that; "
                "see 'dflash-ops guard requests'"
            )
            self.audit.append("refusal", host=host.name, reason=str(refused))
            raise refused

    def _route(self, host: Host) -> Route:
        try:
            return route(self.inventory, host, effective_settings)
        except Refused as error:
            self.audit.append("refusal", host=host.name, reason=str(error))
            raise

    def _connection(
        self, way: Route, policy: paramiko.MissingHostKeyPolicy, key_types: Sequence[str]
    ) -> fabric.Connection:
        gateway: fabric.Connection | bool = False
        if way.jump is not None:
            between = way.jump.host
            gateway = self._connection(way.jump, PinnedKeys(self.inventory, between), host_key_types(between))
        # lazy: no fabric or ssh configuration file has a say here; `ssh -G` has told already what they mean
        settings = fabric.Config(overrides={"run": {"in_stream": False}}, lazy=True)
        connection = fabric.Connection(
            host=way.hostname,
            user=way.host.user,
            port=way.host.port,
            gateway=gateway,
            forward_agent=False,
            connect_timeout=CONNECT_SECONDS,
            config=settings,
            connect_kwargs={
                "key_filename": [str(way.identity_file)] if way.identity_file else [],
                "allow_agent": False,
                "look_for_keys": False,
                "banner_timeout": CONNECT_SECONDS,
                "auth_timeout": CONNECT_SECONDS,
                "channel_timeout": CONNECT_SECONDS,
                "transport_factory": _transports(key_types),
            },
        )
        # fabric's own client adds every key; this one knows no key at all, so that the policy is always asked
        connection.client = paramiko.SSHClient()
        connection.client.set_missing_host_key_policy(policy)
        return connection

    def _explained(self, host: Host, error: Exception) -> DFlashError:
        if isinstance(error, Refused):
            self.audit.append("refusal", host=host.name, reason=str(error))
        if isinstance(error, DFlashError):
            return error
        if "no acceptable host key" in str(error):
            return self._host_key_failure(host)
        if isinstance(error, paramiko.PasswordRequiredException):
            return ConnectionFailed(f"{host.name}: its private key has a passphrase; name one without as identity_file")
        return ConnectionFailed(f"{host.name} ({host.address} port {host.port}): {error or type(error).__name__}")

    def _host_key_failure(self, host: Host) -> DFlashError:
        witness = _Witness()
        connection = self._connection(self._route(host), witness, ())
        refused: Refused | None = None
        try:
            connection.open()
        except Refused as error:
            # a machine on the way is a protected one
            refused = error
        except (DFlashError, *NETWORK_ERRORS):
            pass
        finally:
            _close(connection)
        if refused is not None:
            return self._explained(host, refused)
        if witness.key is not None:
            try:
                check_host_key(self.inventory, host, witness.key)
            except DFlashError as error:
                return self._explained(host, error)
        return HostKeyError(f"{host.name} showed no host key that is pinned for it; nothing was authenticated")

    def _spawn(
        self,
        way: Route,
        login: tuple[Path, Path] | None,
        command: Sequence[str],
        stdin: Stream,
        stdout: Stream,
        stderr: Stream,
        options: Sequence[str] = (),
    ) -> Popen[bytes]:
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        known_hosts, configuration = folder / "known_hosts", folder / "config"
        known_hosts.write_text(render_known_hosts(way))
        cipher_names = ciphers(Path("/proc/cpuinfo").read_text())
        configuration.write_text(render_configuration(way, known_hosts, cipher_names, login))
        # setpriv, not preexec_fn: Python between fork and exec can deadlock in a process with threads
        argv = [_program("setpriv"), "--pdeathsig", "TERM", _program("ssh"), "-F", str(configuration), "-T"]
        return Popen(
            [*argv, *options, "--", way.name, *command],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environment(),
            start_new_session=True,
            pipesize=PIPE_BYTES,
        )


def _warn_on_stderr(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def check_host_key(inventory: Inventory, host: Host, key: paramiko.PKey) -> None:
    """Decide who answered, by the key alone.

    :raises Refused: ``key`` is a protected host's and ``host`` is another.
    :raises HostKeyError: ``key`` is not pinned for ``host``.
    """
    owner = inventory.owner_of_key(key.asbytes())
    if owner is not None and owner.name == host.name:
        return
    shown = f"{key.get_name()} {key.fingerprint}"
    if owner is not None and owner.protected:
        raise Refused(
            f"{host.name} ({host.address} port {host.port}) is {owner.name}, which is protected: it showed that host's "
            f"key {shown}; nothing was authenticated: reach it as {owner.name}, with an approval"
        )
    raise HostKeyError(
        f"{host.name} ({host.address} port {host.port}) showed the host key {shown}; pinned are "
        f"{', '.join(host.fingerprints)}; nothing was authenticated: find out why, then correct hosts.yaml"
    )


class PinnedKeys(paramiko.MissingHostKeyPolicy):
    """Asked by paramiko about every host key, after the key exchange and before authentication."""

    def __init__(self, inventory: Inventory, host: Host) -> None:
        self.inventory, self.host = inventory, host

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        check_host_key(self.inventory, self.host, key)


class _Witness(paramiko.MissingHostKeyPolicy):
    """Remembers the key and goes no further."""

    key: paramiko.PKey | None = None

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        self.key = key
        raise HostKeyError("only looked at")


def _transports(key_types: Sequence[str]) -> Callable[..., paramiko.Transport]:
    """A factory of transports that negotiate ``key_types`` only (none: all) and prefer AES-GCM."""

    def transport(sock: Any, **options: Any) -> paramiko.Transport:
        made = paramiko.Transport(sock, **options)
        security = made.get_security_options()
        if key_types:
            security.key_types = tuple(key_types)
        security.ciphers = (*GCM, *(name for name in security.ciphers if name not in GCM))
        return made

    return transport


def effective_settings(address: str) -> Settings:
    """What the operator's ssh configuration, with its Include and Match, says about ``address``.

    :raises RouteError: ssh cannot read its configuration.
    """
    argv = [_program("ssh"), "-G", "--", address]
    try:
        finished = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        raise RouteError(f"ssh -G {address} did not end within 30 s; see what its Match exec waits for") from None
    if finished.returncode:
        raise RouteError(f"ssh -G {address}: {last_line(finished.stderr)}; correct the ssh configuration")
    return parse_settings(finished.stdout)


def environment() -> dict[str, str]:
    """This process's environment without an agent and without a program that asks for a passphrase."""
    return {name: value for name, value in os.environ.items() if name not in ("SSH_AUTH_SOCK", "SSH_ASKPASS")}


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        package = {"ssh": "openssh-client", "setpriv": "util-linux"}[name]
        raise ConnectionFailed(f"the program {name} was not found; install {package}")
    return found


def _close(connection: fabric.Connection) -> None:
    connection.client.close()
    if connection.gateway:
        _close(connection.gateway)
