#!/bin/bash
# The tarball under a real systemd: installed, started as the unit, reloaded, killed, upgraded, rebooted, removed; with
# containers of Debian's containerd and runc that report their own limits as their first act.
#
#   tests/vm/systemd.sh v2|hybrid|v1 [11|12|13] [TARBALL [OLDER]]
#
# Boots the machine of build.sh (Debian 12 without a number) with the tarball (dist/'s newest without one; `make artifact`
# builds it) on its second disk and runs inside-systemd.sh there, which prints a line for each thing that must hold. With
# OLDER, the last release's tarball, it downgrades to that and upgrades again. Nothing of this checkout is in the machine
# but that script and the containers' program. BYPASSD_VM_DRIVER: the kubelet's cgroup driver, else systemd on v2 and
# cgroupfs otherwise. Debian 13 has v2 only: its kernel is built without the v1 cpuset and memory controllers, and its
# systemd mounts v1 only when forced to.
# Exit code: 0 all hold, 1 something does not, 2 usage, 124 time.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
. "$here/lib.sh"
tarball=$(tarball_of "${3:-}")
begin 2,14 "$@"
bring inside-systemd.sh
cp "$tarball" "$work/suite/bypassd.tar.gz"
if [[ -n ${4:-} ]]; then cp "$4" "$work/suite/older.tar.gz"; fi
reboots=1
boot "$cgroup" "${BYPASSD_VM_LIMIT:-2400}"
