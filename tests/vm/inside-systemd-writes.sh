#!/bin/bash
# Inside the virtual machine: values are written into files of a slice and a scope, an event of systemd follows, and the
# files that no longer hold the value are printed.
set -u
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8
layout=$(cat /suite/layout)
echo "kernel $(uname -r), systemd $(systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p'), cgroups: $layout"
manager=(org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager)
be=kubepods-besteffort.slice
pod=kubepods-besteffort-pod11111111_1111_4111_8111_111111111111.slice
scope=cri-containerd-$(printf 'ab%.0s' {1..32}).scope
path=/kubepods.slice/$be
if [[ $layout == v2 ]]; then
    cpu=/sys/fs/cgroup memory=/sys/fs/cgroup
    property=CPUWeight least=1
    values=("cpu.max=30000 100000" cpu.weight=7 cpuset.cpus=1 memory.high=104857600 memory.max=209715200)
else
    cpu=/sys/fs/cgroup/cpu memory=/sys/fs/cgroup/memory
    property=CPUShares least=2
    values=(cpu.cfs_quota_us=30000 cpu.shares=77 memory.limit_in_bytes=209715200)
fi
start() { # UNIT COUNT PROPERTY...: as the kubelet and runc start their units
    busctl call "${manager[@]}" StartTransientUnit 'ssa(sv)a(sa(sv))' "$1" replace "${@:2}" 0 >/dev/null || echo "cannot start $1"
    sleep 1
}
accounting=(CPUAccounting b true MemoryAccounting b true TasksAccounting b true)
for slice in kubepods.slice $be $pod; do
    start $slice 6 DefaultDependencies b false "${accounting[@]}" $property t $least TasksMax t 1000
done
sleep 1000 &
start "$scope" 8 Slice s $pod Delegate b true PIDs au 1 $! "${accounting[@]}" $property t $least DefaultDependencies b false
if [[ $layout == v2 ]]; then
    for directory in "" /kubepods.slice $path $path/$pod; do
        echo "+cpu +cpuset +memory +pids" >"/sys/fs/cgroup$directory/cgroup.subtree_control"
    done
fi
declare -A group=([slice]=$path [scope]=$path/$pod/$scope)
each() { # FUNCTION: with unit's name, file and value
    local unit value directory
    for unit in slice scope; do
        for value in "${values[@]}"; do
            case $value in cpu.* | cpuset.*) directory=$cpu ;; *) directory=$memory ;; esac
            "$1" $unit "$directory${group[$unit]}/${value%%=*}" "${value#*=}"
        done
    done
}
put() { echo "$3" >"$2" || echo "cannot write $2"; }
compare() { [[ $(cat "$2") == "$3" ]] || printf ' %s/%s=%s' "$1" "${2##*/}" "$(tr ' ' _ <"$2")"; }
event() { # TEXT COMMAND...
    local reset
    each put
    "${@:2}" >/tmp/out 2>&1 || echo "  ($1: $(head -1 /tmp/out))"
    sleep 3
    reset=$(each compare)
    echo "$1: ${reset:- nothing}"
}
set_on() { busctl call "${manager[@]}" SetUnitProperties 'sba(sv)' "$1" true 1 "${@:2}"; }
new_scope() {
    sleep 1000 &
    busctl call "${manager[@]}" StartTransientUnit 'ssa(sv)a(sa(sv))' other-$RANDOM.scope replace 3 Slice s $pod Delegate b true PIDs au 1 $! 0
}
events() {
    event "daemon-reload" systemctl daemon-reload
    event "the kubelet's minute: $property on the slice, the same value" set_on $be $property t $least
    event "TasksMax on the slice" set_on $be TasksMax t 2000
    event "MemoryMax on the slice" set_on $be MemoryMax t 1073741824
    event "$property on kubepods.slice" set_on kubepods.slice $property t 5
    event "a new scope in the pod" new_scope
    event "runc update: $property on the scope" set_on "$scope" $property t 9
    event "daemon-reexec" systemctl daemon-reexec
}
events
echo "with CPUQuota= as a property of both:"
set_on $be CPUQuotaPerSecUSec t 300000
set_on "$scope" CPUQuotaPerSecUSec t 300000
events
exit 0
