#!/bin/bash
# The tarball under a real systemd: installed, started as the unit, reloaded, killed, upgraded, removed.
#
#   tests/vm/systemd.sh v2|hybrid|v1 [TARBALL]
#
# Boots the machine of build.sh with the tarball (dist/'s newest without one; `make artifact` builds it) on its second
# disk and runs inside-systemd.sh there, which prints a line for each thing that must hold. Nothing of this checkout is
# in the machine but that script. Exit code: 0 all hold, 1 something does not, 2 usage, 124 time.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
. "$here/lib.sh"
need qemu-system-x86_64 mke2fs

layout=${1:-}
case $layout in
v2) cgroup="systemd.unified_cgroup_hierarchy=1" ;;
hybrid) cgroup="systemd.unified_cgroup_hierarchy=0" ;;
v1) cgroup="systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=1" ;;
*)
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
tarball=${2:-$(ls -t "$repository"/dist/bypassd-*.tar.gz 2>/dev/null | head -1)}
if [[ ! -f $tarball ]]; then
    echo "no tarball: run make artifact" >&2
    exit 2
fi
"$here/build.sh"

scratch
mkdir -p "$work/suite/repository/tests/vm"
cp "$here/inside-systemd.sh" "$work/suite/repository/tests/vm/inside.sh"
cp "$tarball" "$work/suite/bypassd.tar.gz"
printf '%s\n' "$layout" >"$work/suite/layout"
boot "$cgroup" "${BYPASSD_VM_LIMIT:-900}"
