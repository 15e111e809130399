"""Where the container runtime's socket is. Apart from the client, whose HTTP/2 library only a query needs."""

import os
from typing import Final

STANDARD_SOCKETS: Final = (
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/cri-dockerd.sock",
)


def find_socket(endpoint: str | None, root: str = "/") -> str | None:
    """The runtime's socket: ``endpoint`` (a path or ``unix://`` URL) if given, else the first usual one that exists.

    Without the root prefix, so that a message shows the operator's path.
    """
    if endpoint:
        return endpoint.removeprefix("unix://")
    return next((path for path in STANDARD_SOCKETS if os.path.exists(os.path.join(root, path.lstrip("/")))), None)
