#!/bin/bash
# Which values in control files of slices and scopes systemd resets, and at which event: the table in docs/support.md.
#
#   tests/vm/systemd-writes.sh v2|v1 [11|12|13]
#
# A measurement, no test: it prints what was reset at each event, without bypassd, and then the same with a quota that is
# set as the unit's property too.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
. "$here/lib.sh"
begin 2,7 "$@"
mkdir -p "$work/suite/repository/tests/vm"
cp "$here/inside-systemd-writes.sh" "$work/suite/repository/tests/vm/inside.sh"
printf '%s\n' "$layout" >"$work/suite/layout"
boot "$cgroup" "${BYPASSD_VM_LIMIT:-900}"
