#!/usr/bin/env python3
"""Pack the tarball as a Debian package: ``deb.py TARBALL --output DIRECTORY``.

The package has the tarball's tree at the places that Debian has for them (layout.py) and the scripts in packages/. Two
packages of one tarball have the same bytes. It is compressed with xz, which dpkg of Ubuntu 18.04 and Debian 11 reads.
Needs dpkg-deb. Exit codes: 0 packed; 1 dpkg-deb failed; 2 usage.
"""

import email.utils
import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from layout import CONFIG, DOCUMENTS, MAINTAINER, UNIT, ZSH, Release, lay_out, move, packer, script, settle

HERE: Final = Path(__file__).resolve().parent / "packages"
CONTROL: Final = """\
Package: bypassd
Version: {version}
Architecture: amd64
Maintainer: {maintainer}
Installed-Size: {kib}
Suggests: ca-certificates
Section: admin
Priority: optional
Description: cgroup reconciler for Kubernetes nodes without NRI
 bypassd keeps latency-critical pods fast while best-effort pods use the
 remaining capacity, on nodes whose container runtime has no NRI. It brings its
 own interpreter and libraries, and needs nothing of the host but its kernel.
 .
 After installation it observes: it shows what it would write, and writes
 nothing before the configuration says enforce. Removal restores every value.
"""
CHANGELOG: Final = """\
bypassd ({version}) unstable; urgency=medium

  * Release {upstream}; its changes are in changelog.gz.

 -- {maintainer}  {date}
"""
COPYRIGHT: Final = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: bypassd
Comment: The interpreter and the libraries that the package brings have their
 own licences: /usr/lib/bypassd/share/bypassd/licenses has those of Debian's
 packages, /usr/lib/bypassd/lib/bypassd/packages/*.dist-info those of Python's.

Files: *
Copyright: 2026 the authors of bypassd
License: Apache-2.0
 The text is in /usr/share/common-licenses/Apache-2.0.
"""


def add_control(root: Path, release: Release, version: str) -> None:
    """The package's own files: DEBIAN/ and what policy wants in /usr/share/doc."""
    fields = {
        "version": version,
        "upstream": release.version,
        "maintainer": MAINTAINER,
        "date": email.utils.formatdate(release.when),
    }
    (root / DOCUMENTS / "copyright").write_text(COPYRIGHT)
    changelog = gzip.compress(CHANGELOG.format(**fields).encode(), 9, mtime=0)
    (root / DOCUMENTS / "changelog.Debian.gz").write_bytes(changelog)
    overrides = root / "usr/share/lintian/overrides/bypassd"
    overrides.parent.mkdir(parents=True)
    overrides.write_bytes((HERE / "lintian-overrides").read_bytes())
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()]
    control = root / "DEBIAN"
    control.mkdir()
    sums = (f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n" for path in files)  # noqa: S324
    (control / "md5sums").write_text("".join(sums))
    (control / "conffiles").write_text(f"/{CONFIG}\n")
    fields["kib"] = str(sum(-(-path.stat().st_size // 1024) for path in files))
    (control / "control").write_text(CONTROL.format(**fields))
    for name in ("preinst", "postinst", "prerm", "postrm"):
        (control / name).write_text(script(HERE / name))
        (control / name).chmod(0o755)


def pack(tarball: Path, output: Path) -> Path:
    """The package. Errors: `subprocess.CalledProcessError` of dpkg-deb."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        root = Path(scratch, "root")
        release = lay_out(tarball, root)
        # dpkg of Debian 11, on which /lib may be a directory of its own, and its helpers look there.
        move(root / UNIT, root / "lib/systemd/system/bypassd.service")
        (root / UNIT).parent.rmdir()
        (root / UNIT).parent.parent.rmdir()
        move(root / ZSH, root / "usr/share/zsh/vendor-completions/_bypassctl")
        (root / ZSH).parent.rmdir()
        (root / "usr/lib/bypassd/share/bypassd/LICENSE").unlink()
        version = f"{release.sortable}-1"
        add_control(root, release, version)
        settle(root, release.when)
        result = output / f"bypassd_{version}_amd64.deb"
        # One thread: how xz divides its input must not depend on the machine.
        environ = {**os.environ, "SOURCE_DATE_EPOCH": str(release.when), "DPKG_DEB_THREADS_MAX": "1"}
        command = ("dpkg-deb", "--root-owner-group", "-Zxz", "-z3", "--build", str(root), str(result))
        subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)
    return result


if __name__ == "__main__":
    sys.exit(packer("Pack the tarball as a Debian package.", pack))
