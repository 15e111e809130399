#!/bin/bash
# Inside the virtual machine: the packages as an operator uses them. A line for each thing that must hold.
set -u
. /suite/repository/tests/vm/inside-lib.sh

install_deb() { dpkg --force-confold -i "$1"; }
install_rpm() { rpm -U --nodeps --oldpackage "$1"; }
remove_deb() { dpkg -r bypassd; }
remove_rpm() { rpm -e bypassd; }
active() { systemctl is-active --quiet bypassd; }
runs_build_of() { cmp "$1" /usr/lib/bypassd/share/bypassd/build-id; }

describe
start_containerd
make_pod
# The kubelet's quota of its directory is systemd's to reset; the container's files have their own values.
start_container 1 burn 1
before=$(cat "$cpu$group/$weight")
# Debian's rpm and dpkg need no Python, and neither may bypassd.
chmod 0 /usr/bin/python3*
for kind in deb rpm; do
    echo "$kind:"
    check "installs" "install_$kind" "/suite/older.$kind"
    cp /usr/lib/bypassd/share/bypassd/build-id "/tmp/older.$kind.id"
    if [[ $kind == deb ]]; then
        check "is started, as Debian does" active
        check "and enabled" systemctl is-enabled --quiet bypassd
    else
        check "is not started" bash -c '! systemctl is-active --quiet bypassd'
        check "starts" systemctl start bypassd
    fi
    check "systemd has no complaint about a line of the unit" bash -c "! journalctl -o cat _PID=1 | grep 'bypassd.service:[0-9]'"
    check "observes: writes nothing" reads "$cpu$group/$weight" "$before"
    printf 'mode: enforce\nlog: {level: info}\n' >/etc/bypassd/config.yaml
    check "restart with enforce" systemctl restart bypassd
    check "the BE container has the least weight" reads "$cpu$group/$weight" $least
    pid=$(main_pid)
    check "an upgrade" "install_$kind" "/suite/new.$kind"
    check "restarts the service" bash -c "[ \$(systemctl show -P MainPID bypassd) != $pid ] && systemctl is-active --quiet bypassd"
    cp /usr/lib/bypassd/share/bypassd/build-id "/tmp/new.$kind.id"
    check "to another build" bash -c "! cmp -s /tmp/older.$kind.id /tmp/new.$kind.id"
    check "keeps the configuration" grep -q enforce /etc/bypassd/config.yaml
    check "and the values" reads "$cpu$group/$weight" $least
    check "a downgrade" "install_$kind" "/suite/older.$kind"
    check "runs the older build" runs_build_of "/tmp/older.$kind.id"
    check "which is active" active
    check "with the store: status works" bypassctl status
    check "and the values in place" reads "$cpu$group/$weight" $least
    check "and back" "install_$kind" "/suite/new.$kind"
    check "what is stopped" systemctl stop bypassd
    check "is upgraded" "install_$kind" "/suite/older.$kind"
    check "and stays stopped" bash -c '! systemctl is-active --quiet bypassd'
    check "a removal" "remove_$kind"
    check "restores the weight" reads "$cpu$group/$weight" "$before"
    check "keeps the store and the configuration" bash -c '[ -e /var/lib/bypassd/state.db ] && ls /etc/bypassd/config.yaml*'
    check "and nothing else" bash -c "[ -z \"\$(ls -d /usr/lib/bypassd /usr/bin/bypass* /run/bypassd /var/cache/bypassd 2>/dev/null)\" ]"
    if [[ $kind == deb ]]; then
        check "a purge" dpkg -P bypassd
        check "leaves nothing" bash -c "[ -z \"\$(ls -d /etc/bypassd /var/lib/bypassd /etc/systemd/system/*/bypassd.service 2>/dev/null)\" ]"
    fi
done
exit $failed
