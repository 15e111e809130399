# Functions of the packages' scripts: they replace the line "# common.sh" of each, for some of them run when no file of
# the package is there. POSIX sh under set -e. DPKG_ROOT is dpkg's: an installation below another directory.

program=/usr/lib/bypassd/bin/bypassctl
state=${DPKG_ROOT:-}/var/lib/bypassd
# Made by a forced removal that left values in the kernel; a purge would lose their originals.
unrestored=$state/unrestored

say() { echo "bypassd: $*" >&2; }

systemd() { [ -z "${DPKG_ROOT:-}" ] && [ -d /run/systemd/system ] && command -v systemctl >/dev/null; }

# A service that systemd starts again and again is "activating": it is stopped and restarted like an active one.
runs() {
    systemd || return 1
    case $(systemctl is-active bypassd.service || true) in active | activating | reloading) return 0 ;; esac
    return 1
}

reload_systemd() { if systemd; then systemctl --system daemon-reload || true; fi; }

# The place of an installation by the tarball's installer, whose unit in /etc precedes the package's.
tarball() {
    prefix=/usr/lib/bypassd
    unit=${DPKG_ROOT:-}/etc/systemd/system/bypassd.service
    if [ -f "$unit" ]; then prefix=$(sed -n 's|^ExecStart=\(/[A-Za-z0-9/._-]*\)/bin/bypassd run.*|\1|p' "$unit"); fi
    if [ -f "${DPKG_ROOT:-}$prefix/install.sh" ]; then echo "$prefix"; fi
}

refuse_tarball() {
    found=$(tarball)
    [ -z "$found" ] || {
        say "the tarball is installed in $found; remove it first (this keeps configuration and state): $found/install.sh --uninstall"
        exit 1
    }
}

# Whether there is a store, where the configuration says; if that cannot be read, restore says what is wrong. A path with
# a space is in quotes.
wrote() {
    store=$("$program" config show store.path | sed -n 's/^store\.path = "\{0,1\}\(\/[^"\]*[^"\ ]\)"\{0,1\}   \[.*/\1/p')
    [ -z "$store" ] || [ -e "$store" ] || [ -e "$store.copy" ]
}

# Before the programs go: every changed value is restored, or nothing is removed.
restore_all() {
    if [ -n "${DPKG_ROOT:-}" ] || [ ! -x "$program" ]; then return 0; fi
    if ! wrote; then
        # No value was written. Groups that a killed doctor --prove left are removed too, and are no reason to stay.
        if [ -d "${store%/*}/prove" ]; then "$program" restore || true; fi
        return 0
    fi
    if "$program" restore; then rm -f "$unrestored"; return 0; fi
    if [ "${BYPASSD_FORCE_REMOVE:-}" = 1 ]; then
        mkdir -p "$state"
        : >"$unrestored"
        say "not every value could be restored (above); removed all the same (BYPASSD_FORCE_REMOVE=1)"
        return 0
    fi
    say "not every value could be restored (above): nothing was removed, the service is stopped; to remove it all the same set BYPASSD_FORCE_REMOVE=1"
    return 1
}

# What the unit keeps outside of the state directory; /run has a part of the originals.
remove_leftovers() {
    rm -rf "${DPKG_ROOT:-}/var/cache/bypassd"
    if [ ! -e "$unrestored" ]; then rm -rf "${DPKG_ROOT:-}/run/bypassd"; fi
}
