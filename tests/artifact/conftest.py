"""The node and the daemon of tests/daemon, for the program of the artifact."""

from tests.daemon.conftest import daemon, node

__all__ = ["daemon", "node"]
