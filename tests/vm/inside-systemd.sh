#!/bin/bash
# Inside the virtual machine: the tarball as an operator uses it. A line for each thing that must hold.
# Ends with 88 to be started again after a reboot.
set -u
. /suite/repository/tests/vm/inside-lib.sh
stage=/var/lib/bypassd-suite.stage
[[ -e $stage ]] && failed=$(cat "$stage")

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

describe
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
    limit=900 check "the daemon runs under strace" bash -c "bypassctl status | grep -q enforce"
    traced=$(cat /proc/$!/task/$!/children)
    start_container 50
    limit=600 check "and acts" reads "$cpu$group/$weight" $least
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
