"""Whether a protected host refuses what it should: attempts at it that must fail, and what each of them found.

Without an approval nothing is attempted that could get further than authentication: keys are only offered, by their
public halves, so that not even a host without any guard would let the attempt in. What needs a session is done under an
approval of its own (:mod:`tasks.doctor_sessions`) and skipped without.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dflash.errors import UsageError
from tasks import certificates, doctor_sessions, public_keys
from tasks.actions import said
from tasks.approvals import Approved
from tasks.certificates import PRINCIPAL, CertificateError
from tasks.deciding import user_name
from tasks.finding import Finding, Status
from tasks.identities import Identities, Identity, agent_identities, identities_here, private_keys_here
from tasks.inventory import Host
from tasks.offers import Offers, hear, identity_in, place
from tasks.ssh import Connector, HostKeyError, effective_settings

PAUSE_SECONDS = 6.0
"""Between two offers: newer sshds lock an address out that fails more often than every 5 s."""
KEY_ALGORITHMS = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "rsa-sha2-512")

Progress = Callable[[str], None]


def diagnose(
    connector: Connector,
    host: Host,
    *,
    full: Approved | None = None,
    gate: str | None = None,
    identities: Identities | None = None,
    pause: float = PAUSE_SECONDS,
    progress: Progress | None = None,
) -> list[Finding]:
    """Try what must fail on ``host``; ``full`` is the approval of :func:`tasks.doctor_sessions.full_plan`.

    ``gate`` is the gate program's path on the host when it is not where ``guard setup`` puts it, ``identities`` are
    offered (by default all of this machine), ``pause`` is in seconds, ``progress`` gets the name of each row as it
    begins. One entry of the audit log says that it was done.

    :raises UsageError: ``host`` is not protected.
    :raises HostKeyError: another machine answers.
    :raises ConnectionFailed: it cannot be reached.
    """
    if not host.protected:
        raise UsageError(f"{host.name} is not protected, so it refuses nothing; protected are the training hosts")
    tell = progress or (lambda _: None)
    connector.audit.append("doctor", host=host.name, request=full.id if full else None)
    with tempfile.TemporaryDirectory(prefix="dflash-doctor-") as folder:
        offers = Offers(connector, host, Path(folder), pause)
        findings = [_enforcement(host), ca_key(connector)]
        for row in (_host_keys, _no_certificate, _other_ca, _expired, _without_force_command):
            tell(row.__name__.strip("_").replace("_", " "))
            findings.append(row(offers))
        tell("ordinary keys")
        findings += _ordinary_keys(offers, identities or _identities(connector, host))
        if full is not None:
            findings += doctor_sessions.attempt(connector, host, full, gate, tell)
        else:
            findings += doctor_sessions.skipped()
    return findings


# --- rows


def _enforcement(host: Host) -> Finding:
    name = "enforcement"
    if host.enforcement == "host":
        user = f"; commands run as {host.job_user}" if host.job_user else ""
        return Finding(name, "pass", f"host{user}", "so says hosts.yaml; whether its sshd does, the rows below tell")
    if host.enforcement == "authorized-keys":
        return Finding(
            name,
            "warn",
            "authorized-keys",
            f"the gate and its budgets belong to {host.user}, so an approved command could rewrite them; another line "
            "of authorized_keys, a password or a certificate of your CA without a forced command passes the gate by",
        )
    return Finding(
        name,
        "warn",
        "client",
        f"this can be bypassed: only this program checks approvals, and whatever can use the key of {host.user} does "
        f"there what it likes; 'dflash-ops guard setup {host.name}' says what to do about it",
    )


def ca_key(connector: Connector) -> Finding:
    """Whether the CA's private key can sign on this machine without the operator."""
    name, guard = "CA key", connector.inventory.guard
    blob = public_keys.blob(guard.ca_public_key)
    if any(public_keys.blob(one.line) == blob for one in agent_identities()):
        return Finding(
            name,
            "warn",
            "in the ssh agent",
            "whatever reaches the agent can sign approvals, unless the key was added with ssh-add -c; take it out: "
            "ssh-add -d",
        )
    named = [guard.ca_key] if guard.ca_key is not None and guard.ca_key.exists() else []
    try:
        keys = {file: public_keys.read_private_key_file(file) for file in named}
    except (OSError, public_keys.PublicKeyError) as error:
        return Finding(name, "warn", said(str(error)), "it could not be told whether the CA key has a passphrase")
    # whoever keeps it may not have named it
    keys = {file: key for file, key in (private_keys_here() | keys).items() if key.public == blob}
    if not keys:
        return Finding(
            name, "pass", "not on this machine", "neither hosts.yaml nor ~/.ssh has it, so nothing here approves"
        )
    plain = [file for file, key in keys.items() if not key.encrypted]
    if not plain or public_keys.is_in_token(guard.ca_public_key):
        return Finding(name, "pass", "has a passphrase or asks for a touch", "it signs with the operator there")
    if guard.lab:
        return Finding(name, "warn", "the lab's, without a passphrase", "anything on this machine can approve")
    why = f"anything on this machine can approve; give it a passphrase: ssh-keygen -p -f {plain[0]}"
    return Finding(name, "fail", f"no passphrase: {said(str(plain[0]))}", why)


def _host_keys(offers: Offers) -> Finding:
    name, pinned = "host keys", set(offers.host.fingerprints)
    seen: dict[str, str] = {}
    for at in offers.endpoints:
        # no key is known here, so that this ends right behind the key exchange
        unknown = ("-o", "UserKnownHostsFile=/dev/null")
        every = ("-o", f"HostKeyAlgorithms={','.join(KEY_ALGORITHMS)}")
        heard = hear(offers.ask(at, options=(*unknown, *every)))
        if heard.host_key is None:
            raise offers.connector.failure(at, heard.complaint)
        seen[heard.host_key] = f"{heard.host_key} ({place(at)})"
        # the first that both sides know was shown just now
        for algorithm in [one for one in KEY_ALGORITHMS if one in heard.algorithms][1:]:
            heard = hear(offers.ask(at, options=(*unknown, "-o", f"HostKeyAlgorithms={algorithm}")))
            if heard.host_key is None:
                raise offers.connector.failure(at, heard.complaint)
            seen[heard.host_key] = f"{heard.host_key} ({algorithm}, {place(at)})"
    if not pinned & set(seen):
        raise HostKeyError(
            f"{offers.host.name} showed {', '.join(seen) or 'no key'}, and pinned are {', '.join(sorted(pinned))}; "
            "it is another machine, or hosts.yaml is wrong: nothing else was tried"
        )
    if loose := [shown for key, shown in seen.items() if key not in pinned]:
        why = "the host is known by its keys: under another name, one that is not pinned would not be recognised as its"
        return Finding(name, "fail", f"not pinned: {', '.join(loose)}", f"{why}; add it to host_keys in hosts.yaml")
    return Finding(name, "pass", f"{len(seen)} shown, all pinned", "whatever name leads there, the host is recognised")


def _no_certificate(offers: Offers) -> Finding:
    name = "no certificate"
    bare = identity_in(offers.key_pair("bare").with_suffix(".pub"))
    methods: set[str] = set()
    for at in offers.endpoints:
        for answer in offers.offer(at, [bare]):
            if answer.taken is not False:
                return Finding(name, "fail", f"a key made for this was taken ({place(at)})", "anybody gets in there")
            methods |= set(answer.methods)
    if others := sorted(methods - {"publickey"}):
        status: Status = "fail" if offers.host.enforcement == "host" else "warn"
        why = f"{offers.host.user} can also log in in ways that no certificate is needed for; see guard setup"
        return Finding(name, status, f"refused, but {', '.join(others)} may be tried", why)
    return Finding(name, "pass", "refused, and nothing but keys may be tried", "a key alone opens nothing")


def _other_ca(offers: Offers) -> Finding:
    form = (f"force-command={PRINCIPAL} {'0' * 64}", f"source-address={','.join(offers.host.source_addresses)}")
    return _certificate(
        offers,
        "certificate of another CA",
        offers.foreign_certificate("foreign", *form),
        "an approval that your CA did not sign opens nothing",
    )


def _expired(offers: Offers) -> Finding:
    name = "expired certificate"
    expired = _newest_expired(offers.connector, offers.host)
    if expired is None:
        why = "your CA's certificates are on this machine once something was approved; one that is over is tried then"
        return Finding(name, "skipped", "none of your CA has expired yet", f"not looked at: {why}")
    return _certificate(offers, name, expired, "an approval that is over opens nothing")


def _without_force_command(offers: Offers) -> Finding:
    return _certificate(
        offers,
        "certificate without force-command",
        offers.foreign_certificate("shell"),
        "of another CA, so that it ends at authentication; one of your own CA, which dflash-ops never signs, "
        + ("would be a shell" if offers.host.enforcement == "authorized-keys" else "gets no further than the gate"),
    )


def _certificate(offers: Offers, name: str, identity: Identity, meaning: str) -> Finding:
    for at in offers.endpoints:
        for answer in offers.offer(at, [identity]):
            if answer.taken is None:
                return Finding(name, "skipped", "ssh did not offer it", "not looked at: use a newer OpenSSH client")
            if answer.taken:
                return Finding(name, "fail", f"taken ({answer.endpoint})", "sshd would let it in; see guard setup")
    return Finding(name, "pass", "refused", meaning)


def _ordinary_keys(offers: Offers, identities: Identities) -> Iterator[Finding]:
    """Every identity of this machine, for the login of the gate, root and whoever asks."""
    unread = ", ".join(f"not read: {said(str(file))}" for file in identities.unread)
    for user in dict.fromkeys((offers.host.user, "root", user_name())):
        answers = [
            answer
            for at in offers.endpoints
            for answer in offers.offer(at.model_copy(update={"user": user}), identities.found)
        ]
        name = f"ordinary keys as {user}"
        taken = [f"{said(one.identity.where)} at {one.endpoint}" for one in answers if one.taken]
        silent = [f"not offered: {said(one.identity.where)}" for one in answers if one.taken is None]
        if taken:
            by_design = offers.host.enforcement == "client" and user == offers.host.user
            yield Finding(
                name,
                "warn" if by_design else "fail",
                f"taken: {'; '.join(taken)}",
                "so it has to be with enforcement: client, and that is how it can be bypassed"
                if by_design
                else f"that key reaches the host past the gate: take it out of what {user} accepts there",
            )
        elif silent or unread:
            rest = "; ".join([*silent, *([unread] if unread else [])])
            yield Finding(
                name, "warn", f"{len(answers) - len(silent)} refused; {rest}", "these could not be asked about"
            )
        else:
            yield Finding(name, "pass", f"{len(answers)} refused", "no key of this machine reaches the host by itself")


# --- material


def _identities(connector: Connector, host: Host) -> Identities:
    """The keys of this machine, those that hosts.yaml and the ssh configuration name included."""
    named = [each.identity_file for each in connector.inventory.hosts.values() if each.identity_file is not None]
    for address, _ in host.endpoints:
        named += effective_settings(address).identity_files
    return identities_here([file for file in named if file.exists()])


def _newest_expired(connector: Connector, host: Host) -> Identity | None:
    """The last certificate that the operator's CA signed for this host and that is over."""
    over: list[tuple[int, Path]] = []
    for file in (connector.store.folder / "keys").glob("*-cert.pub"):
        try:
            terms = certificates.read(file, connector.inventory.guard.ca_public_key).terms
        except CertificateError:
            continue
        # a minute more, for a host whose clock is behind
        if terms.source_addresses == host.source_addresses and terms.not_after < time.time() - 60:
            over.append((terms.not_after, file))
    return identity_in(max(over)[1]) if over else None
