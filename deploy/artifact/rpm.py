#!/usr/bin/env python3
"""Pack the tarball as an RPM package: ``rpm.py TARBALL --output DIRECTORY``.

The package has the tarball's tree at the places that layout.py names, and the scripts of packages/bypassd.spec. Two
packages of one tarball have the same bytes. Needs rpmbuild (Debian's package rpm). Exit codes: 0 packed; 1 rpmbuild is
missing or failed; 2 usage.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from layout import COMMON, lay_out, packer, settle

SPEC: Final = COMMON.parent / "bypassd.spec"
MACROS: Final = {
    # The same bytes on every machine and at every time.
    "_buildhost": "bypassd",
    "use_source_date_epoch_as_buildtime": "1",
    "clamp_mtime_to_source_date_epoch": "1",
    # What rpm 4.11 reads.
    "_binary_payload": "w3.xzdio",
    "_binary_filedigest_algorithm": "8",
    # The tree as it is: nothing is stripped, compiled, compressed or linked anew.
    "__os_install_post": "%{nil}",
    "debug_package": "%{nil}",
    "_build_id_links": "none",
}


def pack(tarball: Path, output: Path) -> Path:
    """The package. Errors: `subprocess.CalledProcessError` of rpmbuild, `FileNotFoundError` without it."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as name:
        scratch = Path(name)
        root = scratch / "root"
        release = lay_out(tarball, root)
        settle(root, release.when)
        text = SPEC.read_text().replace("@COMMON@\n", COMMON.read_text())
        spec = scratch / "bypassd.spec"
        spec.write_text(text.replace("@VERSION@", release.sortable).replace("@ROOT@", str(root)))
        macros = {**MACROS, "_topdir": f"{scratch}/top", "_tmppath": str(scratch), "_rpmdir": str(scratch / "rpms")}
        macros["_dbpath"] = f"{scratch}/db"
        defined = [word for key, value in macros.items() for word in ("--define", f"{key} {value}")]
        command = ["rpmbuild", "-bb", "--quiet", "--target", "x86_64-linux", *defined, str(spec)]
        subprocess.run(command, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": str(release.when)})
        (built,) = (scratch / "rpms").rglob("*.rpm")
        return built.replace(output / built.name)


def main() -> int:
    """The program."""
    try:
        return packer("Pack the tarball as an RPM package.", pack)
    except FileNotFoundError as exc:
        print(f"rpm.py: {exc}: install Debian's package rpm (make rpm does it as root)", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
