#!/bin/bash
# Make the machine's disk: a Debian's kernel with redis-server, without systemd. Half a minute, once for each suite.
#
#   tests/virtual/build.sh bullseye|bookworm|trixie
#
# Needs root (mmdebstrap makes device nodes) and a Debian host whose apt has a mirror. Does nothing if the disk exists and
# this file and initramfs.hook have not changed since. The agent and the programs of a run are not in it: machine.py makes
# a second disk of them. Prints the directory with disk.img, vmlinuz and initrd. Exit code 2: a tool or a mirror is missing,
# or the mirror does not answer for the suite; 1: it does, and the disk cannot be made.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../vm/lib.sh"
need mmdebstrap mke2fs

suite=${1:?bullseye, bookworm or trixie}
directory=$vm_dir/virtual-$suite
hook=$repository/tests/vm/initramfs.hook
stamp=$(cat "${BASH_SOURCE[0]}" "$hook" | sha256sum | cut -d' ' -f1)
if [[ -e $directory/disk.img && $(cat "$directory/stamp" 2>/dev/null) == "$stamp" ]]; then
    echo "$directory"
    exit 0
fi
mkdir -p "$directory"
root=$(mktemp -d "$directory/root.XXXXXX")
trap 'rm -rf --one-file-system "$root"' EXIT

# Debian 11 is archived: its last release is complete on the host's mirror, its security updates are not.
host_release=$(. /etc/os-release && echo "${VERSION_CODENAME:?}")
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Component: main' "Release: $host_release" | sort -u | head -1)
if [[ -z $mirror ]]; then
    echo "apt has no mirror of $host_release" >&2
    exit 2
fi
case $mirror in
http*)
    # Alone a reason to measure nothing: what fails with a mirror that has the suite is a fault.
    if ! /usr/lib/apt/apt-helper -o Acquire::Retries=3 download-file "${mirror%/}/dists/$suite/Release" "$root/Release" >/dev/null 2>&1; then
        echo "$mirror does not answer for $suite" >&2
        exit 2
    fi
    rm -f "$root/Release"
    ;;
esac
packages=linux-image-cloud-amd64,initramfs-tools,kmod,procps,iproute2,redis-server
mmdebstrap --quiet --variant=minbase --essential-hook="$hook" --include="$packages" \
    --aptopt='Acquire::Retries "3"' "$suite" - "deb $mirror $suite main" >"$directory/root.tar" || {
    echo "mmdebstrap made no $suite from $mirror" >&2
    exit 1
}
tar -C "$root" --extract --exclude='./dev/*' --file "$directory/root.tar"
rm "$directory/root.tar"

# The first program: what the second disk has. Debian's initrd has mounted /dev, /proc and /sys.
mkdir "$root/bench"
cat >"$root/virtual-init" <<'INIT'
#!/bin/bash
mount -t ext4 -o ro /dev/vdb /bench && exec /bench/inside.sh
INIT
chmod 755 "$root/virtual-init"
# Writers of control files: the agent takes a change by a program of another name for a person's.
cp "$root/bin/bash" "$root/usr/local/bin/kubelet"
cp "$root/bin/bash" "$root/usr/local/bin/runc"

cp "$root"/boot/vmlinuz-* "$directory/vmlinuz"
cp "$root"/boot/initrd.img-* "$directory/initrd"
rm -rf "$root"/boot/* "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*
rm -f "$directory/disk.img"
mke2fs -q -t ext4 -d "$root" "$directory/disk.img" "$(($(du -sm "$root" | cut -f1) * 12 / 10 + 256))M" >/dev/null
echo "$stamp" >"$directory/stamp"
echo "$directory"
