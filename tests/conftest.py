"""Fixtures of the whole suite live in the modules named here."""

pytest_plugins = ["tests.tiny", "tests.labs", "tests.sshds"]
