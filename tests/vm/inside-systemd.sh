#!/bin/bash
# Inside the virtual machine: the tarball as an operator uses it. A line for each thing that must hold.
# Ends with 88 to be started again after a reboot.
set -u
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8
layout=$(cat /suite/layout)
driver=$(cat /suite/driver)
stage=/var/lib/bypassd-suite.stage
failed=0
[[ -e $stage ]] && failed=$(cat "$stage")

# check TEXT COMMAND...: within 180 s the command succeeds. Everything takes ten to a hundred times longer in here.
check() {
    local text=$1 end=$((SECONDS + 180))
    shift
    until "$@" >/tmp/check.out 2>&1; do
        if ((SECONDS >= end)); then
            echo "FAILED  $text"
            sed 's/^/        /' /tmp/check.out | tail -15
            failed=1
            return
        fi
        sleep 0.5
    done
    echo "ok      $text"
}
reads() { [[ $(cat "$1" 2>/dev/null) == "$2" ]] || { echo "$1: $(cat "$1" 2>&1), expected $2"; return 1; }; }
differs() { [[ $(cat "$1") != "$2" ]] || { echo "$1: still $2"; return 1; }; }
main_pid() { systemctl show -P MainPID bypassd; }
# counted NAME: a number of the running daemon's metrics; metric NAME OPERATOR NUMBER compares it.
counted() {
    exec 9<>/dev/tcp/127.0.0.1/9555 || return 1
    printf 'GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' >&9
    sed -n "s/^bypassd_$1 \([0-9]*\).*/\1/p" <&9
    exec 9>&-
}
metric() { local now; now=$(counted "$1"); echo "$1 is $now, expected $2 $3"; test "${now:-none}" "$2" "$3"; }

# The kubelet's tree, made as its driver makes it, and containers of Debian's containerd and runc in it.
uid=11111111-1111-4111-8111-111111111111
if [[ $driver == systemd ]]; then
    be=/kubepods.slice/kubepods-besteffort.slice
    pod=$be/kubepods-besteffort-pod${uid//-/_}.slice
else
    be=/kubepods/besteffort
    pod=$be/pod$uid
fi
if [[ $layout == v2 ]]; then
    cpu=/sys/fs/cgroup set=/sys/fs/cgroup weight=cpu.weight least=1 own=39 quota=cpu.max unlimited="max 100000"
else
    cpu=/sys/fs/cgroup/cpu set=/sys/fs/cgroup/cpuset weight=cpu.shares least=2 own=1000 quota=cpu.cfs_quota_us unlimited=-1
fi
runtime=runc
manager=(org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager)
if [[ $layout == v2 ]]; then property=(CPUWeight t 1); else property=(CPUShares t 2); fi
make_pod() {
    local mount path part slice
    if [[ $driver == systemd ]]; then
        for slice in kubepods.slice "${be##*/}" "${pod##*/}"; do
            busctl call "${manager[@]}" StartTransientUnit 'ssa(sv)a(sa(sv))' "$slice" replace 5 DefaultDependencies b false \
                CPUAccounting b true MemoryAccounting b true TasksAccounting b true "${property[@]}" 0 >/dev/null
        done
        sleep 2
    fi
    for mount in "$cpu" "$set" $([[ $layout == v2 ]] || echo /sys/fs/cgroup/memory /sys/fs/cgroup/pids); do
        path=$mount
        local IFS=/
        for part in ${pod#/}; do
            if [[ $layout == v2 ]]; then echo "+cpu +cpuset +memory +pids" >"$path/cgroup.subtree_control"; fi
            mkdir -p "$path/$part"
            if [[ $mount == */cpuset ]]; then
                cat "$path/cpuset.mems" >"$path/$part/cpuset.mems"
                cat "$path/cpuset.cpus" >"$path/$part/cpuset.cpus"
            fi
            path=$path/$part
        done
        unset IFS
        if [[ $layout == v2 ]]; then echo "+cpu +cpuset +memory +pids" >"$path/cgroup.subtree_control"; fi
    done
}
start_containerd() {
    mkdir -p /var/lib/suite-rootfs/{proc,out,sys/fs/cgroup} /tmp/out
    cp /suite/app /var/lib/suite-rootfs/app
    systemd-run --quiet --unit=runtime -p Delegate=yes -p TimeoutStopSec=5 /usr/bin/containerd
    check "containerd answers" ctr version
}
# start_container NUMBER [MODE...]: its id is in $id, its group in $group. The program's first act is to read its files.
start_container() {
    local arguments path cgroup flags=() number=$1
    shift
    id=$(printf '%064x' "$number")
    if [[ $driver == systemd ]]; then
        group=$pod/cri-containerd-$id.scope cgroup=${pod##*/}:cri-containerd:$id
        flags=(--runc-systemd-cgroup --cgroup "$cgroup")
    else
        group=$pod/$id cgroup=$group
    fi
    flags+=(--runc-binary "$runtime")
    arguments='"/app", "/out/'$id'", "'${1:-sleep}'"'
    [[ $# -lt 2 ]] || arguments+=', "'$2'"'
    for path in "$cpu$group/$weight" "$set$group/cpuset.cpus"; do arguments+=', "'$path'"'; done
    cat >/tmp/spec.json <<SPEC
{"ociVersion": "1.0.2",
 "process": {"user": {"uid": 0, "gid": 0}, "args": [$arguments], "env": ["PATH=/"], "cwd": "/", "noNewPrivileges": true},
 "root": {"path": "/var/lib/suite-rootfs", "readonly": true},
 "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"},
  {"destination": "/out", "type": "bind", "source": "/tmp/out", "options": ["bind", "rw"]},
  {"destination": "/sys/fs/cgroup", "type": "bind", "source": "/sys/fs/cgroup", "options": ["rbind", "ro"]}],
 "annotations": {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.container-name": "main",
  "io.kubernetes.cri.sandbox-id": "$(printf 'f%.0s' {1..64})", "io.kubernetes.cri.sandbox-uid": "$uid",
  "io.kubernetes.cri.sandbox-name": "batch", "io.kubernetes.cri.sandbox-namespace": "default"},
 "linux": {"cgroupsPath": "$cgroup", "resources": {"cpu": {"shares": 1000}},
  "namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]}}
SPEC
    ctr -n k8s.io run --detach --null-io --config /tmp/spec.json "${flags[@]}" "$id"
}
end_container() {
    ctr -n k8s.io task kill -s 9 "$id"
    sleep 1
    ctr -n k8s.io task rm -f "$id"
    ctr -n k8s.io container rm "$id"
} >/dev/null 2>&1
# The container's own report: weight, and CPUs as the kernel gave them to it.
bounded_from_the_start() { grep -q "/$weight	$least\$" "/tmp/out/$id" && ! grep -q "^affinity	0,1\$" "/tmp/out/$id"; }

# before_exec NUMBER RUNTIME: so many containers, one after the other, each bounded before its first instruction by its
# own report.
before_exec() {
    local good=0 number runtime=$2
    for ((number = 100; number < 100 + $1; number++)); do
        rm -rf /tmp/out/*
        start_container $number || break
        until [[ -e /tmp/out/$id ]]; do sleep 0.2; done
        bounded_from_the_start && good=$((good + 1))
        check "container $((number - 99)) of $runtime has the least weight" reads "$cpu$group/$weight" $least
        end_container
    done
    echo "        $good of $1 containers of $runtime report it of their first instruction"
    # Software emulation delays both sides by seconds: one start may be late, the mechanism itself may not fail.
    check "BE containers of $runtime are bounded before their first instruction" test $((good + 1)) -ge "$1"
}

if [[ -e $stage ]]; then
    # After the reboot.
    check "after a reboot the service runs" systemctl is-active --quiet bypassd
    start_containerd
    make_pod
    # Containerd still knows the container of the boot before.
    start_container 2 burn 1
    check "a BE container is bounded" reads "$cpu$group/$weight" $least
    check "no value of the boot before is in the ledger" \
        bash -c "bypassctl dump --section files -o json >/tmp/files && grep -q $id /tmp/files && ! grep -q $(printf '%064x' 1) /tmp/files"
    check "and has a part of the CPUs" differs "$set$group/cpuset.cpus" 0-1
    installer=/opt/bypassd/install.sh
    check "uninstall" timeout 400 "$installer" --uninstall --purge
    check "restores the weight" reads "$cpu$group/$weight" $own
    check "and the CPUs" bash -c "[[ \$(cat $set$group/cpuset.cpus) == '' || \$(cat $set$group/cpuset.cpus) == 0-1 ]]"
    check "and leaves nothing" bash -c '[ -z "$(ls -d /opt/bypassd* /etc/bypassd /var/lib/bypassd /etc/systemd/system/bypassd.service* /run/bypassd /var/cache/bypassd /usr/local/bin/bypass* 2>/dev/null)" ]'
    exit $failed
fi

echo "kernel $(uname -r), systemd $(systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p'), $(runc --version | head -1), $(containerd --version | cut -d' ' -f3), cgroups: $layout, driver: $driver"
mkdir -p /tmp/unpack
tar -xzf /suite/bypassd.tar.gz -C /tmp/unpack
installer=$(echo /tmp/unpack/*/install.sh)

check "a dry run names what it would do and does nothing" bash -c "$installer --dry-run | grep -q would && [ ! -e /opt/bypassd ]"
# Nothing of the host's Python may be needed.
chmod 0 /usr/bin/python3*
check "install and start, on a node without a kubelet" timeout 400 "$installer" --start
check "systemd knows every line of the unit" bash -c "! journalctl -o cat _PID=1 | grep 'bypassd.service:[0-9]'"
check "the service is active" systemctl is-active --quiet bypassd
check "its status says what it waits for" bash -c "systemctl status bypassd | grep -q 'waiting for the kubelet'"
mkdir -p /etc/bypassd
printf 'mode: enforce\nlog: {level: info}\nhttp: {port: 9555}\n' >/etc/bypassd/config.yaml
check "the configuration is valid" bypassd check-config
start_containerd
make_pod
start_container 1 burn 1
burner=$group
check "restart with enforce" systemctl restart bypassd
check "the BE container has the least weight" reads "$cpu$group/$weight" $least
check "and a part of the CPUs" differs "$set$group/cpuset.cpus" 0-1
check "all BE work has a quota" differs "$cpu$be/$quota" "$unlimited"
check "the process is named bypassd" reads "/proc/$(main_pid)/comm" bypassd
check "the loop has its priority" bash -c "[ \$(awk '{print \$19}' /proc/$(main_pid)/stat) = -10 ]"
check "status works" bypassctl status
check "doctor finds no fault" bypassctl doctor
check "the daemon's log has no refusal" bash -c "! journalctl -u bypassd -o cat | grep -E 'EPERM|cannot set the scheduling|Operation not permitted'"
before_exec 5 runc
before_exec 3 crun
group=$burner
check "reload" systemctl reload bypassd

# systemd writes all values of a unit again at such events: each is one event, corrected at once, and no fight.
for _ in {1..6}; do systemctl daemon-reload; done
check "after six daemon-reloads the container's values are in place" reads "$cpu$group/$weight" $least
check "and the quota" differs "$cpu$be/$quota" "$unlimited"
if [[ $driver == systemd ]]; then
    events=$(counted systemd_events_total)
    took=()
    for _ in {1..6}; do
        busctl call "${manager[@]}" SetUnitProperties 'sba(sv)' "${be##*/}" true 1 "${property[@]}"
        began=${EPOCHREALTIME/./}
        while read -r now <"$cpu$be/$quota" && [[ $now == "$unlimited" ]]; do
            ((${EPOCHREALTIME/./} - began < 30000000)) || break
        done
        took+=($(((${EPOCHREALTIME/./} - began) / 1000)))
        sleep 3
    done
    echo "        systemd reset the besteffort slice's quota ${#took[@]} times; it was back after ${took[*]} ms"
    check "each reset by the kubelet's driver is one event" metric systemd_events_total -eq $((events + 6))
fi
check "no file was given up" metric yields_total -eq 0

kill -9 "$(main_pid)"
check "after SIGKILL it runs again" bash -c "sleep 3; systemctl is-active --quiet bypassd"
check "with the values in place" reads "$cpu$group/$weight" $least
if [[ -e /suite/older.tar.gz ]]; then
    mkdir -p /tmp/older
    tar -xzf /suite/older.tar.gz -C /tmp/older
    older=$(echo /tmp/older/*/install.sh)
    check "a downgrade to the last release" timeout 400 "$older"
    check "runs it" cmp /tmp/older/*/share/bypassd/build-id /opt/bypassd/share/bypassd/build-id
    check "which is active" systemctl is-active --quiet bypassd
    check "with the store: status works" bypassctl status
    check "and the values in place" reads "$cpu$group/$weight" $least
else
    echo "version 0.0.9" >/opt/bypassd/share/bypassd/build-id
fi
before=$(main_pid)
check "an upgrade" timeout 400 "$installer"
check "restarts the service" bash -c "[ \$(systemctl show -P MainPID bypassd) != $before ] && systemctl is-active --quiet bypassd"
check "keeps the configuration" grep -q enforce /etc/bypassd/config.yaml
check "and the values" reads "$cpu$group/$weight" $least
# A version that cannot start: its unit and its tree must both give way to those before.
cp -R /tmp/unpack /tmp/broken
broken=$(echo /tmp/broken/*)
rm -f "$broken"/lib/bypassd/bypassd/reconciler/daemon/__pycache__/main.*
sed -i '1i import sys\nif "run" in sys.argv: sys.exit(1)' "$broken/lib/bypassd/bypassd/reconciler/daemon/main.py"
echo "version 0.2.0" >"$broken/share/bypassd/build-id"
sed -i 's/^RestartSec=2$/RestartSec=3/' "$broken/share/bypassd/bypassd.service"
check "an upgrade that does not start says so" bash -c "timeout 400 $broken/install.sh; [ \$? = 1 ]"
check "and the version before runs again" bash -c "systemctl is-active --quiet bypassd && ! grep -q 0.2.0 /opt/bypassd/share/bypassd/build-id"
check "with its unit" grep -q '^RestartSec=2$' /etc/systemd/system/bypassd.service
check "a second run has nothing to do" bash -c "$installer | grep -q 'nothing to do'"

# Every system call of a run against the unit's filter: started, acting, reloaded, asked, ended.
systemctl show -P SystemCallFilter bypassd | sed 's/^~//' | tr ' ' '\n' | sort >/tmp/forbidden
systemctl stop bypassd
if [[ -x /usr/bin/strace ]]; then
    mkdir -p /run/bypassd
    strace -f -qq -c -S name -U name -o /tmp/calls /opt/bypassd/bin/bypassd run >/tmp/traced.log 2>&1 &
    check "the daemon runs under strace" bash -c "bypassctl status | grep -q enforce"
    traced=$(cat /proc/$!/task/$!/children)
    start_container 50
    check "and acts" reads "$cpu$group/$weight" $least
    kill -HUP $traced
    end_container
    sleep 5
    kill -TERM $traced
    wait $!
    group=$burner
    sed 's/ *$//; s/.* //' /tmp/calls | grep -E '^[a-z_0-9]+$' | grep -vxE 'total|name|syscall' | sort >/tmp/called
    echo "        $(wc -l </tmp/called) system calls; the unit forbids $(wc -l </tmp/forbidden)"
    check "makes no system call that the unit forbids" bash -c 'comm -12 /tmp/called /tmp/forbidden; [[ -s /tmp/called && -s /tmp/forbidden && -z $(comm -12 /tmp/called /tmp/forbidden) ]]'
fi
check "start again" systemctl start bypassd

echo $failed >"$stage"
exit 88
