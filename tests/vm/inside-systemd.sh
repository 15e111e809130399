#!/bin/bash
# Inside the virtual machine: the tarball as an operator uses it. A line for each thing that must hold.
set -u
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8
layout=$(cat /suite/layout)
failed=0
echo "kernel $(uname -r), systemd $(systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p'), cgroups: $layout"

# check TEXT COMMAND...: within 60 s the command succeeds. Everything takes ten times longer in here.
check() {
    local text=$1 end=$((SECONDS + 60))
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

# A kubelet's tree with one BE pod that runs. The driver is the one that is usual for the layout.
uid=11111111-1111-4111-8111-111111111111
id=$(printf 'ab%.0s' {1..32})
if [[ $layout == v2 ]]; then
    be=/kubepods.slice/kubepods-besteffort.slice
    group=$be/kubepods-besteffort-pod${uid//-/_}.slice/cri-containerd-$id.scope
    cpu=/sys/fs/cgroup set=/sys/fs/cgroup weight=cpu.weight least=1
else
    be=/kubepods/besteffort
    group=$be/pod$uid/$id
    cpu=/sys/fs/cgroup/cpu set=/sys/fs/cgroup/cpuset weight=cpu.shares least=2
fi
make_pod() {
    local mount path part
    for mount in "$cpu" "$set" $([[ $layout == v2 ]] || echo /sys/fs/cgroup/memory /sys/fs/cgroup/pids); do
        path=$mount
        local IFS=/
        for part in ${group#/}; do
            if [[ $layout == v2 ]]; then echo "+cpu +cpuset +memory +pids" >"$path/cgroup.subtree_control"; fi
            mkdir -p "$path/$part"
            if [[ $mount == */cpuset ]]; then
                cat "$path/cpuset.mems" >"$path/$part/cpuset.mems"
                cat "$path/cpuset.cpus" >"$path/$part/cpuset.cpus"
            fi
            path=$path/$part
        done
        unset IFS
        echo "$burner" >"$path/cgroup.procs"
    done
    if [[ $layout != v2 ]]; then
        echo 500 >"$cpu$group/cpu.shares"
    else
        echo 50 >"$cpu$group/cpu.weight"
    fi
}

mkdir -p /tmp/unpack
tar -xzf /suite/bypassd.tar.gz -C /tmp/unpack
installer=$(echo /tmp/unpack/*/install.sh)

check "a dry run names what it would do and does nothing" bash -c "$installer --dry-run | grep -q would && [ ! -e /opt/bypassd ]"
# Nothing of the host's Python may be needed.
chmod 0 /usr/bin/python3*
check "install and start, on a node without a kubelet" timeout 120 "$installer" --start
check "the service is active" systemctl is-active --quiet bypassd
check "its status says what it waits for" bash -c "systemctl status bypassd | grep -q 'waiting for the kubelet'"
mkdir -p /etc/bypassd
printf 'mode: enforce\nlog: {level: info}\n' >/etc/bypassd/config.yaml
check "the configuration is valid" bypassd check-config
(exec -a burner sh -c 'while :; do :; done') &
burner=$!
make_pod
check "restart with enforce" systemctl restart bypassd
check "the BE pod has the least weight" reads "$cpu$group/$weight" $least
check "and a part of the CPUs" differs "$set$group/cpuset.cpus" 0-1
check "the process is named bypassd" reads "/proc/$(main_pid)/comm" bypassd
check "the loop has its priority" bash -c "[ \$(awk '{print \$19}' /proc/$(main_pid)/stat) = -10 ]"
check "status works" bypassctl status
check "doctor finds no fault" bypassctl doctor
check "the daemon's log has no refusal" bash -c "! journalctl -u bypassd -o cat | grep -E 'EPERM|cannot set the scheduling|Operation not permitted'"
check "reload" systemctl reload bypassd
check "after daemon-reload the values are in place" bash -c "systemctl daemon-reload; sleep 3; [ \$(cat $cpu$group/$weight) = $least ]"
kill -9 "$(main_pid)"
check "after SIGKILL it runs again" bash -c "sleep 3; systemctl is-active --quiet bypassd"
check "with the values in place" reads "$cpu$group/$weight" $least
echo "version 0.0.9" >/opt/bypassd/share/bypassd/build-id
before=$(main_pid)
check "an upgrade" timeout 200 "$installer"
check "restarts the service" bash -c "[ \$(systemctl show -P MainPID bypassd) != $before ] && systemctl is-active --quiet bypassd"
check "keeps the configuration" grep -q enforce /etc/bypassd/config.yaml
# A version that cannot start: its unit and its tree must both give way to those before.
cp -R /tmp/unpack /tmp/broken
broken=$(echo /tmp/broken/*)
rm -f "$broken"/lib/bypassd/bypassd/reconciler/daemon/__pycache__/main.*
sed -i '1i import sys\nif "run" in sys.argv: sys.exit(1)' "$broken/lib/bypassd/bypassd/reconciler/daemon/main.py"
echo "version 0.2.0" >"$broken/share/bypassd/build-id"
sed -i 's/^RestartSec=2$/RestartSec=3/' "$broken/share/bypassd/bypassd.service"
check "an upgrade that does not start says so" bash -c "timeout 200 $broken/install.sh; [ \$? = 1 ]"
check "and the version before runs again" bash -c "systemctl is-active --quiet bypassd && ! grep -q 0.2.0 /opt/bypassd/share/bypassd/build-id"
check "with its unit" grep -q '^RestartSec=2$' /etc/systemd/system/bypassd.service
check "a second run has nothing to do" bash -c "$installer | grep -q 'nothing to do'"
check "uninstall" timeout 200 "$installer" --uninstall --purge
check "restores the weight" reads "$cpu$group/$weight" "$([[ $layout == v2 ]] && echo 50 || echo 500)"
check "and the CPUs" reads "$set$group/cpuset.cpus" 0-1
check "and leaves nothing" bash -c '[ -z "$(ls -d /opt/bypassd* /etc/bypassd /var/lib/bypassd /etc/systemd/system/bypassd.service* /run/bypassd /var/cache/bypassd /usr/local/bin/bypass* 2>/dev/null)" ]'
kill -9 $burner
exit $failed
