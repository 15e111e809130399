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
# BYPASSD_VM_KERNEL_OF: the kernel of another Debian, by its number (11: Linux 5.10, 13: 6.12), under this one's programs.
# BYPASSD_VM_KERNEL, BYPASSD_VM_CPU, BYPASSD_VM_CPUS, BYPASSD_VM_MEMORY: another kernel, CPU model, CPUs, MiB.
# Software emulation: Python is some ten times slower in there, so this proves behaviour and no speed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
need git
begin 2,14 "${1:-}"
shift
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
if [[ -n ${BYPASSD_VM_KERNEL_OF:-} ]]; then
    need debugfs
    other=$(distribution_dir "$BYPASSD_VM_KERNEL_OF")
    [[ -e $other/disk.img ]] || "$repository/tests/vm/build.sh" "$BYPASSD_VM_KERNEL_OF"
    # Debian 11 without a merged /usr has them in the second place.
    for modules in /usr/lib/modules /lib/modules; do
        [[ -d $work/suite/modules ]] || debugfs -R "rdump $modules $work/suite" "$other/disk.img" 2>/dev/null
    done
fi
printf '%s\n' "$layout" >"$work/suite/layout"
printf '%s\0' "$@" >"$work/suite/arguments"
boot "$cgroup" "${BYPASSD_VM_LIMIT:-1500}"
