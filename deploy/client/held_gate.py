# ruff: noqa: F821 - the names are those of the gate program, in whose module this is run, see tasks/sent_gate.py
"""``enforcement: client``: the gate program, sent along and held to a certificate that the sender has verified.

Nothing is installed here, so nothing is kept between sessions: those the sender counts, and the bytes as well.
"""


class Memory:
    """Stands for the gate's state folder for as long as one session lasts."""

    def __init__(self, read_limit):
        self.read_limit = read_limit
        self.spent = {}

    @contextlib.contextmanager
    def spending(self, name, *, durable):
        yield self.spent.setdefault(name, Spent())

    def log(self, event, **fields):
        """The sender's audit log is the only one."""


def serve_held(held_to):
    """Serve what the action on the first line allows, when it is the one in ``held_to``; return the exit status."""
    try:
        be_polite()
        held = json.loads(held_to)
        check_comes_from(held["sources"], os.environ.get("SSH_CONNECTION", "").partition(" ")[0])
        end_at(held["valid_before"])
        certificate = Certificate(held["serial"], held["key_id"], held["valid_before"], held["digest"])
        grant = parse_grant(next_line() or b"", held["digest"], set(held["host_keys"]))
        return serve(GrantAccess(Memory(held["read_limit"]), grant, certificate))
    except Refusal as refusal:
        return refuse(refusal, STDOUT)


def check_comes_from(sources, client):
    try:
        address = ipaddress.ip_address(client)
        if any(address in ipaddress.ip_network(source) for source in sources.split(",")):
            return
    except ValueError:
        pass
    raise Refusal(f"the approval is for {sources}, and this login is from {client!r}")
