#!/bin/bash
# Make a virtual machine's disk: Debian with systemd, containerd, runc, crun and Python, and the kernel it boots.
#
#   tests/vm/build.sh [--force] [11|12|13]
#
# Debian 12 without a number: 11 brings Linux 5.10 and systemd 247, 12 6.1 and 252, 13 6.12 and 257.
# Needs root (mmdebstrap makes device nodes) and a Debian host whose apt has a mirror. Does nothing if the disk is there and this file has
# not changed since. The suite itself is not in it: run.sh brings that on a second disk, as it is at that moment.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
need mmdebstrap mke2fs

force=
if [[ ${1:-} == --force ]]; then
    force=1
    shift
fi
vm_dir=$(distribution_dir "${1:-12}") || exit 2
suite=$(suite_of "${1:-12}")
hook=$repository/tests/vm/initramfs.hook
stamp=$(cat "${BASH_SOURCE[0]}" "$hook" | sha256sum | cut -d' ' -f1)
if [[ -z $force && -e $vm_dir/disk.img && $(cat "$vm_dir/stamp" 2>/dev/null) == "$stamp" ]]; then
    exit 0
fi
mkdir -p "$vm_dir"
root=$(mktemp -d "$vm_dir/root.XXXXXX")
trap 'rm -rf --one-file-system "$root"' EXIT

packages=linux-image-cloud-amd64,initramfs-tools,systemd,systemd-sysv,udev,dbus,kmod,procps,python3,containerd,runc,crun,strace,rpm
# Debian 11 is archived: its last release is complete on the host's mirror, its security updates are not.
host_release=$(. /etc/os-release && echo "${VERSION_CODENAME:?}")
sources=()
if [[ $suite == bullseye ]]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Component: main' "Release: $host_release" | sort -u | head -1)
    if [[ -z $mirror ]]; then
        echo "apt has no mirror of $host_release: Debian 11 needs its address" >&2
        exit 2
    fi
    sources=("deb $mirror bullseye main")
fi
mmdebstrap --quiet --variant=minbase --essential-hook="$hook" --include="$packages" \
    --aptopt='Acquire::Retries "3"' "$suite" - "${sources[@]}" | tar -C "$root" --extract --exclude='./dev/*'

echo bypassd-vm >"$root/etc/hostname"
printf '127.0.0.1 localhost bypassd-vm\n' >"$root/etc/hosts"
: >"$root/etc/resolv.conf"
: >"$root/etc/fstab"
# The tests start a containerd of their own; no login is wanted on the console, it carries the tests' output.
for unit in containerd.service serial-getty@ttyS0.service getty@tty1.service apt-daily.timer apt-daily-upgrade.timer \
    e2scrub_all.timer fstrim.timer systemd-timesyncd.service; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done

cat >"$root/usr/local/sbin/bypassd-suite" <<'SUITE'
#!/bin/bash
# Run what the second disk brings; tell its exit code to the outside by the word given on the kernel's command line.
# 88: reboot, and run it again.
word=$(sed -n 's/.*bypassd\.word=\([a-z0-9]*\).*/\1/p' /proc/cmdline)
mkdir -p /suite
mount -o ro /dev/vdb /suite && /suite/repository/tests/vm/inside.sh
code=$?
if [[ $code == 88 ]]; then
    systemctl reboot
    exit
fi
echo "$word exit $code"
sync
systemctl poweroff --force --force
SUITE
chmod +x "$root/usr/local/sbin/bypassd-suite"

cat >"$root/etc/systemd/system/bypassd-suite.service" <<'UNIT'
[Unit]
Description=The suite on the second disk
After=basic.target dbus.service

[Service]
Type=exec
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
ExecStart=/usr/local/sbin/bypassd-suite
UNIT
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
ln -sf ../bypassd-suite.service "$root/etc/systemd/system/multi-user.target.wants/bypassd-suite.service"

cp "$root"/boot/vmlinuz-* "$vm_dir/vmlinuz"
cp "$root"/boot/initrd.img-* "$vm_dir/initrd"
rm -rf "$root"/boot/* "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*
size=$(($(du -sm "$root" | cut -f1) * 12 / 10 + 1024))
rm -f "$vm_dir/disk.img"
mke2fs -q -t ext4 -L bypassd -d "$root" "$vm_dir/disk.img" "${size}M" >/dev/null
echo "$stamp" >"$vm_dir/stamp"
