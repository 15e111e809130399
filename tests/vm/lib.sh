# Shared by the scripts here: where things are kept, and how a machine is booted. Sourced, not run.
# BYPASSD_VM_DIR holds a directory for each distribution: its image, kernel and initrd; some 800 MB, made once.
vm_dir=${BYPASSD_VM_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/bypassd-vm}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# distribution_dir NUMBER: where that Debian's disk is kept. suite_of NUMBER: its name in the archive.
suite_of() {
    case $1 in
    11) echo bullseye ;;
    12) echo bookworm ;;
    13) echo trixie ;;
    *)
        echo "no such distribution: $1 (11, 12 or 13)" >&2
        return 2
        ;;
    esac
}
distribution_dir() {
    suite_of "$1" >/dev/null && echo "$vm_dir/debian-$1"
}

# layout_parameters v2|hybrid|v1: what the kernel's command line says for systemd to mount that.
layout_parameters() {
    case $1 in
    v2) echo "systemd.unified_cgroup_hierarchy=1" ;;
    hybrid) echo "systemd.unified_cgroup_hierarchy=0" ;;
    v1) echo "systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=1" ;;
    *) return 2 ;;
    esac
}

# tarball_of [TARBALL]: that one, else the newest in dist. Code 2 where there is none.
tarball_of() {
    local found=${1:-$(ls -t "$repository"/dist/bypassd-*.tar.gz 2>/dev/null | head -1)}
    if [[ ! -f $found ]]; then
        echo "no tarball: run make artifact" >&2
        return 2
    fi
    echo "$found"
}

need() {
    local missing=()
    for tool in "$@"; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    if ((${#missing[@]})); then
        echo "missing: ${missing[*]}" >&2
        echo "apt-get install --no-install-recommends qemu-system-x86 mmdebstrap e2fsprogs gcc libc6-dev" >&2
        exit 2
    fi
}

# begin USAGE-LINES [LAYOUT [DISTRIBUTION]]: check a script's arguments, make the disk and $work; sets $layout, $cgroup and
# $distribution. Exit code 2 with the usage, those lines of the script, for arguments that it does not have.
begin() {
    need qemu-system-x86_64 mke2fs
    layout=${2:-} distribution=${3:-12}
    if ! cgroup=$(layout_parameters "$layout"); then
        sed -n "$1s/^# \{0,1\}//p" "$0" >&2
        exit 2
    fi
    if [[ $distribution == 13 && $layout != v2 ]]; then
        echo "Debian 13 has cgroup v2 only" >&2
        exit 2
    fi
    "$repository/tests/vm/build.sh" "$distribution"
    scratch
}

# bring SCRIPT: what SCRIPT of this directory needs to start containers in the machine, where it is run.
bring() {
    mkdir -p "$work/suite/repository/tests/vm"
    cp "$repository/tests/vm/$1" "$work/suite/repository/tests/vm/inside.sh"
    cp "$repository/tests/vm/inside-lib.sh" "$work/suite/repository/tests/vm"
    (cd "$repository" && .venv/bin/python -m tests.e2e.programs "$work/programs")
    cp "$work/programs/app" "$work/suite/app"
    local driver=cgroupfs
    if [[ $layout == v2 ]]; then driver=systemd; fi
    printf '%s\n' "${BYPASSD_VM_DRIVER:-$driver}" >"$work/suite/driver"
    printf '%s\n' "$layout" >"$work/suite/layout"
}

# scratch: a directory in $work that ends with the script, together with a machine that still runs.
scratch() {
    work=$(mktemp -d "${TMPDIR:-/tmp}/bypassd-vm.XXXXXX")
    trap 'if [[ -s $work/pid ]]; then kill "$(cat "$work/pid")" 2>/dev/null || true; fi; rm -rf "$work"' EXIT
    trap 'exit 143' TERM INT
    mkdir -p "$work/suite/repository"
}

# boot CGROUP-PARAMETERS SECONDS: run the machine with $work/suite on its second disk, which is made into $work/suite.img
# and removed; $distribution says which Debian (12 without), $reboots whether it may reboot; exits with what tests/vm/inside.sh there exits with, 124 after the time, 125 without an answer.
boot() {
    local word=word$RANDOM$RANDOM code disk options=(-nodefaults) threads=multi
    # Linux 6.12 patches its jump labels while it runs; QEMU's other thread can execute the half-patched one (int3).
    local kernel_of=${BYPASSD_VM_KERNEL_OF:-${distribution:-12}}
    [[ $kernel_of != 13 ]] || threads=single
    [[ -n ${reboots:-} ]] || options+=(-no-reboot)
    disk=$(distribution_dir "${distribution:-12}") || exit 2
    kernel_of=$(distribution_dir "$kernel_of") || exit 2
    local console="console=ttyS0 quiet loglevel=3 panic=-1 systemd.show_status=0 rd.systemd.show_status=0"
    mke2fs -q -t ext4 -d "$work/suite" "$work/suite.img" "$(($(du -sm "$work/suite" | cut -f1) * 12 / 10 + 64))M" >/dev/null
    rm -rf "$work/suite"
    # In the background, so that a signal to this script ends the machine too.
    timeout "$2" qemu-system-x86_64 -accel tcg,thread=$threads -cpu "${BYPASSD_VM_CPU:-max}" \
        -smp "${BYPASSD_VM_CPUS:-2}" -m "${BYPASSD_VM_MEMORY:-2048}" \
        "${options[@]}" -display none -serial stdio -pidfile "$work/pid" \
        -kernel "${BYPASSD_VM_KERNEL:-$kernel_of/vmlinuz}" -initrd "$kernel_of/initrd" \
        -append "root=/dev/vda rw $console $1 bypassd.word=$word" \
        -drive "file=$disk/disk.img,format=raw,if=virtio,snapshot=on" \
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
}
