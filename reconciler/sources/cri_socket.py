"""Where the container runtime's socket is. Apart from the client, whose HTTP/2 library only a query needs."""

import os

from reconciler.runtime.kubelet_programs import SOCKETS


def find_socket(endpoint: str | None, root: str = "/") -> str | None:
    """The runtime's socket: ``endpoint`` (a path or ``unix://`` URL) if given, else the first usual one that exists.

    Without the root prefix, so that a message shows the operator's path.
    """
    if endpoint:
        return endpoint.removeprefix("unix://")
    return next((path for path in SOCKETS if os.path.exists(os.path.join(root, path.lstrip("/")))), None)
