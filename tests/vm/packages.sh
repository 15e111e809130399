#!/bin/bash
# The .deb and the .rpm under a real systemd: installed, upgraded, downgraded, removed, purged, beside a container whose
# values they wrote.
#
#   tests/vm/packages.sh v2|hybrid|v1 [11|12|13] DEB RPM OLDER-DEB OLDER-RPM
#
# Boots the machine of build.sh with the packages (`make deb rpm`) on its second disk and runs inside-packages.sh there.
# The rpm is installed by Debian's rpm, without dependencies: Debian's packages are not in its database.
# Exit code: 0 all hold, 1 something does not, 2 usage, 124 time.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
. "$here/lib.sh"
if (($# < 6)); then
    sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
begin 2,10 "$@"
bring inside-packages.sh
cp "$3" "$work/suite/new.deb"
cp "$4" "$work/suite/new.rpm"
cp "$5" "$work/suite/older.deb"
cp "$6" "$work/suite/older.rpm"
boot "$cgroup" "${BYPASSD_VM_LIMIT:-2400}"
