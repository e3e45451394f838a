"""Fixtures of the whole suite live in the modules named here."""

import os
import signal

# a shell starts jobs in the background with Ctrl-C ignored, and the commands that the tests interrupt would inherit it
signal.signal(signal.SIGINT, signal.default_int_handler)

# before torch is imported: tests share the cores with the lab's hosts, and thread teams that wait for each other waste
# them, five times the CPU and more
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.tiny", "tests.labs", "tests.sshds"]
