#!/bin/bash
# What a Debian's kernel makes of the idle classes: measured by tests/vm/idle.c, which is all that the machine runs.
#
#   tests/vm/idle.sh v2|v1 [11|12|13] [CASE,CASE...]
#
# Prints JSON lines; `python -m tests.protection.idle FILE...` makes the tables of docs/cpu.md from them. Boots of one to
# some minutes: with one CPU and a clock that counts instructions, so the times are the kernel's and the same on any
# host; and with two, four and eight CPUs, where only decisions are counted. CASE: a form of idle.c with dashes for spaces; all without one.
# BYPASSD_VM_KERNEL: another kernel. BYPASSD_VM_WAKES: wake-ups for each form (2000). BYPASSD_VM_FEATURES: a name
# for the scheduler's `features` file, such as NO_SIS_UTIL. Exit code: 0, 2 usage, 125 a machine that did not end by itself.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
. "$here/lib.sh"
need qemu-system-x86_64 gcc cpio
layout=${1:-} distribution=${2:-12}
if [[ $layout != v1 && $layout != v2 ]]; then
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
kernel=${BYPASSD_VM_KERNEL:-}
if [[ -z $kernel ]]; then
    "$here/build.sh" "$distribution"
    kernel=$(distribution_dir "$distribution")/vmlinuz
fi
scratch
mkdir "$work/root"
gcc -O2 -Wall -Wextra -static -pthread -o "$work/root/init" "$here/idle.c"
(cd "$work/root" && echo init | cpio --create --format newc --quiet) >"$work/initrd"

# machine WAKES QEMU-OPTION...: boot it, and print its lines.
machine() {
    local wakes=$1
    shift
    timeout "${BYPASSD_VM_LIMIT:-300}" qemu-system-x86_64 "$@" -m 256 -nodefaults -no-reboot -display none -serial stdio \
        -pidfile "$work/pid" -kernel "$kernel" -initrd "$work/initrd" -append "console=ttyS0 quiet loglevel=0 panic=-1 \
LAYOUT=$layout WAKES=$wakes CASES=${cases} ${BYPASSD_VM_FEATURES:+FEATURES=$BYPASSD_VM_FEATURES}" \
        </dev/null >"$work/console" 2>"$work/errors" &
    wait $! || true
    tr -d '\r' <"$work/console" | grep '^{' | grep -v '"end"' || true
    if ! grep -q '"end"' "$work/console"; then
        cat "$work/errors" "$work/console" >&2
        exit 125
    fi
}
cases=${3:-}
machine "${BYPASSD_VM_WAKES:-2000}" -accel tcg,thread=single -icount shift=3,sleep=off -cpu max -smp 1
# Intel ones, as far as they say: of QEMU's AMD ones the kernel does not see that its CPUs share a cache. One thread of
# the emulator: see lib.sh.
for cpus in 2 4 8; do
    # On more CPUs only what a preset sets: the emulator gives each CPU in turn a tenth of a second.
    ((cpus > 2)) && wakes=60 cases=${3:-besteffort,besteffort-threads,besteffort-both} || wakes=200
    machine $wakes -accel tcg,thread=single -cpu max,vendor=GenuineIntel,level=0x1f \
        -smp "$cpus,sockets=1,cores=$cpus,threads=1"
done
