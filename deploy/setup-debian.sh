#!/bin/sh
# Installs what `make` needs on a bare Debian 12: a Python with venv, a C compiler for the benchmark's reference,
# containerd with runc and crun for the tests with real containers, and FUSE for those that mount a model of resctrl. Does
# nothing, and uses no network, when all is there.
#
#   setup-debian.sh           install what is missing (root with apt), else say what is missing and how to get it
#   setup-debian.sh --check   only say; exit code 1 when something is missing
#   setup-debian.sh --also PROGRAM=PACKAGE...   these too
#
# Only Python is a must: without the others, what needs them is skipped and says so. Exit code 1: Python is missing.
set -eu

# Debian puts runc into /usr/sbin, which is not on everybody's path.
PATH="$PATH:/usr/sbin:/sbin"

must=""
nice=""

python=${PYTHON:-}
if [ -z "$python" ]; then
    python=$(command -v python3.11 || command -v python3 || true)
fi
if [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    must="python3 python3-venv"
elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    must="python3-venv"
fi

if ! printf '#include <stdio.h>\nint main(void) { return 0; }\n' | cc -x c -o /dev/null - 2>/dev/null; then
    nice="gcc libc6-dev"
fi

# Any containerd will do: one that is there (Docker's, a distribution's) is never replaced.
if ! command -v containerd >/dev/null 2>&1; then
    nice="$nice${nice:+ }containerd runc"
fi

# A second OCI runtime, which the tests run beside runc: 1.7 MB with its library.
if ! command -v crun >/dev/null 2>&1; then
    nice="$nice${nice:+ }crun"
fi

# Asked through the Python that will load it. The package brings the library under whatever name this Debian has.
if [ -z "$must" ] && ! "$python" -c 'import sys
from ctypes.util import find_library
sys.exit(not (find_library("fuse") or find_library("fuse3")))' 2>/dev/null; then
    nice="$nice${nice:+ }fuse3"
fi

if [ "${1:-}" = "--also" ]; then
    shift
    for pair in "$@"; do
        command -v "${pair%%=*}" >/dev/null 2>&1 || nice="$nice${nice:+ }${pair#*=}"
    done
fi

missing="$must${must:+${nice:+ }}$nice"
if [ -z "$missing" ]; then
    exit 0
fi

say_how() {
    printf '%s: missing Debian packages: %s\n  %s\n  as root: apt-get install %s\n' "$0" "$missing" "$1" "$missing" >&2
}

if [ "${1:-}" = "--check" ]; then
    say_how "nothing was installed (--check)"
    exit 1
fi

left() {
    say_how "$1"
    [ -z "$must" ] || exit 1
    printf '  going on without: what needs them is skipped\n' >&2
    exit 0
}

command -v apt-get >/dev/null 2>&1 || left "there is no apt-get here: install their like with this system's own means"
[ "$(id -u)" = 0 ] || left "installing them needs root"

printf '%s: installing %s\n' "$0" "$missing" >&2
export DEBIAN_FRONTEND=noninteractive
# The words are package names, to be split.
# shellcheck disable=SC2086
apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >&2 || left "apt-get failed, see above"

if [ -n "$must" ] && ! "${python:-python3}" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'; then
    printf '%s: the system'\''s Python is older than 3.11; set PYTHON=/path/to/python3.11 for make\n' "$0" >&2
    exit 1
fi
