"""Where a package has the files of the tarball: `lay_out` makes its root directory.

The tree is in /usr/lib/bypassd: /opt belongs to the operator and his tarballs (Debian policy 9.1, FHS 3.13), and a
package in it is an error for lintian. Everything follows from the tarball's bytes; files are as old as its members.
"""

import argparse
import gzip
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

PREFIX: Final = "usr/lib/bypassd"
PROGRAMS: Final = ("bypassd", "bypassctl", "state-dump")
UNIT: Final = "usr/lib/systemd/system/bypassd.service"
ZSH: Final = "usr/share/zsh/site-functions/_bypassctl"
DOCUMENTS: Final = "usr/share/doc/bypassd"
CONFIG: Final = "etc/bypassd/config.yaml"
MAINTAINER: Final = "bypassd maintainers <maintainers@bypassd.invalid>"
COMMON: Final = Path(__file__).resolve().parent / "packages/common.sh"


class Release(NamedTuple):
    """What is packed: ``when`` is the time of its files, in seconds since 1970."""

    version: str
    when: int

    @property
    def sortable(self) -> str:
        """The version for dpkg and rpm, to which 1.0~rc1 is before 1.0."""
        return re.sub(r"(?<=\d)\.?(a|b|rc|dev)(?=\d)", r"~\1", self.version)


def lay_out(tarball: Path, root: Path) -> Release:
    """Make ``root``, a package's root directory, from the tarball."""
    with tarfile.open(tarball) as archive:
        first = archive.next()
        # Python 3.11.2, which is Debian 12's, has no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(root)  # noqa: S202  (our own tarball)
    (root / "usr/lib").mkdir(parents=True)
    tree = (root / first.name).rename(root / PREFIX)
    shared = tree / "share/bypassd"
    (tree / "install.sh").unlink()
    for name in PROGRAMS:
        link = root / "usr/bin" / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(f"../lib/bypassd/bin/{name}")
    move(shared / "config.yaml", root / CONFIG)
    move(shared / "bypassd.service", root / UNIT)
    unit = (root / UNIT).read_text().replace("/opt/bypassd/", f"/{PREFIX}/")
    (root / UNIT).write_text(unit)
    move(shared / "completion/bypassctl.bash", root / "usr/share/bash-completion/completions/bypassctl")
    move(shared / "completion/bypassctl.fish", root / "usr/share/fish/vendor_completions.d/bypassctl.fish")
    move(shared / "completion/_bypassctl", root / ZSH)
    (shared / "completion").rmdir()
    move(shared / "docs", root / DOCUMENTS)
    for example in ("alert-rules.yaml", "grafana-dashboard.json"):
        move(shared / example, root / DOCUMENTS / "examples" / example)
    move(shared / "README.md", root / DOCUMENTS / "README.md")
    readme = (root / DOCUMENTS / "README.md").read_text().replace("](docs/", "](")
    (root / DOCUMENTS / "README.md").write_text(readme)
    move(shared / "CHANGELOG.md", root / DOCUMENTS / "changelog")
    move(tree / "share/man", root / "usr/share/man")
    for page in [*(root / "usr/share/man").glob("*/*"), root / DOCUMENTS / "changelog"]:
        compress(page)
    match = re.search(r"^version (\S+)$", (shared / "build-id").read_text(), re.MULTILINE)
    return Release(match[1], int(first.mtime))


def move(source: Path, target: Path) -> None:
    """Move a file or directory to a place whose directories are made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(source, target)


def compress(path: Path) -> None:
    """FILE becomes FILE.gz, without name and time."""
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))
    path.unlink()


def settle(root: Path, when: int) -> None:
    """The rights and times of a finished root: 755 or 644 whatever the umask is, but the configuration is root's."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        os.utime(path, (when, when), follow_symlinks=False)
    (root / CONFIG).chmod(0o600)


def script(path: Path) -> str:
    """A package's script with the functions that all have in common."""
    return path.read_text().replace("# common.sh\n", COMMON.read_text())


def packer(description: str, pack: Callable[[Path, Path], Path]) -> int:
    """The program that packs a tarball: its arguments, result and exit code. Errors: those of ``pack``."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("tarball", type=Path)
    options.add_argument("--output", type=Path, required=True, help="directory of the package")
    given = options.parse_args()
    try:
        result = pack(given.tarball.resolve(), given.output.resolve())
    except subprocess.CalledProcessError as exc:
        print(f"{Path(sys.argv[0]).name}: {exc.cmd[0]}: exit {exc.returncode}", file=sys.stderr)
        return 1
    print(f"{result} ({result.stat().st_size / 2**20:.1f} MiB)")
    return 0
