#!/bin/bash
# The resctrl tests on a real kernel, in a machine whose CPU has the registers of cache and bandwidth control.
#
#   tests/vm/resctrl.sh intel|intel-l2|amd [pytest argument...]
#
# No machine at hand has to have them: this builds a QEMU from Debian's source whose emulated CPU offers them (see
# resctrl_registers.py), once (half a gigabyte while it lasts; minutes). They store and do not enforce, so this proves
# what files answer. Without arguments it runs the probe behind the recorded transcripts, and all tests that use a
# real resctrl: the package's, and the agent's part with real programs.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
. "$here/lib.sh"
need qemu-system-x86_64 gcc dpkg-source

place=$vm_dir/qemu-resctrl
program=$place/qemu-system-x86_64

# What Debian's QEMU is built with, of this little of it.
tools=(meson ninja flex bison pkg-config)
libraries=(glib-2.0 pixman-1 libfdt)

build() {
    local work missing=()
    for tool in "${tools[@]}"; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    for library in "${libraries[@]}"; do
        # libfdt comes without a description of its own.
        [[ $library == libfdt && -e /usr/include/libfdt.h ]] || pkg-config --exists "$library" 2>/dev/null ||
            missing+=("$library")
    done
    if ((${#missing[@]})); then
        echo "missing: ${missing[*]}" >&2
        echo "apt-get install --no-install-recommends meson ninja-build flex bison pkg-config dpkg-dev" \
            "libglib2.0-dev libpixman-1-dev libfdt-dev" >&2
        exit 2
    fi
    mkdir -p "$place"
    work=$(mktemp -d "$place/build.XXXXXX")
    # shellcheck disable=SC2064  # the directory of now
    trap "rm -rf --one-file-system '$work'" EXIT
    # This system's own package sources, as sources, without touching its lists.
    mkdir -p "$work/lists/partial" "$work/sources"
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
        [[ -e $file ]] || continue
        case $file in
        *.sources) sed 's/^Types: .*/Types: deb-src/' "$file" >"$work/sources/${file##*/}" ;;
        *.list) sed 's/^deb /deb-src /' "$file" >"$work/sources/${file##*/}" ;;
        esac
    done
    local apt=(apt-get -qq -o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$work/sources"
        -o "Dir::State::Lists=$work/lists" -o APT::Sandbox::User=root)
    # Repositories of others may have no sources.
    "${apt[@]}" update || true
    (cd "$work" && "${apt[@]}" source --download-only qemu && dpkg-source --no-check -x qemu_*.dsc tree >/dev/null)
    python3 "$here/resctrl_registers.py" "$work/tree"
    mkdir "$work/tree/made"
    (
        cd "$work/tree/made"
        ../configure --target-list=x86_64-softmmu --without-default-features --enable-tcg --enable-fdt --disable-kvm \
            --disable-tools --disable-docs --disable-guest-agent --disable-werror \
            --firmwarepath=/usr/share/qemu:/usr/share/seabios >/dev/null
        ninja qemu-system-x86_64
    )
    strip -o "$program" "$work/tree/made/qemu-system-x86_64"
    echo "$stamp" >"$place/stamp"
    rm -rf --one-file-system "$work"
    trap - EXIT
}

stamp=$( (declare -f build && cat "$here/resctrl_registers.py") | sha256sum | cut -d' ' -f1)
machine=${1:-}
case $machine in
intel*) cpu=max,vendor=GenuineIntel,level=0x1f ;;
# A kernel only asks the high leaf on an AMD CPU that has it; family 25 is the one that these registers came with.
amd) cpu=max,vendor=AuthenticAMD,level=0x1f,xlevel=0x80000021,family=25,model=1 ;;
*)
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
shift
"$here/build.sh"
if [[ ! -e $program || $(cat "$place/stamp" 2>/dev/null) != "$stamp" ]]; then
    build >&2
fi
# The probe comes first: on the AMD machine the ids of groups that were removed before it are gone for good.
if (($# == 0)); then
    set -- -rs -s tests/fakes/test_resctrl_model.py tests/resctrl tests/reconciler/actuators/resctrl/test_actuator_kernel.py
fi
# Two sockets, so that there are two caches.
PATH=$place:$PATH BYPASSD_VM_REGISTERS=$machine BYPASSD_VM_CPU=$cpu BYPASSD_VM_CPUS=4,sockets=2,cores=2 \
    exec "$here/run.sh" v2 "$@"
