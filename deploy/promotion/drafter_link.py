"""On the inference host: which drafter the server is to load, as a symbolic link that changes in one step.

    drafter_link.py show LINK
    drafter_link.py switch LINK DIRECTORY EXPECTED    # EXPECTED: what the link names now, "" for none
    drafter_link.py rollback LINK EXPECTED

``LINK.previous`` names what LINK named before. Nothing is deleted, and nothing but the two links changes: each by a
rename, so that whoever opens LINK finds the old drafter or the new one. ``LINK.before`` is there between the two
renames; where it stayed because this program was killed, it tells what was half done, and that counts as done. Prints
one line of JSON; what cannot be done is {"refused": why} and changes nothing. Standard library of Python 3.9 only.
"""

import fcntl
import json
import os
import sys


class Refused(Exception):
    """Said in one sentence."""


def main(arguments):
    verb, link, rest = arguments[0], arguments[1], arguments[2:]
    try:
        with Folder(os.path.dirname(link)):
            if verb == "switch":
                switch(link, *rest)
            elif verb == "rollback":
                rollback(link, *rest)
            print(json.dumps(show(link)))
    except Refused as refusal:
        print(json.dumps({"refused": str(refusal)}))
    except OSError as error:
        print(json.dumps({"refused": f"{error.filename or link}: {error.strerror}"}))


class Folder:
    """The folder of the link, of which one process at a time changes the links."""

    def __init__(self, path):
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self):
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def __exit__(self, *error):
        os.fsync(self._handle)
        os.close(self._handle)


def show(link):
    """What both links name, each as it is written there; None where there is no link."""
    return {"current": named_by(link), "previous": named_before(link)}


def switch(link, directory, expected):
    require(os.path.dirname(directory) == os.path.dirname(link), f"{directory} does not lie beside {link}")
    require(os.path.isdir(directory), f"{directory} is no directory")
    name, now = os.path.basename(directory), named_by(link)
    if now == name:
        return
    require((now or "") == expected, f"{link} names {now} now: somebody else changed it meanwhile")
    change(link, name)


def rollback(link, expected):
    now, before = named_by(link), named_before(link)
    require(now is not None and before is not None, f"{link} has named nothing before")
    require(now == expected, f"{link} names {now} now: somebody else changed it meanwhile")
    target = os.path.join(os.path.dirname(link), before)
    require(os.path.isdir(target), f"{target}, which it named before, is not there any more")
    if before != now:
        change(link, before)


def change(link, name):
    """Have ``link`` name ``name``, and its previous what it names now; cut off anywhere, neither name is lost."""
    settle(link)
    now = named_by(link)
    if now is not None:
        point(begun(link), now)
    point(link, name)
    settle(link)


def settle(link):
    """End the change that ``LINK.before`` tells of: it was made when the link names something else by now."""
    before = named_by(begun(link))
    if before is None:
        return
    if before == named_by(link):
        os.unlink(begun(link))
    else:
        os.replace(begun(link), previous(link))


def named_before(link):
    before = named_by(begun(link))
    return named_by(previous(link)) if before in (None, named_by(link)) else before


def previous(link):
    return link + ".previous"


def begun(link):
    return link + ".before"


def named_by(link):
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return None
    except OSError:
        raise Refused(f"{link} is there and is no link: move it away, or name another place") from None


def point(link, name):
    """Have ``link`` name ``name``, in one step."""
    new = f"{link}.new"  # one process at a time is here, so what lies there is of one that was killed
    if os.path.lexists(new):
        os.unlink(new)
    os.symlink(name, new)
    try:
        os.replace(new, link)
    except OSError:
        os.unlink(new)
        raise


def require(true, otherwise):
    if not true:
        raise Refused(otherwise)


if __name__ == "__main__":
    main(sys.argv[1:])
