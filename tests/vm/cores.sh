#!/bin/bash
# Core scheduling in a machine that has it: hyper-threads, and a kernel of its own.
#
#   tests/vm/cores.sh v2|v1 [pytest argument...]
#
# Debian's kernels are built without CONFIG_SCHED_CORE, so this builds one from Debian's source: small, all of it built
# in, once (ten minutes on two CPUs, 1.5 GB while it lasts; needs make, flex, bison, bc, xz-utils and libelf-dev too).
# Without arguments it runs what needs such a kernel.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
. "$here/lib.sh"
need gcc make flex bison bc xz

source_package=linux-source-6.1
kernel=$vm_dir/vmlinuz-core
stamp=$(sha256sum "${BASH_SOURCE[0]}" | cut -d' ' -f1)

# What systemd, containerd, runc and the suite ask of a kernel, on top of the smallest there is.
options=(
    64BIT SMP SCHED_MC SCHED_SMT SCHED_CORE SCHEDSTATS HOTPLUG_CPU NUMA ACPI PCI X86_X2APIC PARAVIRT HYPERVISOR_GUEST
    CC_OPTIMIZE_FOR_PERFORMANCE HIGH_RES_TIMERS NO_HZ_IDLE PRINTK BUG KALLSYMS BASE_FULL TTY UNIX98_PTYS SERIAL_8250
    SERIAL_8250_CONSOLE MAGIC_SYSRQ BLK_DEV_INITRD RD_GZIP RD_ZSTD BINFMT_ELF BINFMT_SCRIPT ELF_CORE MODULES
    MODULE_UNLOAD BLOCK BLK_DEV VIRTIO_MENU VIRTIO VIRTIO_PCI VIRTIO_BLK EXT4_FS EXT4_FS_POSIX_ACL OVERLAY_FS AUTOFS_FS
    DEVTMPFS DEVTMPFS_MOUNT TMPFS TMPFS_XATTR TMPFS_POSIX_ACL PROC_FS PROC_SYSCTL SYSFS SYSCTL CGROUPS CGROUP_SCHED
    FAIR_GROUP_SCHED CFS_BANDWIDTH CPUSETS PROC_PID_CPUSET CGROUP_PIDS CGROUP_FREEZER CGROUP_DEVICE CGROUP_CPUACCT
    MEMCG BLK_CGROUP CGROUP_PERF CGROUP_BPF BPF BPF_SYSCALL PERF_EVENTS NAMESPACES UTS_NS IPC_NS PID_NS NET_NS USER_NS
    NET UNIX INET IPV6 INOTIFY_USER FANOTIFY DNOTIFY EPOLL SIGNALFD TIMERFD EVENTFD AIO IO_URING POSIX_TIMERS
    FUTEX SHMEM FHANDLE FILE_LOCKING ADVISE_SYSCALLS MEMBARRIER RSEQ MULTIUSER SECCOMP SECCOMP_FILTER SYSVIPC
    POSIX_MQUEUE KEYS PSI TASKSTATS TASK_DELAY_ACCT TASK_XACCT TASK_IO_ACCOUNTING CROSS_MEMORY_ATTACH SWAP
)

build() {
    local work
    work=$(mktemp -d "$vm_dir/kernel.XXXXXX")
    # shellcheck disable=SC2064  # the directory of now
    trap "rm -rf --one-file-system '$work'" EXIT
    (cd "$work" && apt-get download "$source_package")
    dpkg-deb --fsys-tarfile "$work"/*.deb | tar -xO "./usr/src/$source_package.tar.xz" | tar -xJ -C "$work"
    (
        cd "$work/$source_package"
        make -s tinyconfig
        enable=()
        for option in "${options[@]}"; do
            enable+=(--enable "$option")
        done
        ./scripts/config "${enable[@]}" --enable SLUB --disable SLOB --disable CC_OPTIMIZE_FOR_SIZE --disable WERROR
        make -s olddefconfig
        grep -qx CONFIG_SCHED_CORE=y .config
        make -s "-j$(nproc)" bzImage
    )
    cp "$work/$source_package/arch/x86/boot/bzImage" "$kernel"
    echo "$stamp" >"$kernel.stamp"
    rm -rf --one-file-system "$work"
    trap - EXIT
}

"$here/build.sh"
if [[ ! -e $kernel || $(cat "$kernel.stamp" 2>/dev/null) != "$stamp" ]]; then
    build >&2
fi
layout=${1:-}
shift || true
if (($# == 0)); then
    set -- -rs tests/e2e/test_core_sched.py tests/fakes/test_cores.py
fi
# One core of two threads. An Intel one, as far as it says: QEMU's emulated AMD CPU cannot tell threads from cores.
BYPASSD_VM_KERNEL=$kernel BYPASSD_VM_CPUS=2,sockets=1,cores=1,threads=2 BYPASSD_VM_CPU=max,vendor=GenuineIntel \
    exec "$here/run.sh" "$layout" "$@"
