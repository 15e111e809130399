"""The one text of an OCI bundle that the nodes write: what containerd 1.6's CRI plug-in puts into config.json.

Only the fields that an agent can use: annotations, the group's path, resources, the command. Namespaces, mounts and
capabilities are left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

_CRI: Final = "io.kubernetes.cri."


def bundle(
    *,
    uid: str,
    namespace: str,
    pod: str,
    group: str,
    resources: Mapping[str, Any],
    container: str = "",
    sandbox: str = "",
    args: Sequence[str] = ("app",),
    env: Sequence[str] = (),
) -> dict[str, Any]:
    """config.json; no ``container``: the pod's sandbox. ``resources``: the OCI specification's section."""
    notes = {
        f"{_CRI}container-type": "container" if container else "sandbox",
        f"{_CRI}sandbox-id": sandbox,
        f"{_CRI}sandbox-name": pod,
        f"{_CRI}sandbox-namespace": namespace,
        f"{_CRI}sandbox-uid": uid,
    }
    if container:
        notes |= {f"{_CRI}container-name": container, f"{_CRI}image-name": "app:1"}
    return {
        "ociVersion": "1.0.2-dev",
        "process": {"args": list(args), "cwd": "/", **({"env": list(env)} if env else {})},
        "root": {"path": "rootfs"},
        "annotations": dict(sorted(notes.items())),
        "linux": {"resources": resources, "cgroupsPath": group},
    }
