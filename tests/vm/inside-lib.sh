# Inside the virtual machine: checks, the kubelet's tree, containers of containerd. Sourced, not run.
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8
layout=$(cat /suite/layout)
driver=$(cat /suite/driver)
failed=0

# check TEXT COMMAND...: within $limit or 180 s the command succeeds. Everything takes ten to a hundred times longer here.
check() {
    local text=$1 end=$((SECONDS + ${limit:-180}))
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

# Of what this machine is.
describe() {
    echo "kernel $(uname -r), systemd $(systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p'), $(runc --version | head -1), $(containerd --version | cut -d' ' -f3), cgroups: $layout, driver: $driver"
}
