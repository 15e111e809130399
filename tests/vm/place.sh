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
tarball=$(tarball_of "${3:-}")
begin 2,9 "$@"
bring inside-place.sh
cp "$tarball" "$work/suite/bypassd.tar.gz"
boot "$cgroup" "${BYPASSD_VM_LIMIT:-2400}"
