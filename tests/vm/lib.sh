# Shared by build.sh and run.sh: where things are kept. Sourced, not run.
# BYPASSD_VM_DIR holds the root file system's image, its kernel and initrd: some 800 MB, made once.
vm_dir=${BYPASSD_VM_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/bypassd-vm}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

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
