"""The agent's own needs: rights, limits, store, configuration; and the agent itself."""

import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from cgroupfs.errors import StoreError
from reconciler import __version__
from reconciler.cli.asking import QueryResults
from reconciler.cli.checks import CheckResult, bad, ok, warn
from reconciler.cli.format import window_text
from reconciler.cli.nodeview import InspectedNode, has_capability, read_number
from reconciler.cli.status import DELAYS_US, USES_MILLI
from reconciler.clients.kube_config import NodeSettings
from reconciler.config.load import digest
from reconciler.runtime import format as fmt
from reconciler.sources.kubelet_watch import kubelet_facts
from state.printable import printable
from state.reader import NoStoreError, read_dump
from state.schema import NewerSchemaError

# By their numbers in linux/capability.h.
_CAPABILITIES: Final = {
    1: "DAC_OVERRIDE",
    2: "DAC_READ_SEARCH",
    5: "KILL",
    12: "NET_ADMIN",
    19: "SYS_PTRACE",
    21: "SYS_ADMIN",
    23: "SYS_NICE",
    24: "SYS_RESOURCE",
}
# Readings of the daemon's priority. It has its real-time priority while it waits, which is most of the time.
_READINGS: Final = 5
_BETWEEN_S: Final = 0.02
_FREE_BYTES: Final = 64 << 20
_SHOWN: Final = 100
_MOST: Final = 4
_PROBLEMS: Final = 8
"""As many as `bypassctl status` shows."""
_LONGEST_PROBLEM: Final = 300
_BASE_WATCHES: Final = 32
_UNIT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9@_.-]{0,99}\.service")
_INOTIFY: Final = ("max_user_watches", "max_user_instances", "max_queued_events")


def agent(node: InspectedNode, results: QueryResults) -> Iterator[CheckResult]:
    """The agent's own needs: rights, limits, store, configuration; and the agent itself."""
    yield _fanotify(node, results)
    yield _inotify(node)
    yield _rights(node)
    yield _store(node)
    yield _config(node)
    yield _daemon(node, results)
    if results.daemon_state is not None:
        yield _running(node, results.daemon_state)
        yield _problems(results.daemon_problems)
        own = results.daemon_state.get("own_group")
        if isinstance(own, dict):
            yield own_group(own)
        yield node_daemons(results.daemon_state)
        yield unobeyed_marks(results.daemon_state)
        yield from node_settings(results.daemon_state)
        if node.config.host_workloads:
            yield host_workloads(results.daemon_state, watched=node.config.interference.enabled)


def host_workloads(state: Mapping[str, object], *, watched: bool) -> CheckResult:
    """Whether each entry of ``host_workloads`` matches something, and victims are judged.

    ``state``: the daemon's section ``agent``. ``watched``: interference detection is enabled.
    """
    name, rows = "host workloads", state.get("host_workloads")
    known = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if not known:
        return warn(name, "nothing is read of them yet", "bypassctl reload, if they are new")
    victims = [row for row in known if row.get("counts_as") == "victim"]
    if victims and not watched:
        text = f"{fmt.plural(len(victims), 'victim')} among them: measured, and not judged"
        return warn(name, text, "interference: {enabled: true}")
    texts = [f"{row.get('name')} ({row.get('match')}): {row['problem']}" for row in known if row.get("problem")]
    if not texts:
        return ok(name, f"{len(known)} are read; nothing is written to them")
    more = f"; and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    fix = "correct host_workloads.NAME.match, or remove the entry; cgroup v1 has no group of a stopped unit"
    return warn(name, f"{'; '.join(texts[:_MOST])[: 4 * _SHOWN]}{more}", fix)


def unobeyed_marks(state: Mapping[str, object]) -> CheckResult:
    """The marks of control planes' dialects that pods of this node have and bypassd does not obey."""
    found = state.get("unobeyed")
    if not isinstance(found, dict) or not found:
        return ok("marks", "no pod has a mark that is known and not obeyed")
    texts = [f"{key} ({fmt.plural(count, 'pod')})" for key, count in sorted(found.items()) if isinstance(count, int)]
    return ok("marks", f"not obeyed: {', '.join(texts)}; bypassctl why POD names the nearest setting")


def node_settings(state: Mapping[str, object]) -> Iterator[CheckResult]:
    """The settings of this node that a control plane has, where they count."""
    facts = state.get("node_settings")
    if not isinstance(facts, dict) or facts.get("wanted") in {None, "off"}:
        return
    name = "node settings"
    problem = facts.get("problem")
    taken, left = facts.get("taken"), facts.get("left_count")
    used = len(taken) if isinstance(taken, dict) else 0
    source = printable(str(facts.get("source") or "no control plane"), _SHOWN)
    text = f"{source}: {fmt.plural(used, 'setting')} in force, {left if isinstance(left, int) else 0} values not taken"
    text += ": bypassctl config explain apiserver.node_settings"
    if isinstance(problem, str):
        fix = "bypassctl init credentials --test; until then the last settings stay"
        yield warn(name, f"{printable(problem, _LONGEST_PROBLEM)}; {text}", fix)
    else:
        yield ok(name, text)


def _fanotify(node: InspectedNode, results: QueryResults) -> CheckResult:
    if results.fanotify is None:
        return ok("fanotify", "copied node: not tested" if node.copied else "no cgroup hierarchy found")
    if not results.fanotify or results.fanotify_problem:
        fix = (
            "needs CAP_SYS_ADMIN in the initial user namespace and kernel 5.10; without it writers of files are unknown"
        )
        return warn("fanotify", results.fanotify_problem, fix)
    return ok("fanotify", "identifies every writer of a control file")


def _inotify(node: InspectedNode) -> CheckResult:
    limits = {name: read_number(node.root, f"proc/sys/fs/inotify/{name}") for name in _INOTIFY}
    watches = limits["max_user_watches"]
    need = _BASE_WATCHES + len(node.pods) + 2 * len(node.containers)
    if watches is None:
        return warn("inotify", f"limits unknown, {need} watches needed", "mount /proc")
    text = f"{need} watches of {watches}, {limits['max_user_instances']} instances, queue {limits['max_queued_events']}"
    if watches < 2 * need:
        return warn("inotify", text, f"sysctl fs.inotify.max_user_watches={max(8192, 4 * need)}, or bypassd polls")
    if (limits["max_user_instances"] or 0) < 16:
        return warn("inotify", text, "sysctl fs.inotify.max_user_instances=128")
    return ok("inotify", text)


def _rights(node: InspectedNode) -> CheckResult:
    if node.copied:
        return ok("rights", "copied node: not needed")
    missing = [name for bit, name in _CAPABILITIES.items() if not has_capability(node.root, bit)]
    if os.geteuid() != 0:
        return bad("rights", f"permission denied: running as user {os.geteuid()}", "run with sudo")
    if missing:
        fix = "grant the capabilities listed in bypassd.service"
        return warn("rights", f"root without {', '.join(missing)}", fix)
    return ok("rights", f"root with {', '.join(_CAPABILITIES.values())}")


def _store(node: InspectedNode) -> CheckResult:
    # Absolute: of a name alone the directories above never come to /.
    directory = os.path.dirname(os.path.abspath(node.store))
    try:
        while not _is_directory(directory) and directory != "/":
            directory = os.path.dirname(directory)
    except PermissionError:
        return bad("store", f"{node.store}: permission denied", "run with sudo")
    if not os.access(directory, os.W_OK):
        fix = "make it writable, or set store.path: bypassd writes nothing that it cannot record"
        return bad("store", f"{directory} is not writable", fix)
    free = os.statvfs(directory)
    if free.f_bavail * free.f_frsize < _FREE_BYTES:
        left = fmt.size(free.f_bavail * free.f_frsize)
        return bad(
            "store", f"{directory}: {left} left", "free disk space: bypassd writes nothing that it cannot record"
        )
    try:
        fields = read_dump(node.store, history=0)
    except NoStoreError:
        return ok("store", f"{node.store}: created at the first start")
    except NewerSchemaError as exc:
        return bad("store", str(exc), "install the newer version again")
    except StoreError as exc:
        fix = "start the daemon: it moves the file aside and adopts the values in force where it can identify them"
        return bad("store", str(exc), fix)
    if fields["newer"] is not None:
        fix = "run bypassctl restore, or install the newer version again"
        return bad("store", str(fields["newer"]), fix)
    problems = fields["problems"]
    if isinstance(problems, list) and problems:
        return warn("store", f"{node.store}: {problems[0]}", "damaged rows are ignored; the daemon repairs them")
    files = fields["files"]
    return ok("store", f"{node.store}: {fmt.plural(len(files) if isinstance(files, list) else 0, 'file')}")


def _is_directory(path: str) -> bool:
    """Like `os.path.isdir`, but an unreadable path does not count as missing. Errors: `PermissionError`."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError:
        raise
    except OSError:
        return False


def _config(node: InspectedNode) -> CheckResult:
    if "config" in node.problems:
        lines = node.problems["config"].splitlines()
        return bad("config", fmt.first_of(lines, 1), "run bypassd check-config for all errors")
    if node.removed_keys:
        fix = "remove such keys; bypassd check-config names them all"
        return warn("config", fmt.first_of([*map(str, node.removed_keys)], 1), fix)
    files = ", ".join(node.config_files) or "no file: defaults apply"
    return ok("config", f"mode {node.config.mode.value}; {files}")


def _daemon(node: InspectedNode, results: QueryResults) -> CheckResult:
    if node.socket is None:
        return ok("daemon", "copied node: none" if node.copied else "no socket configured")
    if results.daemon == "ready":
        priority = _priority(node, results.daemon_pid)
        if priority == "usual":
            text = "ready, but without real-time priority: on a busy node containers start before their settings"
            fix = "CAP_SYS_NICE, RestrictRealtime=no, cpu.rt_runtime_us of its cgroup; or node.realtime_ms: 0"
            return warn("daemon", text, fix)
        more = f" at {priority} priority" if priority else ""
        return ok("daemon", f"ready on {node.socket}{more}")
    if results.daemon is None and not results.daemon_reasons:
        return warn("daemon", "not running", "systemctl enable --now bypassd")
    return bad(
        "daemon",
        "; ".join(results.daemon_reasons) or "not ready",
        "run with sudo"
        if any("permission denied" in reason for reason in results.daemon_reasons)
        # That would be denied, too.
        else "systemctl restart bypassd; journalctl -u bypassd"
        if results.daemon is None
        else "bypassctl status; journalctl -u bypassd",
    )


def _problems(problems: Sequence[str]) -> CheckResult:
    """What the daemon reads from the kernel's files all the time: the checks here see one moment of a few of them."""
    if not problems:
        return ok("problems", "the daemon reports none")
    text = fmt.first_of([printable(problem, _LONGEST_PROBLEM) for problem in problems], _PROBLEMS)
    fix = "bypassctl status; bypassctl why POD of a pod that is named; docs/runbooks.md has each source"
    return warn("problems", text, fix)


def _running(node: InspectedNode, state: Mapping[str, object]) -> CheckResult:
    """What the running daemon uses against what is found now: the node may have changed since it started."""
    differences: list[str] = []
    fixes: list[str] = []

    def compare(name: str, running: object, found: object) -> bool:
        differs = running is not None and str(running) != str(found)
        if differs:
            differences.append(
                f"{name}: daemon {str(running)[:_SHOWN] or 'none'}, node {str(found)[:_SHOWN] or 'none'}"
            )
        return differs

    if compare("version", state.get("version"), __version__):
        fixes.append("systemctl restart bypassd")
    # The last settings of a control plane are in the store, which only root reads.
    comparable = node.config.apiserver.node_settings is NodeSettings.OFF or os.access(node.store, os.R_OK)
    if "config" not in node.problems and comparable and state.get("config_digest") not in {None, digest(node.config)}:
        differences.append("configuration: not the one that the daemon has loaded")
        fixes.append("bypassctl reload, or a restart for settings that need one; --config for another file")
    if "config" not in node.problems:
        compare("mode", state.get("configured_mode"), node.config.mode.value)
    if node.layout is not None:
        compare("cgroup driver", state.get("driver"), node.layout.driver.value)
        compare("kubepods", state.get("kubepods"), node.layout.kubepods)
    used = state.get("kubelet")
    if isinstance(used, dict) and node.config.kubelet.enabled:
        listed = used.get("pending")
        if pending := listed if isinstance(listed, list) else []:
            differences += [f"kubelet {str(change)[:_SHOWN]}" for change in pending[:_MOST]]
            fixes.append("restart the kubelet: its file was changed after its start")
        waits = {str(change).partition(":")[0] for change in pending}
        found = kubelet_facts(node.kubelet)
        differing = [
            name for name in found if name not in waits and compare(f"kubelet {name}", used.get(name), found[name])
        ]
        if differing:
            fixes.append("wait half a minute for the daemon to follow the kubelet; else systemctl restart bypassd")
    if not differences:
        window = state.get("window")
        named = f"; window {window_text(window)}" if isinstance(window, dict) and window.get("names") else ""
        return ok("daemon state", f"uses what this node has now{named}")
    fix = "; ".join(fixes) or "bypassctl reload; if it remains: systemctl restart bypassd"
    return warn("daemon state", fmt.first_of(differences, _MOST), fix)


def own_group(own: Mapping[str, object]) -> CheckResult:
    """The weight of the daemon's wake-ups beside online pods. ``own``: `OwnGroupStatus` as the daemon reports it."""
    group, top, shares = (str(own.get(key))[:_SHOWN] for key in ("group", "top", "shares"))
    placement = own.get("placement")
    if own.get("problem"):
        fix = "systemctl restart bypassd; the unit needs a writable /sys/fs/cgroup (ProtectControlGroups=no)"
        return warn("daemon weight", str(own["problem"])[:_SHOWN], fix)
    if placement == "own":
        weight = f"{shares} shares directly below the root"
        if own.get("shares") is None:
            weight = "no group below the root has a weight (the cpu controller is off there), so pods have none either"
        return ok("daemon weight", f"{group}: {weight}")
    if placement == "pod":
        text = (
            f"in a pod, {group}: competes with online pods by its CPU request; "
            "the systemd unit has a small weight of its own instead"
        )
        return ok("daemon weight", text)
    if placement == "unknown":
        return ok("daemon weight", "no CPU group found for the daemon")
    where = "in the root of the CPU hierarchy" if placement == "root" else f"{shares} shares, shared with all of {top}"
    text = (
        f"{group}: {where}: each wake-up of the daemon may take milliseconds from an online task (p99.9 up to 4 times)"
    )
    return warn("daemon weight", text, _own_slice(group))


def _own_slice(group: str) -> str:
    """The command that moves the daemon into its own slice: of its unit, or of a start without one.

    A drop-in: no systemd changes the slice of a unit by ``set-property``, and ``edit --stdin`` is from 256 on.
    """
    unit = group.rpartition("/")[2]
    if not _UNIT.fullmatch(unit):
        return "start it by systemd-run --slice=bypassd.slice bypassd run"
    directory = f"/etc/systemd/system/{unit}.d"
    return (
        f"mkdir -p {directory} && printf '[Service]\\nSlice=bypassd.slice\\n' >{directory}/zz-slice.conf && "
        f"systemctl daemon-reload && systemctl restart {unit}"
    )


def node_daemons(state: Mapping[str, object]) -> CheckResult:
    """What the wake-ups of the node's other daemons may cost online pods. ``state``: the daemon's section ``agent``."""
    name = "node daemons"
    rows, refused = state.get("daemons"), state.get("daemons_refused")
    if isinstance(refused, dict) and refused:
        text = "; ".join(f"{path}: {why}" for path, why in list(refused.items())[:_MOST])
        fix = (
            "another policies.node_daemons.groups; on cgroup v1 DefaultCPUAccounting=yes in /etc/systemd/system.conf "
            "gives services a group (after a reboot)"
        )
        return warn(name, text[: 4 * _SHOWN], fix)
    busy = [row for row in rows if isinstance(row, dict) and _uses(row)] if isinstance(rows, list) else []
    if not busy:
        text = "no group of daemons directly below the root uses the CPU: those of services may be in the root group"
        return ok(name, text)
    texts = []
    delays = False
    for row in busy[:_MOST]:
        managed = row.get("wanted") is not None
        credit = row.get("credit_us")
        text = f"{str(row.get('group'))[:_SHOWN]}: weight {row.get('weight')}, uses {fmt.cpu(row.get('use_milli'))}"
        if isinstance(waits := row.get("waits"), float):
            text += f", waits {100 * waits:.0f} % of the time"
        if isinstance(credit, int):
            text += f", each wake-up may delay an online task by {fmt.duration(credit / 1e6)}"
            delays = delays or (credit >= DELAYS_US and not managed)
        texts.append(text)
    fix = "policies.node_daemons: {enabled: true} holds its weight near twice what it needs (docs/cpu.md)"
    return warn(name, "; ".join(texts), fix) if delays else ok(name, "; ".join(texts))


def _uses(row: Mapping[str, object]) -> bool:
    use, weight = row.get("use_milli"), row.get("weight")
    return isinstance(use, int) and use >= USES_MILLI and isinstance(weight, int)


def _priority(node: InspectedNode, pid: int | None) -> str:
    """The policy under which the running daemon waits, from the kernel; "" where that is unknown or not wanted."""
    if not node.config.node.realtime_ms or pid is None:
        return ""
    policies = set()
    for _ in range(_READINGS):
        policies.add(_policy(pid))
        if os.SCHED_FIFO in policies:
            return "real-time"
        time.sleep(_BETWEEN_S)
    return "" if None in policies else "usual"


def _policy(pid: int) -> int | None:
    try:
        # The kernel adds the flag to the policy.
        return os.sched_getscheduler(pid) & ~os.SCHED_RESET_ON_FORK
    except OSError:
        return None
