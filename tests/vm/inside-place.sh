#!/bin/bash
# Inside the virtual machine: the slice of the unit, its weight, and how doctor mends another place.
set -u
. /suite/repository/tests/vm/inside-lib.sh
drop_ins=/etc/systemd/system/bypassd.service.d
if [[ $layout == v2 ]]; then small=5 shares=51; else small=50 shares=50; fi

# own: what the process, the kernel's file, status and doctor say of the daemon in its own slice.
own() {
    grep -qE "^[0-9]+:(|[a-z,]*cpu[a-z,]*):/bypassd.slice" "/proc/$(main_pid)/cgroup" || { cat "/proc/$(main_pid)/cgroup"; return 1; }
    reads "$cpu/bypassd.slice/$weight" $small || return 1
    bypassctl status | grep -F "$shares shares of its own" || { bypassctl status; return 1; }
    weight_row | grep -F '"ok"'
}
weight_row() { bypassctl doctor -o json | tr '\n' ' ' | grep -oE '\{[^{}]*"daemon weight"[^{}]*\}' || { bypassctl doctor -o json | head -40; return 1; }; }
shared() { weight_row | grep -F "shared with all of /system.slice"; }
mend() {
    local row command
    row=$(weight_row)
    command=$(/opt/bypassd/bin/bypassd-python -c 'import json, sys; print(json.loads(sys.argv[1])["fix"])' "$row")
    echo "$command"
    sh -c "$command"
}
# older: the unit of a version that had no slice of its own.
older() {
    mkdir -p $drop_ins
    printf '[Service]\nSlice=system.slice\n' >$drop_ins/override.conf
    systemctl daemon-reload && systemctl restart bypassd
}

describe
mkdir -p /tmp/unpack /etc/bypassd
# Ready, without a kubelet: only then it takes its weight.
printf 'kubelet: {enabled: false}\nruntime: {cri: "off"}\n' >/etc/bypassd/config.yaml
make_pod
tar -xzf /suite/bypassd.tar.gz -C /tmp/unpack
check "install and start" timeout 400 /tmp/unpack/*/install.sh --start
check "the unit is in its own slice" own
check "an older unit" older
if [[ $layout == v2 ]]; then
    check "shares its weight: doctor says so" shared
    check "and has a command" mend
fi
check "which moves it into its own slice; on v1 it is there without one" own
check "the daemon's log has no refusal" bash -c "! journalctl -u bypassd -o cat | grep -E 'cannot make a CPU group|cannot set the weight'"
if [[ $layout != v2 ]]; then
    # systemd makes groups of its own now, moves the daemon, and removes the group that it had made: its log says so.
    mkdir -p /etc/systemd/system.conf.d
    printf '[Manager]\nDefaultCPUAccounting=yes\n' >/etc/systemd/system.conf.d/accounting.conf
    systemctl daemon-reexec
    check "with CPU accounting an older unit" older
    check "shares its weight: doctor says so" shared
    check "and has a command" mend
    check "which moves it into its own slice" own
fi
exit $failed
