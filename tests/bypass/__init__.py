"""Ways around the guard, one function each: every one of them has to end in a refusal.

They go through the program where it refuses by itself, and past its own checks where the host has to: with a
certificate that the operator's CA signed in another way, with another action line, with a copied key.
"""

from tests.bypass import client, host, names, performed, store
from tests.bypass.stage import ATTEMPTS

__all__ = ["ATTEMPTS", "client", "host", "names", "performed", "store"]
