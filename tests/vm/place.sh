#!/bin/bash
# Where the unit's process is below a real systemd: its own slice, its weight, and the command by which `doctor` moves it
# there; without and with CPU accounting on v1.
#
#   tests/vm/place.sh v2|hybrid|v1 [11|12|13] [TARBALL]
#
# Boots the machine of build.sh (Debian 12 without a number) with the tarball (dist/'s newest without one; `make artifact`
# builds it) and runs inside-place.sh there, which prints a line for each thing that must hold.
# Exit code: 0 all hold, 1 something does not, 2 usage, 124 time.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
. "$here/lib.sh"
tarball=${3:-$(ls -t "$repository"/dist/bypassd-*.tar.gz 2>/dev/null | head -1)}
if [[ ! -f $tarball ]]; then
    echo "no tarball: run make artifact" >&2
    exit 2
fi
begin 2,9 "$@"
bring inside-place.sh
cp "$tarball" "$work/suite/bypassd.tar.gz"
boot "$cgroup" "${BYPASSD_VM_LIMIT:-2400}"
