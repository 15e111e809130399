#!/bin/bash
# Inside the virtual machine: run the core suite with real containers. Called by its init with the suite on /suite.
set -u
suite=/suite
layout=$(cat "$suite/layout")
mapfile -d '' -t arguments <"$suite/arguments"

# Nothing of this is on the kernel's defaults: containers need a writable, non-overlay place, and names resolve locally.
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8
export PYTHONPATH=$suite/packages PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis
# The machine is the tests' own: they may take its CPUs away, mount and fill its resctrl, and give it swap.
export BYPASSD_TEST_PROGRAMS=$suite/programs BYPASSD_TEST_PATIENCE=10 BYPASSD_TEST_HOTPLUG=1
export BYPASSD_TEST_RESCTRL=1 BYPASSD_TEST_SWAP=1
case $layout in
v2) export BYPASSD_TEST_DRIVER=systemd ;;
v1) export BYPASSD_TEST_DRIVER=cgroupfs ;;
esac
echo "kernel $(uname -r), systemd $(systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p'), $(containerd --version |
    cut -d' ' -f3), cgroups: $(stat -fc %T /sys/fs/cgroup) with the $BYPASSD_TEST_DRIVER driver"

# Of a kernel that is not this Debian's own.
if [[ -d $suite/modules ]]; then mount --bind "$suite/modules" /lib/modules; fi

cd "$suite/repository" || exit 1
if ((${#arguments[@]} == 0)) || [[ -z ${arguments[0]} ]]; then
    arguments=(-m core tests/e2e)
fi
exec /usr/bin/python3 -m pytest -v --tb=short --durations=5 --color=no -p no:cacheprovider -p no:randomly -o timeout=600 "${arguments[@]}"
