#!/bin/sh
# Installs bypassd from the unpacked tarball that this file lies in, upgrades it, or removes it.
#
#   install.sh [--prefix DIR] [--start] [--dry-run]     install or upgrade; again: nothing is changed
#   install.sh --uninstall [--purge] [--dry-run]        restore every changed file, then remove
#
#   --prefix DIR   where the tree goes (default: where it is installed, else /opt/bypassd); an absolute path without spaces
#   --root DIR     install below this directory, for images; nothing is started or restored
#   --start        enable and start the service (it observes until the configuration says enforce)
#   --purge        with --uninstall: remove configuration and state too
#   --dry-run      print what would be done
#
# It needs a Linux kernel on x86-64, this shell, sed, cmp (diffutils) and coreutils; nothing of the host's Python, C
# library or network. The mode is never changed: a new configuration observes.
#
# Exit codes: 0 done, or nothing to do; 1 something failed, and the installation before it is in place; 2 usage;
# 3 uninstall: not every file could be restored, and nothing was removed.
set -eu
umask 022

prefix=/opt/bypassd
chosen=no
root=
start=no
purge=no
dry=no
job=install
usage() { echo "install.sh: $* (see --help)" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
    --prefix | --root) [ $# -gt 1 ] && [ -n "$2" ] || usage "$1: expected a directory" ;;
    esac
    case $1 in
    --prefix) shift; prefix=$1 chosen=yes ;;
    --prefix=*) prefix=${1#*=} chosen=yes ;;
    --root) shift; root=$1 ;;
    --root=*) root=${1#*=} ;;
    --start) start=yes ;;
    --uninstall) job=uninstall ;;
    --purge) purge=yes ;;
    --dry-run) dry=yes ;;
    -h | --help) sed -n '2,20s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) usage "unknown option $1" ;;
    esac
    shift
done
# A place of its own, named in one way only: it is renamed and removed as a whole, and the unit names it.
case $prefix in
"" | [!/]* | *[!A-Za-z0-9/._-]* | */ | *//* | */./* | */. | */../* | */..)
    usage "--prefix $prefix: expected an absolute path of letters, digits, / . _ - without a final /" ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
units=$root/etc/systemd/system
# The place of an installation: its unit has it.
found=
if [ -f "$units/bypassd.service" ]; then
    found=$(sed -n 's|^ExecStart=\(/[A-Za-z0-9/._-]*\)/bin/bypassd run.*|\1|p' "$units/bypassd.service")
fi
if [ -n "$found" ] && [ $chosen = no ]; then prefix=$found; fi
tree=$root$prefix
config=$root/etc/bypassd
programs="bypassd bypassctl state-dump"
manuals="man8/bypassd.8 man1/bypassctl.1 man1/state-dump.1"
changed=no
replaced=no

say() { echo "install.sh: $*"; }
fail() { echo "install.sh: $*" >&2; exit 1; }
# run WORD...: do it, or say it.
run() {
    changed=yes
    if [ $dry = yes ]; then echo "would run: $*"; else "$@"; fi
}
systemd() { [ -z "$root" ] && [ -d /run/systemd/system ] && command -v systemctl >/dev/null 2>&1; }
# A service that systemd starts again and again is "activating", and is to be stopped and upgraded like an active one.
runs() {
    systemd || return 1
    case $(systemctl is-active bypassd.service 2>/dev/null) in active | activating | reloading) return 0 ;; esac
    return 1
}
# put SOURCE PLACE MODE: a file in its place, only if it differs; never half written.
put() {
    if [ -f "$2" ] && cmp -s "$1" "$2"; then return 0; fi
    changed=yes
    if [ $dry = yes ]; then echo "would write: $2"; return 0; fi
    mkdir -p "$(dirname "$2")"
    cp "$1" "$2.new" && chmod "$3" "$2.new" && mv -f "$2.new" "$2"
}
link() {
    if [ "$(readlink "$2" 2>/dev/null || true)" = "$1" ]; then return 0; fi
    if [ -e "$2" ] && [ ! -L "$2" ]; then say "$2 exists and is not ours: not linked"; return 0; fi
    run mkdir -p "$(dirname "$2")"
    run ln -sfn "$1" "$2"
}
# What is only convenient: where /usr is read-only, as some hosts have it, everything else is installed.
optional() {
    before=$changed
    "$@" || { changed=$before; say "not written (the daemon does not need it): $3"; }
}
unlink() {
    if [ "$(readlink "$2" 2>/dev/null || true)" = "$1" ]; then run rm -f "$2"; fi
}

# Two trees would share one unit, and the values of the first would be left behind.
check_place() {
    [ -z "$found" ] || [ "$found" = "$prefix" ] || fail "it is installed in $found: leave out --prefix, or remove it first: $found/install.sh --uninstall"
}
check() {
    check_place
    [ "$(uname -s)" = Linux ] || fail "expected Linux; this is $(uname -s)"
    [ "$(uname -m)" = x86_64 ] || fail "expected x86_64; this is $(uname -m)"
    [ -n "$root" ] || [ $dry = yes ] || [ "$(id -u)" = 0 ] || fail "run as root"
    # 4.5 has cgroup v2; CentOS 7's 3.10 has what cgroup v1 needs.
    release=$(uname -r)
    major=${release%%.*}
    rest=${release#*.}
    minor=${rest%%[!0-9]*}
    [ "$major" -gt 3 ] || { [ "$major" = 3 ] && [ "$minor" -ge 10 ]; } || fail "expected Linux 3.10 or later; this is $release"
    # A unit in /etc would precede the package's, and both would use one store.
    for unit in "$root/lib/systemd/system/bypassd.service" "$root/usr/lib/systemd/system/bypassd.service"; do
        [ ! -e "$unit" ] || fail "a package of bypassd is installed; remove it first: apt-get remove bypassd, or rpm -e bypassd"
    done
    [ -x "$here/bin/bypassd" ] || fail "run it in the unpacked tarball: $here has no bin/bypassd"
    "$here/bin/bypassd" --version >/dev/null || fail "the program of the tarball does not run on this machine"
}

# The tree is copied beside its place and moved there in one step; the one before is kept until the new one runs.
install_tree() {
    if [ "$here" = "$tree" ]; then return 0; fi
    if [ -f "$tree/share/bypassd/build-id" ] && cmp -s "$here/share/bypassd/build-id" "$tree/share/bypassd/build-id"; then
        return 0
    fi
    if [ -e "$tree" ] && [ ! -f "$tree/share/bypassd/build-id" ]; then
        fail "$tree exists and is no installation of bypassd"
    fi
    run mkdir -p "$(dirname "$tree")"
    run rm -rf "$tree.new" "$tree.old"
    run cp -R "$here" "$tree.new"
    if [ $dry = no ]; then chown -R 0:0 "$tree.new" 2>/dev/null || true; fi
    if [ -e "$tree" ]; then run mv "$tree" "$tree.old" && replaced=yes; fi
    run mv "$tree.new" "$tree"
}

install_files() {
    sed "s|/opt/bypassd|$prefix|g" "$here/share/bypassd/bypassd.service" >"$scratch/unit"
    put "$scratch/unit" "$units/bypassd.service" 644
    # A configuration that is there is the operator's.
    if [ ! -e "$config/config.yaml" ]; then put "$here/share/bypassd/config.yaml" "$config/config.yaml" 600; fi
    optional put "$here/share/bypassd/completion/bypassctl.bash" "$root/usr/share/bash-completion/completions/bypassctl" 644
    optional put "$here/share/bypassd/completion/bypassctl.fish" "$root/usr/share/fish/vendor_completions.d/bypassctl.fish" 644
    for program in $programs; do optional link "$prefix/bin/$program" "$root/usr/local/bin/$program"; done
    for page in $manuals; do optional link "$prefix/share/man/$page" "$root/usr/local/share/man/$page"; done
}

# The tree and the unit from before this run, if there were any.
back() {
    if [ $replaced = yes ]; then
        replaced=no
        if [ -e "$tree" ]; then rm -rf "$tree.new" && mv "$tree" "$tree.new"; fi
        mv "$tree.old" "$tree"
    fi
    if [ -f "$scratch/unit.old" ]; then put "$scratch/unit.old" "$units/bypassd.service" 644; fi
}
finish() {
    code=$?
    if [ $code != 0 ] && [ $dry = no ]; then back && rm -rf "$tree.new"; fi
    rm -rf "$scratch"
    exit $code
}

# What is installed does not start: with a tree from before, that one again.
undo() {
    [ $replaced = yes ] || fail "it does not start: see journalctl -u bypassd"
    back && rm -rf "$tree.new"
    systemctl daemon-reload
}

install() {
    check
    was=no
    if runs; then was=yes; fi
    scratch=$(mktemp -d)
    trap finish EXIT
    if [ -f "$units/bypassd.service" ]; then cp "$units/bypassd.service" "$scratch/unit.old"; fi
    install_tree
    install_files
    if [ $changed = no ]; then say "nothing to do: this build is installed in $tree"; fi
    if systemd && [ $changed = yes ]; then run systemctl daemon-reload; fi
    if [ $was = yes ] && [ $changed = yes ]; then
        run systemctl restart bypassd.service || {
            undo
            systemctl restart bypassd.service || fail "neither the new version nor the one before starts"
            fail "the new version does not start: see journalctl -u bypassd; the one before runs again"
        }
    fi
    if [ $start = yes ] && systemd; then
        systemctl is-enabled --quiet bypassd.service || run systemctl enable bypassd.service
        runs || run systemctl start bypassd.service || {
            undo
            systemctl stop bypassd.service || true
            fail "the new version does not start: see journalctl -u bypassd; the one before is in place, and stopped as it was"
        }
    fi
    replaced=no
    rm -f "$scratch/unit.old"
    if [ -e "$tree.old" ]; then run rm -rf "$tree.old"; fi
    if [ $dry = no ] && [ -z "$root" ]; then
        "$tree/bin/bypassctl" doctor || say "doctor has found something that this node lacks (above)"
    fi
    if [ $dry = no ] && [ $changed = yes ]; then say "installed in $tree; its configuration is $config/config.yaml"; fi
    if ! runs; then say "not running; to start it: systemctl enable --now bypassd"; fi
}

# Whether there is a store, where the configuration says; if that cannot be read, restore says what is wrong. A path with
# a space is in quotes.
wrote() {
    store=$("$program" config show store.path | sed -n 's/^store\.path = "\{0,1\}\(\/[^"\]*[^"\ ]\)"\{0,1\}   \[.*/\1/p') || return 0
    [ -z "$store" ] || [ -e "$store" ] || [ -e "$store.copy" ]
}

uninstall() {
    if [ -z "$root" ] && [ $dry = no ] && [ "$(id -u)" != 0 ]; then fail "run as root"; fi
    if [ ! -e "$tree" ] && [ ! -e "$units/bypassd.service" ]; then say "nothing to do: not installed"; exit 0; fi
    check_place
    [ ! -e "$tree" ] || [ -f "$tree/share/bypassd/build-id" ] || fail "$tree is no installation of bypassd"
    # A tree that somebody has deleted is no reason to leave its values: the tarball has the program, too.
    program=$tree/bin/bypassctl
    [ -x "$program" ] || program=$here/bin/bypassctl
    [ -n "$root" ] || [ -x "$program" ] || fail "no bypassctl to restore with, in $tree or $here: run it in the unpacked tarball"
    if runs; then run systemctl stop bypassd.service; fi
    if [ -z "$root" ]; then
        if wrote; then
            run "$program" restore || {
                echo "install.sh: not every file could be restored (above); nothing was removed" >&2
                exit 3
            }
        elif [ -d "${store%/*}/prove" ]; then
            # No value was written. Groups that a killed doctor --prove left are removed too, and are no reason to stay.
            run "$program" restore || true
        fi
    fi
    if systemd && systemctl is-enabled --quiet bypassd.service 2>/dev/null; then run systemctl disable bypassd.service; fi
    run rm -f "$units/bypassd.service" "$root/usr/share/bash-completion/completions/bypassctl" \
        "$root/usr/share/fish/vendor_completions.d/bypassctl.fish"
    for program in $programs; do unlink "$prefix/bin/$program" "$root/usr/local/bin/$program"; done
    for page in $manuals; do unlink "$prefix/share/man/$page" "$root/usr/local/share/man/$page"; done
    if systemd; then run systemctl daemon-reload; fi
    run rm -rf "$root/var/cache/bypassd" "$root/run/bypassd"
    if [ $purge = yes ]; then run rm -rf "$config" "$root/var/lib/bypassd" "$units/bypassd.service.d"; fi
    run rm -rf "$tree.new" "$tree.old" "$tree"
    say "removed from $tree$([ $purge = yes ] || echo "; $config and /var/lib/bypassd are kept (--purge)")"
}

$job
