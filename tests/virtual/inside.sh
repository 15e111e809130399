#!/bin/bash
# The machine's only program: mounts cgroup v1 or v2, starts redis-server as an online pod and measures one law after another.
#
# /bench, the second disk: the agent's tree, the programs load and work, and `parameters` (machine.py writes it). Prints
# JSON lines, one for each law (report.py reads them); what starts with "trace " is the kernel's trace; other lines are
# messages. The machine ends itself.
set -u
. /bench/parameters
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
cgroups=/sys/fs/cgroup
controllers="cpu,cpuacct cpuset memory blkio pids freezer devices systemd" # of v1
controllers_v2="+cpu +cpuset +memory +io +pids"
tracing=/sys/kernel/tracing
port=7791
scratch=/run/bench
starts_live_ms=1500 # of a short-lived pod
# Of the two BE pods; the agent's configuration names them.
uids=(11111111-1111-4111-8111-111111111111 22222222-2222-4222-8222-222222222222)

mounts() {
    local controller
    for mountpoint in /run /tmp /dev/shm; do
        mkdir -p "$mountpoint"
        mount -t tmpfs tmpfs "$mountpoint"
    done
    ln -sfn /proc/self/fd /dev/fd
    mount -t debugfs debugfs /sys/kernel/debug # as systemd does
    mkdir -p $scratch
    if [[ $cgroup == v2 ]]; then
        mount -t cgroup2 cgroup2 $cgroups
        echo "$controllers_v2" >$cgroups/cgroup.subtree_control
        return
    fi
    mount -t tmpfs cgroups $cgroups
    for controller in $controllers; do
        mkdir "$cgroups/$controller"
        if [[ $controller == systemd ]]; then
            mount -t cgroup -o none,name=systemd cgroup "$cgroups/$controller"
        else
            mount -t cgroup -o "$controller" cgroup "$cgroups/$controller"
        fi || rmdir "$cgroups/$controller"
    done
    ln -s cpu,cpuacct $cgroups/cpu
    ln -s cpu,cpuacct $cgroups/cpuacct
}

# hierarchies: the directories in which a group is made.
hierarchies() {
    local controller
    if [[ $cgroup == v2 ]]; then
        echo $cgroups
        return
    fi
    for controller in $controllers; do
        if [[ -d $cgroups/$controller ]]; then echo "$cgroups/$controller"; fi
    done
}

# make_group GROUP: in all hierarchies. On v1 a cpuset gets what its parent has, on v2 a parent passes its controllers on:
# both as a kubelet does.
make_group() {
    local hierarchy part parent group
    for hierarchy in $(hierarchies); do
        parent=$hierarchy
        for part in ${1//\// }; do
            group=$parent/$part
            if [[ $cgroup == v2 && $parent != "$cgroups" ]]; then echo "$controllers_v2" >"$parent/cgroup.subtree_control"; fi
            if [[ ! -d $group ]]; then
                mkdir "$group"
                if [[ $hierarchy == */cpuset ]]; then
                    cat "$parent/cpuset.cpus" >"$group/cpuset.cpus"
                    cat "$parent/cpuset.mems" >"$group/cpuset.mems"
                fi
            fi
            parent=$group
        done
    done
}

# run_in GROUP COMMAND...: replaces the (sub)shell.
run_in() {
    local hierarchy
    for hierarchy in $(hierarchies); do echo $BASHPID >"$hierarchy/$1/cgroup.procs"; done
    shift
    exec "$@"
}

remove_group() {
    local hierarchy
    for hierarchy in $(hierarchies); do
        if [[ -d $hierarchy/$1 ]]; then rmdir "$hierarchy/$1"; fi
    done
}

# share_line GROUP SHARES: the command that sets a group's weight; on v2 cpu.weight by the kubelet's formula (KEP 2254).
share_line() {
    if [[ $cgroup == v2 ]]; then
        echo "echo $((1 + ($2 - 2) * 9999 / 262142)) >$cgroups/$1/cpu.weight"
    else
        echo "echo $2 >$cgroups/cpu/$1/cpu.shares"
    fi
}

# shares_of GROUP: on v2 the fewest shares that have its cpu.weight.
shares_of() {
    if [[ $cgroup == v2 ]]; then
        echo $(((($(<"$cgroups/$1/cpu.weight") - 1) * 262142 + 9998) / 9999 + 2))
    else
        cat "$cgroups/cpu/$1/cpu.shares"
    fi
}

processes_of() {
    if [[ $cgroup == v2 ]]; then cat "$cgroups/$1/cgroup.procs"; else cat "$cgroups/cpu/$1/cgroup.procs"; fi
}

# limit_cpu GROUP QUOTA: microseconds of each 100 ms.
limit_cpu() {
    if [[ $cgroup == v2 ]]; then
        echo "$2 100000" >"$cgroups/$1/cpu.max"
    else
        echo "$2" >"$cgroups/cpu/$1/cpu.cfs_quota_us"
    fi
}

container_id() {
    local half
    for half in 1 2; do tr -d - </proc/sys/kernel/random/uuid; done | tr -d '\n'
}

# cpu_ms GROUP: CPU time since it was made; 0 without a group.
cpu_ms() {
    local name used_us=0
    if [[ -z $1 ]]; then
        :
    elif [[ $cgroup == v2 && -d $cgroups/$1 ]]; then
        read -r name used_us <"$cgroups/$1/cpu.stat" # usage_usec is its first line
    elif [[ -d $cgroups/cpuacct/$1 ]]; then
        used_us=$(($(<"$cgroups/cpuacct/$1/cpuacct.usage") / 1000))
    fi
    echo $((used_us / 1000))
}

# start_server: redis in an online pod that requests one CPU; sets $online_group.
start_server() {
    online_group=kubepods/burstable/pod$(cat /proc/sys/kernel/random/uuid)
    local container
    container=$online_group/$(container_id)
    make_group "$container"
    eval "$(share_line "$online_group" 1024)"
    eval "$(share_line "$container" 1024)"
    (run_in "$container" redis-server --port $port --save "" --appendonly no --logfile /dev/null) &
    until redis-cli -p $port ping 2>/dev/null | grep -q PONG; do sleep 0.1; done
}

# configure_agent LAW: its file, its group and the group's weight.
configure_agent() {
    rm -rf $scratch/agent
    mkdir $scratch/agent
    {
        case $1 in
        enforce) echo "mode: enforce" ;;
        stopped | start) echo "protect: cpu" ;;
        daemons) echo $'protect: cpu\npolicies: {node_daemons: {enabled: true}}' ;;
        *) echo "protect: $1" ;;
        esac
        echo "on_stop: restore"
        echo "store: {path: $scratch/agent/state.db}"
        echo "kubelet: {enabled: false}"
        echo 'runtime: {cri: "off"}'
        echo "classes: {overrides: [{class: reclaimed, uid: ${uids[0]}}, {class: reclaimed, uid: ${uids[1]}}]}"
    } >$scratch/agent/config.yaml
    make_group "$agent_group"
    local path='' part shares
    for part in $agent_shares; do # directory=shares, from the root on
        path+=${path:+/}${part%=*} shares=${part#*=}
        if [[ -n $shares ]]; then eval "$(share_line "$path" "$shares")"; fi
    done
}

# start_agent: the daemon in its group; sets $agent, its process.
start_agent() {
    (run_in "$agent_group" /run/agent/bin/bypassd run --config $scratch/agent/config.yaml) >$scratch/agent/log 2>&1 &
    agent=$!
}

# stop_agent LAW
stop_agent() {
    local code=0
    kill -TERM $agent
    wait $agent || code=$?
    if ((code)); then
        echo "the agent's exit code in $1: $code"
        tail -5 $scratch/agent/log
    fi
}

# start_be: two pods of BE work, by the writers' names that a node has; adds their containers' groups to $be_groups.
start_be() {
    local uid pod container shares=2
    if [[ $be_qos == burstable ]]; then shares=1024; fi
    for uid in "${uids[@]}"; do
        pod=kubepods/$be_qos/pod$uid
        container=$pod/$(container_id)
        make_group "$container"
        kubelet -c "$(share_line "$pod" $shares)"
        runc -c "$(share_line "$container" $shares)"
        # The words are arguments.
        (run_in "$container" /bench/work $be_work) &
        disown $! # its end by SIGKILL is no message
        be_groups+=("$container")
    done
}

# stop_be: ends the pods' processes and removes their groups, as an ended pod's are.
stop_be() {
    local container processes
    for container in "${be_groups[@]}"; do
        # Not by the file's size, which is 0 for every control file.
        while processes=$(processes_of "$container") && [[ -n $processes ]]; do
            kill -KILL $processes 2>/dev/null
            sleep 0.1
        done
        remove_group "$container"
        remove_group "${container%/*}"
    done
}

be_cpu_ms() {
    local sum=0 container
    for container in "${be_groups[@]}"; do sum=$((sum + $(cpu_ms "$container"))); done
    echo $sum
}

# agent_work: CPU seconds of each of the daemon's components so far, as JSON; {} while it does not answer.
agent_work() {
    /run/agent/bin/bypassd-python -I -S -c '
import json, socket
client = socket.socket(socket.AF_UNIX)
client.settimeout(5)
try:
    client.connect("/run/bypassd/bypassd.sock")
    client.sendall(b"GET /state?section=agent HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
    head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
    print(json.dumps({name: work["cpu_s"] for name, work in json.loads(body)["agent"]["work"].items()}))
except (OSError, ValueError, KeyError):
    print("{}")'
}

# agent_starts: containers whose settings were written before their program's first instruction, and those not, as JSON.
agent_starts() {
    /run/agent/bin/bypassd-python -I -S -c '
import re, socket
client = socket.socket(socket.AF_UNIX)
client.settimeout(5)
try:
    client.connect("/run/bypassd/bypassd.sock")
    client.sendall(b"GET /metrics HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
    found = dict(re.findall(rb"^bypassd_container_starts_total.before_exec=.(\w+).. (\d+)", client.makefile("rb").read(), re.M))
    print("\"before_exec\": %d, \"after_exec\": %d" % (int(found.get(b"true", 0)), int(found.get(b"false", 0))))
except (OSError, ValueError):
    print("\"before_exec\": 0, \"after_exec\": 0")'
}

start_tracing() {
    mountpoint -q $tracing || mount -t tracefs tracefs $tracing
    echo mono >$tracing/trace_clock
    echo 40000 >$tracing/buffer_size_kb
    echo 1 >$tracing/events/sched/sched_switch/enable
    echo >$tracing/trace
    echo 1 >$tracing/tracing_on
}

# print_trace LAW RESULT: the switches during each of the longest requests, 0.2 ms before it included.
print_trace() {
    echo 0 >$tracing/tracing_on
    # In one pass: the kernel makes the file's text anew at each read.
    sed 's/.*"longest": \[\[//; s/\]\]}$//; s/\], \[/\n/g' <<<"$2" | tr -d ',' >$scratch/longest
    awk -v law="$1" '
        NR == FNR { head[NR] = "trace " law " " $0; from[NR] = $1 - 0.0002; to[NR] = $1 + $2 + 0.00005; count = NR; next }
        { for (i = 1; i <= NF; i++) if ($i ~ /^[0-9]+\.[0-9]+:$/) { at = $i + 0; break }
          for (i = 1; i <= count; i++) if (at >= from[i] && at <= to[i] && lines[i]++ < 120)
              text[i] = text[i] "\ntrace " substr($0, 1, 190) }
        END { for (i = 1; i <= count; i++) print head[i] text[i] }' $scratch/longest $tracing/trace
}

# daemon_turns FROM: turns of the kubelet-like daemon since line FROM of its file: how many, the median and the longest (us).
daemon_turns() {
    tail -n "+$1" $scratch/turns | sort -n | awk '{ all[NR] = $1 } END { print NR, all[int((NR + 1) / 2)] + 0, all[NR] + 0 }'
}

# set_scheduler WORD...: features and NAME=VALUE of the fair class, which were in other places up to Linux 5.12.
set_scheduler() {
    local debug=/sys/kernel/debug word
    for word; do
        case $word in
        *=*) echo "${word#*=}" >"$(ls -d $debug/sched/"${word%=*}" "/proc/sys/kernel/sched_${word%=*}" 2>/dev/null | head -1)" ;;
        *) echo "$word" >"$(ls -d $debug/sched/features $debug/sched_features 2>/dev/null | head -1)" ;;
        esac
    done
    echo "scheduler: $*"
}

# measure LAW [SHARES]: of system.slice before the law begins.
measure() {
    local law=$1 shares=${2-} agent='' group='' starts='' written='"before_exec": 0' load result be online used container daemon=0 turns='0 0 0' from=1 before='{}' after='{}'
    local -a be_groups=()
    if [[ -n $shares ]]; then eval "$(share_line system.slice "$shares")"; fi
    if [[ $law != alone && $law != kubernetes && $law != fixed ]]; then
        group=$agent_group
        configure_agent "$law"
    fi
    if [[ -n $group && $law != start ]]; then
        start_agent
        sleep "$agent_settle"
        if [[ $law == daemons ]]; then sleep "$daemons_settle"; fi
    fi
    if [[ $law != alone ]]; then
        start_be
        sleep "$settle"
    fi
    # Half of it for each of the two pods: the group above them may have online pods.
    if [[ $law == fixed ]]; then
        for container in "${be_groups[@]}"; do
            limit_cpu "${container%/*}" $((fixed_percent * 500))
        done
    fi
    if ((starts_ms)); then
        : >$scratch/first
        $scratch/runc "$starts_ms" $starts_live_ms $scratch/first $(hierarchies) &
        starts=$!
        sleep 2
    fi
    if [[ -n $agent ]]; then
        before=$(agent_work)
        sleep 1 # what the request costs is over
    fi
    if [[ $law == stopped ]]; then kill -STOP $agent; fi
    be=$(be_cpu_ms) online=$(cpu_ms "$online_group") used=$(cpu_ms "$group")
    if [[ -n $kubelet_like ]]; then daemon=$(cpu_ms system.slice) from=$(($(wc -l <$scratch/turns) + 1)); fi
    if ((longest)); then start_tracing; fi
    /bench/load $port "$rate" "$seconds" "$longest" >$scratch/load &
    load=$!
    if [[ $law == start ]]; then
        sleep 1
        start_agent
        sleep 10
        stop_agent "$law"
        agent=''
    fi
    wait $load
    result=$(<$scratch/load)
    if [[ -n $starts ]]; then
        kill -TERM $starts
        wait $starts
    fi
    be=$(($(be_cpu_ms) - be)) online=$(($(cpu_ms "$online_group") - online))
    used=$(($(cpu_ms "$group") - used))
    if [[ -n $kubelet_like ]]; then
        daemon=$(($(cpu_ms system.slice) - daemon)) turns=$(daemon_turns "$from") shares=$(shares_of system.slice)
    fi
    if [[ -n $agent && $law != stopped ]]; then after=$(agent_work) written=$(agent_starts); fi
    set -- $turns
    echo "{\"law\": \"$law\", \"kernel\": \"$(uname -r)\", \"be_ms\": $be, \"online_ms\": $online, \"agent_ms\": $used," \
        "\"work\": [$before, $after]," \
        "\"starts\": {\"count\": $(grep -c . $scratch/first), \"idle\": $(grep -c 1 $scratch/first), $written}," \
        "\"daemon\": {\"shares\": ${shares:-0}, \"cpu_ms\": $daemon, \"turns\": $1, \"median_us\": $2, \"max_us\": $3}, ${result#\{}"
    if ((longest)); then print_trace "$law" "$result"; fi
    if [[ $law == stopped ]]; then kill -CONT $agent; fi
    stop_be
    if [[ -n $agent ]]; then stop_agent "$law"; fi
}

mounts
ip link set lo up
# A read of the disk takes the host's time, in which virtual time runs on: all that the laws need is in memory before.
cp -r /bench/agent /run/agent
cat /bench/load /bench/work /usr/local/bin/* /bin/sleep /usr/bin/awk >/dev/null
cp /bench/starts $scratch/runc
: >$scratch/first
make_group kubepods/burstable
make_group kubepods/besteffort
# The kubelet's, for the machine's CPUs; the online pod requests one of them.
eval "$(share_line kubepods $((1024 * cpus)))"
eval "$(share_line kubepods/burstable 1024)"
eval "$(share_line kubepods/besteffort 2)"
start_server
if [[ -n $kubelet_like ]]; then
    make_group system.slice/kubelet.service
    (run_in system.slice/kubelet.service /bench/work periodic 5000 95000 $scratch/turns) &
    until [[ -e $scratch/turns ]]; do sleep 0.1; done
fi
for law in $laws; do
    IFS=, read -ra variants <<<"${scheduler:-none}"
    for variant in "${variants[@]}"; do
        if [[ $variant != none ]]; then set_scheduler $variant; fi # the words are arguments
        for shares in ${daemon_shares:-none}; do measure "$law" "${shares#none}"; done
    done
done
echo '{"end": true}'
sync
echo o >/proc/sysrq-trigger
sleep 5
