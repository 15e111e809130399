#!/usr/bin/env python3
"""Build the container image, with neither a daemon nor a shell: ``image.py --output DIRECTORY``. The tarball's tree.

The result is one tar file with an OCI image layout: one layer (the tree at /opt/bypassd, and empty directories onto
which a pod mounts), its configuration, a manifest and an index. `ctr images import`, `podman load` and `skopeo copy
oci-archive:FILE` read it. Files are sorted, owned by root, and as old as the commit, so two builds of one commit give
the same bytes.

Source: OCI image specification 1.0 (image-layout, config, manifest, annotations). containerd names an imported image by
the annotation ``io.containerd.image.name`` of the index entry. Exit codes: as build.py's.
"""

import argparse
import gzip
import hashlib
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import build
import manual

NAME: Final = "localhost/bypassd"
"""No registry has it: a node without the image does not pull what somebody else has given this name."""
PROGRAMS: Final = f"{build.PREFIX}/bin"
DIRECTORIES: Final = (
    *("dev", "etc", "etc/bypassd", "opt", "proc", "run", "run/bypassd", "sys", "tmp", "var", "var/lib"),
    *("var/lib/bypassd", "var/run"),
)
"""Mount points, and the ways to them. Others are made by the runtime; these are there for a run without mounts, too."""
FILES: Final = {
    # Without this file the C library asks DNS before /etc/hosts.
    "etc/nsswitch.conf": b"hosts: files dns\n",
}
LAYER: Final = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG: Final = "application/vnd.oci.image.config.v1+json"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"


def encoded(value: object) -> bytes:
    """JSON with one form only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest(content: bytes) -> str:
    """The content's name."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def member(name: str, when: int, content: bytes | None) -> tarfile.TarInfo:
    """A file of root's, or a directory (None)."""
    info = tarfile.TarInfo(name)
    info.mtime, info.uname, info.gname = when, "root", "root"
    if content is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
    else:
        info.size, info.mode = len(content), 0o644
    return info


def members(tree: Path, when: int) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """The root file system in its order: every directory before what is in it."""
    for name in DIRECTORIES:
        yield member(name, when, None), None
    for name, content in sorted(FILES.items()):
        yield member(name, when, content), content
    yield from build.entries(tree, build.PREFIX.lstrip("/"), when)


def archived(items: Iterator[tuple[tarfile.TarInfo, bytes | None]]) -> bytes:
    """A tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in items:
            archive.addfile(info, None if content is None else io.BytesIO(content))
    return buffer.getvalue()


def annotations(version: str, revision: str, created: str) -> dict[str, str]:
    """What the image says of itself."""
    prefix = "org.opencontainers.image"
    return {
        f"{prefix}.created": created,
        f"{prefix}.description": "Keeps latency-critical pods fast on Kubernetes nodes without NRI",
        f"{prefix}.licenses": "Apache-2.0",
        f"{prefix}.revision": revision,
        f"{prefix}.title": "bypassd",
        f"{prefix}.version": version,
    }


def layout(tree: Path, *, version: str, revision: str, when: int) -> bytes:
    """The image layout as a tar file. ``when``: seconds since 1970 of every file."""
    created = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    plain = archived(members(tree, when))
    layer = gzip.compress(plain, 9, mtime=when)
    notes = annotations(version, revision, created)
    config = encoded(
        {
            "architecture": "amd64",
            "config": {
                "Cmd": ["run"],
                "Entrypoint": [f"{PROGRAMS}/bypassd"],
                # As in the unit: one arena keeps the daemon small.
                "Env": [f"PATH={PROGRAMS}", "MALLOC_ARENA_MAX=1"],
                "Labels": notes,
                "StopSignal": "SIGTERM",
                "WorkingDir": "/",
            },
            "created": created,
            "history": [{"created": created, "created_by": "deploy/artifact/image.py"}],
            "os": "linux",
            "rootfs": {"diff_ids": [digest(plain)], "type": "layers"},
        }
    )
    manifest = encoded(
        {
            "annotations": notes,
            "config": {"digest": digest(config), "mediaType": CONFIG, "size": len(config)},
            "layers": [{"digest": digest(layer), "mediaType": LAYER, "size": len(layer)}],
            "mediaType": MANIFEST,
            "schemaVersion": 2,
        }
    )
    index = encoded(
        {
            "manifests": [
                {
                    "annotations": {
                        "io.containerd.image.name": f"{NAME}:{version}",
                        "org.opencontainers.image.ref.name": version,
                    },
                    "digest": digest(manifest),
                    "mediaType": MANIFEST,
                    "platform": {"architecture": "amd64", "os": "linux"},
                    "size": len(manifest),
                }
            ],
            "mediaType": INDEX,
            "schemaVersion": 2,
        }
    )
    blobs = {f"blobs/{digest(content).replace(':', '/')}": content for content in (layer, config, manifest)}
    files = {"oci-layout": encoded({"imageLayoutVersion": "1.0.0"}), "index.json": index, **blobs}
    folders = [(member(name, when, None), None) for name in ("blobs", "blobs/sha256")]
    return archived(iter([*folders, *((member(name, when, files[name]), files[name]) for name in sorted(files))]))


def image(output: Path, cache: Path) -> Path:
    """The image. Errors: `build.BuildError`."""
    output.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    version = build.version()
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        tree = Path(scratch, "bypassd")
        build.build_tree(tree, cache)
        revision = build.run("git", "-C", str(build.REPOSITORY), "rev-parse", "HEAD").strip()
        content = layout(tree, version=version, revision=revision, when=build.commit_time())
    result = output / f"bypassd-{version}-image-x86_64.tar"
    part = result.with_suffix(".part")
    part.write_bytes(content)
    part.rename(result)
    result.with_name(f"{result.name}.sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  {result.name}\n")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    options = argparse.ArgumentParser(description="Build the container image.")
    options.add_argument("--output", type=Path, default=build.REPOSITORY / "dist", help="directory of the image")
    options.add_argument(
        "--cache", type=Path, default=build.REPOSITORY / "dist/cache", help="directory of fetched packages"
    )
    given = options.parse_args(arguments)
    try:
        result = image(given.output.resolve(), given.cache.resolve())
    except (build.BuildError, manual.ManualError) as exc:
        print(f"image.py: {exc}", file=sys.stderr)
        return 1
    print(f"{result} ({result.stat().st_size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
