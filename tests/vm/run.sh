#!/bin/bash
# Boot the virtual machine and run the core suite in it.
#
#   tests/vm/run.sh v2|v1 [pytest argument...]
#
# v2  one cgroup2 hierarchy, systemd cgroup driver (slices and scopes)
# v1  cgroup v1 only, as systemd mounts it (cpu,cpuacct together), cgroupfs driver
#
# The working tree as it is (tracked and new files), the packages of .venv and the ready-made test programs go onto a
# second disk. Output is the console's; the exit code is the suite's (124: not done within BYPASSD_VM_LIMIT seconds).
# BYPASSD_VM_KERNEL, BYPASSD_VM_CPU, BYPASSD_VM_CPUS, BYPASSD_VM_MEMORY: another kernel, CPU model, CPUs, MiB.
# Software emulation: Python is some ten times slower in there, so this proves behaviour and no speed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
need qemu-system-x86_64 mke2fs git

layout=${1:-}
case $layout in
v2) cgroup="systemd.unified_cgroup_hierarchy=1" ;;
v1) cgroup="systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=1" ;;
*)
    sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
shift
"$(dirname "${BASH_SOURCE[0]}")/build.sh"

work=$(mktemp -d "${TMPDIR:-/tmp}/bypassd-vm.XXXXXX")
finish() {
    if [[ -s $work/pid ]]; then
        kill "$(cat "$work/pid")" 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 143' TERM INT
mkdir -p "$work/suite/repository"
(cd "$repository" && git ls-files -z --cached --others --exclude-standard |
    tar --create --null --files-from=- --ignore-failed-read 2>/dev/null) | tar -C "$work/suite/repository" --extract
packages=$(cd "$repository" && .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
mkdir "$work/suite/packages"
# Tools that only look at source stay outside.
tar -C "$packages" --create --exclude='./mypy*' --exclude='./ruff*' --exclude='./grpc_tools*' --exclude='./pip*' \
    --exclude='./uv*' --exclude='./setuptools*' . | tar -C "$work/suite/packages" --extract
(cd "$repository" && .venv/bin/python -m tests.e2e.programs "$work/suite/programs")
# Compiled here: the disk is read-only in there, and compiling takes ten times as long.
"$repository/.venv/bin/python" -m compileall -q -j 2 --invalidation-mode unchecked-hash \
    "$work/suite/repository" "$work/suite/packages" >/dev/null || true
printf '%s\n' "$layout" >"$work/suite/layout"
printf '%s\0' "$@" >"$work/suite/arguments"
mke2fs -q -t ext4 -d "$work/suite" "$work/suite.img" "$(($(du -sm "$work/suite" | cut -f1) * 12 / 10 + 64))M" >/dev/null
rm -rf "$work/suite"

word=word$RANDOM$RANDOM
console="console=ttyS0 quiet loglevel=3 panic=-1 systemd.show_status=0 rd.systemd.show_status=0"
# In the background, so that a signal to this script ends the machine too.
timeout "${BYPASSD_VM_LIMIT:-1500}" qemu-system-x86_64 -accel tcg,thread=multi -cpu "${BYPASSD_VM_CPU:-max}" \
    -smp "${BYPASSD_VM_CPUS:-2}" -m "${BYPASSD_VM_MEMORY:-2048}" \
    -nodefaults -no-reboot -display none -serial stdio -pidfile "$work/pid" \
    -kernel "${BYPASSD_VM_KERNEL:-$vm_dir/vmlinuz}" -initrd "$vm_dir/initrd" \
    -append "root=/dev/vda rw $console $cgroup bypassd.word=$word" \
    -drive "file=$vm_dir/disk.img,format=raw,if=virtio,snapshot=on" \
    -drive "file=$work/suite.img,format=raw,if=virtio,readonly=on" </dev/null > >(sed -u 's/\r$//' |
        tee "$work/console" | sed -u "s/^$word exit /exit /") &
wait $! || exit 124
# The console's reader ends a moment after the machine.
for _ in {1..50}; do
    grep -q "^$word exit" "$work/console" && break
    sleep 0.1
done
code=$(sed -n "s/^$word exit \([0-9]*\)$/\1/p" "$work/console")
if [[ -z $code ]]; then
    echo "the machine ended without an answer" >&2
    exit 125
fi
exit "$code"
