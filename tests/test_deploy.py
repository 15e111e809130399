"""What is installed beside the program: the unit is understood by systemd and asks for no more than it says."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cgroupfs.private import POINT
from reconciler.cli.main import parser

DEPLOY = Path(__file__).parents[1] / "deploy"
UNIT = (DEPLOY / "bypassd.service").read_text()
CAP_DAC_OVERRIDE = 1


def needed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"NOT RUN: {program} is not installed")
    return path


def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    verify = needed("systemd-analyze")
    unit = tmp_path / "bypassd.service"
    # The program of the test's machine is used as the installed one.
    unit.write_text(UNIT.replace("/opt/bypassd/bin/bypassd", "/bin/true"))
    done = subprocess.run([verify, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


SINCE = {
    # 219 and before: CentOS 7 knows them.
    **dict.fromkeys(
        (
            *("Description", "Documentation", "After", "WantedBy", "Type", "NotifyAccess", "ExecStart", "ExecStopPost"),
            *("ExecReload", "TimeoutStartSec", "WatchdogSec", "TimeoutStopSec", "KillMode", "Restart", "RestartSec"),
            *("RestartPreventExitStatus", "Slice", "RuntimeDirectory", "RuntimeDirectoryMode", "UMask", "Environment"),
            *("OOMScoreAdjust", "LimitNOFILE", "CapabilityBoundingSet", "NoNewPrivileges", "ProtectSystem"),
            *("ProtectHome", "PrivateTmp", "PrivateDevices", "PrivateNetwork", "DevicePolicy"),
            *("RestrictAddressFamilies", "SystemCallArchitectures", "SystemCallFilter", "SystemCallErrorNumber"),
        ),
        219,
    ),
    "TasksMax": 219,  # 227; CentOS 7 has it all the same
    "AmbientCapabilities": 219,  # 229; the same
    "StartLimitIntervalSec": 230,
    "MemoryMax": 231,
    "ReadWritePaths": 231,
    "RestrictRealtime": 231,
    "ProtectControlGroups": 232,
    "ProtectKernelModules": 232,
    "RestrictNamespaces": 233,
    "StateDirectory": 235,
    "StateDirectoryMode": 235,
    "RuntimeDirectoryPreserve": 235,
    "ConfigurationDirectory": 235,
    "CacheDirectory": 235,
    "LockPersonality": 235,
    "PrivateMounts": 239,
    "ProtectHostname": 242,
    "RestrictSUIDSGID": 242,
    "ProtectKernelLogs": 244,
    "ProtectClock": 245,
    "ProtectProc": 247,
}
"""The first systemd that knows each line of the unit; an older one logs it and goes on without it.

Source: systemd's load-fragment-gperf.gperf.m4 of CentOS 7 (219) and CentOS 8 (239), systemd's NEWS.
"""
STRICTER = {"StartLimitIntervalSec", "MemoryMax"} | {
    name for name in SINCE if name.startswith(("Protect", "Restrict", "Private", "Lock", "ReadWrite"))
}
"""Without them the daemon has more rights, or may be restarted less often, and everything else is the same."""
MADE_BY_THE_DAEMON = {"StateDirectory", "StateDirectoryMode", "ConfigurationDirectory", "CacheDirectory"}


def test_what_each_systemd_from_219_on_leaves_out_of_the_unit_costs_no_function() -> None:
    unit = {name for name in settings_of(UNIT) if name in SINCE}
    assert unit == set(settings_of(UNIT)), "a new line needs its first systemd in SINCE"
    left_out = {name for name in unit if SINCE[name] > 219}
    # CentOS 7 removes /run/bypassd at each end: a kill loses what was about to be written.
    assert left_out - STRICTER - MADE_BY_THE_DAEMON == {"RuntimeDirectoryPreserve"}


@pytest.mark.parametrize(
    "name", ["Slice", "Type", "WatchdogSec", "OOMScoreAdjust", "CapabilityBoundingSet", "KillMode"]
)
def test_what_the_daemon_needs_of_its_unit_every_systemd_from_219_on_knows(name: str) -> None:
    assert SINCE[name] == 219
    assert settings_of(UNIT)["Slice"] == "bypassd.slice"


def test_the_unit_stays_within_its_exposure(tmp_path: Path) -> None:
    analyze = needed("systemd-analyze")
    shutil.copy(DEPLOY / "bypassd.service", tmp_path)
    command = [analyze, "security", "--offline=true", "--threshold=40", "--no-pager", str(tmp_path / "bypassd.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "offline" in done.stderr and done.returncode:
        pytest.skip(f"NOT RUN: this systemd-analyze has no offline check: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout[-400:]


def test_the_unit_is_notified_watched_reloaded_and_not_restarted_into_a_wall() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE))
    assert settings["Type"] == "notify"
    assert settings["ExecReload"] == "/bin/sh -c 'kill -HUP ${MAINPID}'"
    assert int(settings["WatchdogSec"]) > 2 * 20
    assert settings["RestartPreventExitStatus"].split() == ["2", "3", "4"]
    assert settings["ProtectControlGroups"] == "no"
    # An installation waits for the start; the daemon is ready after 30 s at the latest.
    assert 30 < int(settings["TimeoutStartSec"]) <= 120
    # SCHED_FIFO for the loop, and disk rules that name /dev/...: both need what a stricter sandbox takes away.
    assert (settings["RestrictRealtime"], settings["PrivateDevices"], settings["DevicePolicy"]) == (
        "no",
        "no",
        "closed",
    )


def sets_of_calls() -> dict[str, set[str]]:
    """What systemd's groups of system calls contain, each with the groups inside it resolved."""
    analyze = needed("systemd-analyze")
    done = subprocess.run([analyze, "syscall-filter", "--no-pager"], capture_output=True, text=True, check=False)
    texts: dict[str, set[str]] = {}
    name = ""
    for line in done.stdout.splitlines():
        if line.startswith("@"):
            name = line.strip()
            texts[name] = set()
        elif line.startswith("    ") and not line.strip().startswith("#") and name:
            texts[name].add(line.strip())
    if "@system-service" not in texts:
        pytest.skip(f"NOT RUN: this systemd-analyze tells no system calls: {done.stderr.strip()}")

    def whole(group: str) -> set[str]:
        return {call for text in texts[group] for call in (whole(text) if text.startswith("@") else {text})}

    return {group: whole(group) for group in texts}


def settings_of(text: str) -> dict[str, str]:
    """A setting that is given several times is the sum of them, as in a drop-in."""
    texts: dict[str, str] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        texts[key] = f"{texts[key]} {value}" if key in texts else value
    return texts


def allowed(text: str, *, unknown: frozenset[str] = frozenset()) -> set[str]:
    """The calls that a unit with its drop-ins leaves. The first line decides the kind, a later one of the other kind
    takes away from it; ``unknown`` groups and calls are left out, as systemd does.

    Source: systemd.exec(5), SystemCallFilter; config_parse_syscall_filter, which has been so since 231.
    """
    sets = sets_of_calls()
    lines = re.findall(r"^SystemCallFilter=(~?)(.*)$", text, re.MULTILINE)
    kind = lines[0][0]
    listed: set[str] = set() if kind else set(sets["@default"])
    for sign, words in lines:
        known = [word for word in words.split() if word not in unknown]
        calls = {call for word in known for call in (sets[word] if word.startswith("@") else {word})}
        listed = listed | calls if sign == kind else listed - calls
    return sets["@known"] - listed if kind else listed


def drop_in(document: str) -> str:
    """The one that a document shows, unchanged."""
    text = (DEPLOY.parent / "docs" / document).read_text()
    (result,) = re.findall(r"```ini\n# /etc/systemd/system/bypassd\.service\.d/[\w-]+\.conf\n(.*?)```", text, re.DOTALL)
    return str(result)


@pytest.mark.parametrize(
    ("what", "calls"),
    [
        ("who wrote", {"fanotify_init", "fanotify_mark", "inotify_add_watch"}),
        ("processor events", {"perf_event_open", "ioctl", "read"}),
        ("run queue and CRI", {"socket", "bind", "sendto", "recvfrom", "connect"}),
        ("evictions by signals", {"pidfd_open", "pidfd_send_signal", "kill"}),
        ("sinks and probes that are programs", {"memfd_create", "execve", "setsid", "waitid", "clone3", "vfork"}),
        ("notices", {"renameat", "fchown", "fchmod", "unlinkat"}),
        ("file systems", {"statfs", "fstatfs", "getdents64"}),
        ("network of BE pods", {"bpf"}),
        ("core scheduling", {"prctl"}),
        ("priority", {"sched_setscheduler", "setpriority", "prlimit64"}),
        ("idle class of threads", {"sched_getscheduler", "sched_setscheduler"}),
    ],
)
def test_the_unit_lets_everything_that_is_on_without_a_drop_in_call_the_kernel(what: str, calls: set[str]) -> None:
    assert calls - allowed(UNIT) == set(), what


def test_an_older_systemd_that_knows_few_groups_leaves_the_daemon_its_calls() -> None:
    """Ubuntu 18.04 has 237 without @system-service (239), CentOS 7 has 219 without any group (231)."""
    sets = sets_of_calls()
    needed_calls = sets["@system-service"] & sets["@known"]
    needed_calls |= {"fanotify_init", "fanotify_mark", "bpf", "perf_event_open"}
    for unknown in ({"@system-service"}, {*sets}, {*sets, "memfd_secret", "process_mrelease", "quotactl_fd"}):
        assert needed_calls - allowed(UNIT, unknown=frozenset(unknown)) == set()


def test_the_unit_refuses_what_services_never_need() -> None:
    sets = sets_of_calls()
    left = allowed(UNIT)
    for group in ("@clock", "@cpu-emulation", "@module", "@mount", "@obsolete", "@raw-io", "@reboot", "@swap"):
        assert left & sets[group] == set(), group
    assert left & {"ptrace", "pidfd_getfd", "open_by_handle_at", "quotactl", "sethostname", "acct"} == set()


def test_the_unit_gives_the_rights_that_evictions_and_signals_need_and_no_more() -> None:
    settings = settings_of(UNIT)
    assert set(settings["CapabilityBoundingSet"].split()) == {
        *("CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_SYS_RESOURCE", "CAP_SYS_NICE"),
        *("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_DAC_OVERRIDE", "CAP_KILL"),
    }
    # Netlink for taskstats; the API server and sinks over IP; the runtime, the kubelet and systemd over unix sockets.
    assert settings["RestrictAddressFamilies"].split() == ["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"]
    assert settings["PrivateNetwork"] == "no"
    # Files in the pods' own volumes; recordings below the state directory.
    assert settings["ReadWritePaths"].split() == ["-/var/lib/kubelet/pods", "-/etc/bypassd"]
    assert settings["StateDirectory"] == "bypassd"


@pytest.mark.kernel
def test_the_units_rights_are_enough_for_what_belongs_to_programs_that_are_not_roots(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("REAL KERNEL TEST NOT RUN: needs root")
    setpriv, somebody = needed("setpriv"), 65534
    status = Path("/proc/self/status").read_text()
    (bounds,) = re.findall(r"^CapBnd:\t(\w+)$", status, re.MULTILINE)
    if int(bounds, 16) >> CAP_DAC_OVERRIDE & 1 == 0:
        pytest.skip("REAL KERNEL TEST NOT RUN: this machine's root has no CAP_DAC_OVERRIDE")
    parts = settings_of(UNIT)["CapabilityBoundingSet"].lower().split()
    # What the machine's root has not (CAP_SYS_RESOURCE in some containers) is none of this test's.
    rights = ",".join(f"+{word.removeprefix('cap_')}" for word in parts if word != "cap_sys_resource")
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o755)
    os.chown(volume, somebody, somebody)
    with subprocess.Popen(["sleep", "60"], user=somebody, group=somebody, extra_groups=[]) as program:
        try:
            deed = f"echo 700 > /proc/{program.pid}/oom_score_adj && echo notice > {volume}/notice.json"
            within = [setpriv, f"--bounding-set=-all,{rights}", "--no-new-privs", "sh", "-c", deed]
            done = subprocess.run(within, capture_output=True, text=True, check=False)
            score = Path(f"/proc/{program.pid}/oom_score_adj").read_text()
        finally:
            program.kill()
    assert (done.returncode, done.stderr, score) == (0, "", "700\n")


def test_the_unit_thaws_after_every_end_by_a_command_that_there_is() -> None:
    commands = [line.split() for line in re.findall(r"^ExecStopPost=(.*)$", UNIT, re.MULTILINE)]
    assert {program for program, *_ in commands} == {"-/opt/bypassd/bin/bypassctl"}
    options = [parser().parse_args(parts) for _, *parts in commands]
    assert [item.command for item in options] == ["thaw", "headroom"]
    assert options[1].withdraw


def test_what_is_not_on_without_a_drop_in_is_on_with_it(tmp_path: Path) -> None:
    assert not {"mount", "umount2"} & allowed(UNIT)
    mounting = f"{UNIT}\n{drop_in('signals.md')}"
    assert {"mount", "umount2"} <= allowed(mounting)
    assert os.path.dirname(POINT) == f"/run/{settings_of(UNIT)['RuntimeDirectory']}"
    probing = settings_of(f"{UNIT}\n{drop_in('probes.md')}")
    assert {"CAP_SETUID", "CAP_SETGID", "CAP_KILL"} <= set(probing["CapabilityBoundingSet"].split())
    assert {"setresuid", "setresgid", "setgroups"} <= allowed(UNIT)
    directory = tmp_path / "bypassd.service.d"
    directory.mkdir()
    for name in ("signals", "probes"):
        (directory / f"{name}.conf").write_text(drop_in(f"{name}.md"))
    test_systemd_understands_every_line_of_the_unit(tmp_path)


class Machine:
    """A machine with just these programs: stubs, each a shell script that may write into ``log``."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.log = directory / "log"

    def has(self, name: str, script: str = "exit 0") -> None:
        stub = self.bin / name
        stub.write_text(f'#!/bin/sh\nlog() {{ echo "$*" >> {self.log}; }}\n{script}\n')
        stub.chmod(0o755)

    def set_up(self, *arguments: str) -> tuple[int, str]:
        script = (DEPLOY / "setup-debian.sh").read_text()
        # Debian's own sbin directories would bring the test machine's programs back.
        local = self.bin.parent / "setup"
        local.write_text(script.replace(":/usr/sbin:/sbin", ""))
        command = ["/bin/sh", str(local), *arguments]
        done = subprocess.run(command, env={"PATH": str(self.bin)}, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr.replace(f"{local}", "setup")

    def installed(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Everything is there."""
    made = Machine(tmp_path)
    made.has("python3")
    made.has("cc")
    made.has("containerd")
    made.has("crun")
    made.has("id", "echo 0")
    made.has("apt-get", 'log apt-get "$@"')
    return made


def test_set_up_installs_the_second_runtime_for_the_tests(machine: Machine) -> None:
    (machine.bin / "crun").unlink()
    machine.set_up()
    assert machine.installed()[-1].split()[-1] == "crun"


def test_set_up_does_nothing_where_everything_is_there(machine: Machine) -> None:
    assert machine.set_up() == (0, "")
    assert machine.installed() == []


def test_set_up_installs_just_what_is_missing(machine: Machine) -> None:
    (machine.bin / "containerd").unlink()
    machine.has("cc", "exit 1")
    code, said = machine.set_up()
    assert (code, said) == (0, "setup: installing gcc libc6-dev containerd runc\n")
    assert machine.installed() == [
        "apt-get update -qq",
        "apt-get install -y -qq --no-install-recommends gcc libc6-dev containerd runc",
    ]


def test_set_up_installs_venv_for_a_python_that_lacks_it(machine: Machine) -> None:
    machine.has("python3", f'case "$2" in *ensurepip*) test -e {machine.log} ;; esac')
    assert machine.set_up() == (0, "setup: installing python3-venv\n")
    assert machine.installed()[1].endswith(" python3-venv")


def test_set_up_installs_fuse_for_a_python_that_finds_no_library_of_it(machine: Machine) -> None:
    machine.has("python3", 'case "$2" in *find_library*) exit 1 ;; esac')
    assert machine.set_up() == (0, "setup: installing fuse3\n")
    assert machine.installed()[1].endswith(" fuse3")


def test_set_up_installs_more_when_asked_to(machine: Machine) -> None:
    machine.has("rpmbuild")
    assert machine.set_up("--also", "rpmbuild=rpm") == (0, "")
    assert machine.set_up("--also", "rpmbuild=rpm", "lint-this=lint") == (0, "setup: installing lint\n")
    assert machine.installed()[1].endswith(" lint")


def test_set_up_checks_only_when_asked_to(machine: Machine) -> None:
    (machine.bin / "containerd").unlink()
    code, said = machine.set_up("--check")
    assert code == 1
    assert "missing Debian packages: containerd runc\n" in said
    assert machine.installed() == []


def test_set_up_without_root_says_what_is_missing_and_goes_on_without_the_optional(machine: Machine) -> None:
    machine.has("id", "echo 1000")
    (machine.bin / "containerd").unlink()
    assert machine.set_up() == (
        0,
        "setup: missing Debian packages: containerd runc\n  installing them needs root\n"  # noqa: ISC004
        "  as root: apt-get install containerd runc\n  going on without: what needs them is skipped\n",
    )
    (machine.bin / "python3").unlink()
    code, said = machine.set_up()
    assert code == 1
    assert "missing Debian packages: python3 python3-venv containerd runc\n" in said
    assert machine.installed() == []


def test_set_up_elsewhere_and_with_a_failing_apt_says_so(machine: Machine) -> None:
    (machine.bin / "containerd").unlink()
    machine.has("apt-get", "exit 100")
    code, said = machine.set_up()
    assert code == 0
    assert "apt-get failed, see above" in said
    (machine.bin / "apt-get").unlink()
    code, said = machine.set_up()
    assert code == 0
    assert "there is no apt-get here" in said


def test_set_up_refuses_a_python_that_stays_too_old(machine: Machine) -> None:
    machine.has("python3", "exit 1")
    code, said = machine.set_up()
    assert code == 1
    assert said.endswith("the system's Python is older than 3.11; set PYTHON=/path/to/python3.11 for make\n")
