"""The nodes and the daemon of tests/daemon and tests/e2e, for the programs of the artifacts."""

from tests.daemon.conftest import daemon, node
from tests.e2e.conftest import containerd_node

__all__ = ["containerd_node", "daemon", "node"]
