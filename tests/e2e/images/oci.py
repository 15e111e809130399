"""An OCI image layout as one tar file, from one static program.

It makes two images: ``PAUSE`` (what the runtime starts for a pod's sandbox) and ``APP`` (every other container).
Both hold the same program.

Source: OCI image specification (image-layout, manifest, config); containerd names images at import by the annotation
``io.containerd.image.name`` of the index entry.
"""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Final

PAUSE: Final = "localhost/bypassd-test/pause:1"
APP: Final = "localhost/bypassd-test/app:1"

_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_DIRECTORIES: Final = ("dev", "etc", "out", "proc", "sys", "tmp")


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = mode
    tar.addfile(entry, io.BytesIO(content))


def _layer(program: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in _DIRECTORIES:
            entry = tarfile.TarInfo(name)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o755
            tar.addfile(entry)
        _add(tar, "app", program, 0o755)
    return buffer.getvalue()


def build(program: Path, target: str) -> None:
    """Write the image layout of `PAUSE` and `APP` to ``target``. Same program, same bytes."""
    blobs: dict[str, bytes] = {}

    def blob(content: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    def text(value: object) -> bytes:
        return json.dumps(value, sort_keys=True).encode()

    layer_bytes = _layer(program.read_bytes())
    layer = blob(layer_bytes, _LAYER)
    index = []
    for name, entrypoint in ((PAUSE, ["/app", "-", "sleep"]), (APP, ["/app"])):
        config = {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Entrypoint": entrypoint, "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": blob(text(config), _CONFIG),
            "layers": [layer],
        }
        index.append({**blob(text(manifest), _MANIFEST), "annotations": {"io.containerd.image.name": name}})
    with tarfile.open(target, mode="w") as tar:
        _add(tar, "oci-layout", text({"imageLayoutVersion": "1.0.0"}))
        _add(tar, "index.json", text({"schemaVersion": 2, "manifests": index}))
        for digest, content in sorted(blobs.items()):
            _add(tar, f"blobs/sha256/{digest}", content)
