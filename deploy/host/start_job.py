"""Starts the command of a job, and stays with it. Stdlib only, Python 3.9.

    start_job.py SETTINGS COMMAND…

The gate has made the job's folder, started this in a session of its own and keeps it (its ``do_launch``). SETTINGS is
JSON: ``folder`` (of the job), ``job``, ``code`` (paths to digest) and what else is to be kept as it is. Here

* the job leaves the login that started it, for a scope of systemd's user manager, where there is one that stays: a
  machine may end what a login leaves behind. Its process id is the same before and after;
* ``launch.json`` says what was started: SETTINGS, and the digests of the code as it was at this moment;
* when the gate's keeper dies, its work goes on here: the heart beats, and ``exit`` is written;
* what the command leaves running gets some seconds and is ended then, so that a job that is over holds no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import pwd
import resource
import shutil
import signal
import subprocess  # noqa: TID251 - this runs on the host
import sys
import time

BEAT_SECONDS, LEAVING_SECONDS = 10.0, 10.0
MOST_FILES, MOST_BYTES = 10_000, 1 << 30
IN_SCOPE = "DFLASH_JOB_SCOPE"
SUBREAPER = 36  # prctl: what leaves its parent comes to this process
ASKED = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def main(arguments):
    settings, command = json.loads(arguments[0]), arguments[1:]
    folder, keeper = settings["folder"], os.getppid()
    scope = os.environ.pop(IN_SCOPE, None) or enter_scope(settings["job"], arguments)
    about = {**settings, "command": command, "scope": scope, "code": {path: digest(path) for path in settings["code"]}}
    try:
        write_whole(f"{folder}/launch.json", {**about, "started": time.time()})
    except OSError as error:
        sys.exit(f"launch.json: {error.strerror}; nothing was started: mend that (make room, where the disk is full)")
    me = pwd.getpwuid(os.getuid())
    for name, value in (("HOME", me.pw_dir), ("USER", me.pw_name), ("LOGNAME", me.pw_name)):
        os.environ.setdefault(name, value)
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=hear)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}; it was not started", file=sys.stderr, flush=True)
        code = 127
    else:
        # the whole group gets it; the command decides what it means, and this one tells how that ended
        for each in ASKED:
            signal.signal(each, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED)
        code = wait(child, folder, keeper)
        end_others()
    if os.getppid() != keeper:
        write_whole(f"{folder}/exit", {"exit": code, "ended": time.time()}, room=f"{folder}/heartbeat")
    end_as(code)


def enter_scope(job, arguments):
    """Go on within a scope of the user manager; return, with None, where there is none that stays."""
    folder, user = f"/run/user/{os.getuid()}", pwd.getpwuid(os.getuid()).pw_name
    # without lingering the manager ends with the last login, and everything in it
    if shutil.which("systemd-run") is None or not os.path.exists(f"/var/lib/systemd/linger/{user}"):
        return None
    start = ["systemd-run", "--user", "--scope", "--quiet", "--collect"]
    env = {**os.environ, "XDG_RUNTIME_DIR": folder}
    try:
        subprocess.run([*start, "true"], env=env, stdin=subprocess.DEVNULL, check=True, timeout=20, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        return None
    unit = f"dflash-job-{job}"
    again = ["env", f"{IN_SCOPE}={unit}.scope", sys.executable, "-I", os.path.abspath(__file__), *arguments]
    if "XDG_RUNTIME_DIR" not in os.environ:
        again[1:1] = ["-u", "XDG_RUNTIME_DIR"]
    os.execvpe(start[0], [*start, f"--unit={unit}", "--", *again], env)  # noqa: S606, TID251


def hear():
    """In the child, before it is the command: what came until now is for it, also what came before there was a child.

    A signal that waits for both is the same one. It waits once in each process, so none reaches the command twice.
    """
    waiting = 0
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/status", "rb") as status:
        waiting = next(int(line.split()[1], 16) for line in status if line.startswith(b"ShdPnd"))
    for each in ASKED:
        signal.signal(each, signal.SIG_DFL)
        if waiting >> (each - 1) & 1:
            os.kill(os.getpid(), each)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED)


def wait(child, folder, keeper):
    """The exit status of ``child``; meanwhile the heart beats where the keeper does not see to that any more."""
    while True:
        try:
            return child.wait(BEAT_SECONDS)
        except subprocess.TimeoutExpired:
            if os.getppid() != keeper:
                with contextlib.suppress(OSError):
                    os.utime(f"{folder}/heartbeat", follow_symlinks=False)


def end_others():
    """Wait for what is left below this process, then ask it to end and, where it does not, kill it."""
    began, told = time.monotonic(), set()
    while left := children():
        waited = time.monotonic() - began
        late = waited > 2 * LEAVING_SECONDS
        for pid in left if late else left - told if waited > LEAVING_SECONDS else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            told.add(pid)
        time.sleep(0.05)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def children():
    with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(map(int, file.read().split()))
    return set()


def end_as(code):
    """End as the command ended, by the same signal where it was one, so that the keeper writes down the same."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def digest(path):
    """sha256 of a file, or of the names and sha256 of all files below a folder, but for caches and hidden ones."""
    try:
        if not os.path.isdir(path):
            odd = os.path.exists(path) and not os.path.isfile(path)
            return f"not digested: {path} is no file or folder" if odd else file_digest(path)
        tree, size = {}, 0
        for folder, folders, files in os.walk(path):
            folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
            for file in (os.path.join(folder, name) for name in files if not name.startswith(".")):
                regular = os.path.isfile(file)  # whoever opens a pipe waits for its other end
                size += os.path.getsize(file) if regular else 0
                if len(tree) >= MOST_FILES or size > MOST_BYTES:
                    return f"not digested: more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB"
                tree[os.path.relpath(file, path)] = file_digest(file) if regular else "no file"
    except OSError as error:
        return f"not digested: {error.filename}: {error.strerror}"
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def file_digest(path):
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):  # a file can be larger than what memory training leaves
            sha256.update(data)
    return sha256.hexdigest()


def write_whole(path, content, room=None):
    """``room`` becomes it where there is no place for a new file: that has its block, also where the disk is full."""
    partial = f"{path}.{os.getpid()}"
    try:
        write_into(partial, "w", content)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        if room is None:
            raise
        write_into(partial := room, "r+", content)
    os.rename(partial, path)


def write_into(path, mode, content):
    with open(path, mode, encoding="utf-8") as file:
        json.dump(content, file)
        file.truncate()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
