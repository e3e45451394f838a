# ruff: noqa: F821 - the names are those of the gate program, in whose module this is run, see tasks/sent_gate.py
"""``enforcement: client``: the gate program, sent along and held to a certificate that the sender has verified.

Nothing is installed here, so nothing is kept between sessions: the sender counts those, their bytes and what is spent.
"""

import ipaddress


class Held(Gate):
    """The gate with its state in memory, for as long as one session lasts."""

    log = staticmethod(lambda *_, **__: None)  # the sender's audit log is the only one

    def __init__(self, read_limit):
        Session.__init__(self)
        self.read_limit = read_limit
        self.kept = {}

    @contextlib.contextmanager
    def spending(self, name, *, durable=False):
        yield self.kept.setdefault(name, SimpleNamespace(sessions=0, bytes=0, revoked=0, next=0.0, files={}))


def serve_held(held_to):
    """Do what the action on the first line says, when it is the one in ``held_to``; return the exit status."""
    held = json.loads(held_to)
    try:
        check_comes_from(held["sources"], os.environ.get("SSH_CONNECTION", "").partition(" ")[0])
        end_at(held["valid_before"], Spent("the approval expired; ask for a new one"), clock)
        gate = Held(held["read_limit"])
        gate.action = parse_action(next_line() or b"", held["digest"], held["host_keys"])
        if gate.action.kind not in URGENT:
            be_polite()
        gate.hold(gate.action, Certificate(held["serial"], held["key_id"], held["valid_before"], held["digest"]))
        os.umask(0o022)
        return gate.conclude(gate.serve if gate.action.kind == "read-grant" else gate.perform)
    except Refusal as refusal:
        return refuse(refusal)


def check_comes_from(sources, client):
    try:
        address = ipaddress.ip_address(client)
        if any(address in ipaddress.ip_network(source) for source in sources.split(",")):
            return
    except ValueError:
        pass
    raise Refusal(f"the approval is for {sources}, and this login is from {client!r}")
