"""One control plane with a real kubelet for all tests that need one: it is ready in 15 seconds, and gone at the end."""

from collections.abc import Iterator

import pytest

from tests.cluster.control_plane import control_plane
from tests.cluster.real_node import RealNode, real_node


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    """The node; its ``plane`` is the control plane. Tests remove their own objects."""
    with control_plane(tmp_path_factory.mktemp("real"), in_cluster=True) as plane, real_node(plane) as node:
        yield node
