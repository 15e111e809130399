"""The chain that protects online pods, tried as a whole: hog -> verdict -> squeeze -> alert.

A victim and a hog share a CPU, in the groups of two pods of a node of their own: a kubepods directory below
``/bypassd-prove-chain``, an empty state file, and a configuration with one sink, a file. A child process runs the
daemon's parts on it. The parent only reads: the alerts in the file, and what the kernel did to the hog.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from cgroupfs.hierarchy import Hierarchy
from cgroupfs.lines import lines_of
from cgroupfs.naming import Driver, Layout
from cgroupfs.trial import PREFIX, TrialGroup
from reconciler.cli.planted import CannotTryError, Planted, cpu_seconds, spin
from reconciler.runtime import format as fmt
from reconciler.runtime.trials import CHAIN
from reconciler.signals.cpu import CpuTicks, idle_shares, parse_stat
from state.evidence import Verdict

if TYPE_CHECKING:
    from reconciler.config.model import Config
    from reconciler.daemon.agent import Agent

T = TypeVar("T")
VICTIM: Final = "11111111-1111-4111-8111-111111111111"
HOG: Final = "22222222-2222-4222-8222-222222222222"
_CONTROLLERS: Final = ("cpu", "cpuacct", "cpuset", "memory", "pids")
"""Those whose groups a pod's processes are put into."""
_CHILD_CPU_S: Final = 8
"""Of each planted process: at half of a CPU it is more than `_VERDICT_S` and `_EFFECT_S` together."""
_DAEMON_CPU_S: Final = 10
# How long each link of the chain may take, and for how long its effect is measured.
_START_S: Final = 10.0
_VERDICT_S: Final = 8.0
_SQUEEZE_S: Final = 4.0
_EFFECT_S: Final = 1.0
_IDLE_S: Final = 0.2
_TRIES: Final = 10
_POLL_S: Final = 0.05
_LARGEST: Final = 1 << 20
_ALERTS: Final = "alerts.jsonl"
_REPORT: Final = "report.json"
_LOG_FILE: Final = "log"
_BUSY: Final = 0.8
"""Share of the time for which a CPU may be busy with other work."""
_WAITED: Final = 0.2
"""A victim that waited for less of its time was not disturbed: no verdict is right then."""


class BusyError(CannotTryError):
    """No CPU is idle enough; it may be later."""


class _Scene(NamedTuple):
    """What the trial reads: the private directory, the hog's groups (pod, container), and the two processes."""

    private: str
    hog_groups: tuple[TrialGroup, TrialGroup]
    version: int
    victim: Planted
    hog: Planted


def chain(hierarchy: Hierarchy, directory: str) -> tuple[bool, str]:
    """Whether a disturbed victim ends in a hog that is bounded by the kernel, and in alerts.

    Errors: `CannotTryError` where the victim cannot be disturbed or its wait is not measured (`BusyError`: now);
    `CgroupError`, OSError.
    """
    version = hierarchy.version("cpu")
    if version is None:
        raise CannotTryError("no cpu controller is mounted")
    private = os.path.join(directory, CHAIN)
    with ExitStack() as stack:
        shutil.rmtree(private, ignore_errors=True)  # left by a killed trial
        os.mkdir(private, 0o700)
        stack.callback(shutil.rmtree, private, ignore_errors=True)
        mounted = [name for name in _CONTROLLERS if hierarchy.version(name) is not None]
        top = stack.enter_context(TrialGroup(hierarchy, CHAIN, mounted))
        kubepods = top.child("kubepods")
        kubepods.child("burstable")
        victim_pod = kubepods.child(f"pod{VICTIM}")
        hog_pod = kubepods.child("besteffort").child(f"pod{HOG}")
        hog_box = hog_pod.child("b" * 64)
        cpu = _idle_cpu()
        victim, hog = (stack.enter_context(Planted(spin, cpu_s=_CHILD_CPU_S)) for _ in range(2))
        victim_pod.child("a" * 64).add(victim.pid)
        hog_box.add(hog.pid)
        for child in (victim, hog):
            os.sched_setaffinity(child.pid, {cpu})
        # Last, so that it ends first: before the groups and the directory that it uses.
        daemon = stack.enter_context(Planted(partial(_serve, hierarchy, private), cpu_s=_DAEMON_CPU_S))
        daemon.start()
        if not _until(lambda: _report(private), _START_S):
            raise CannotTryError(f"the trial's own daemon did not begin: {_last_line(private)}")
        return _links(_Scene(private, (hog_pod, hog_box), version, victim, hog))


def _links(scene: _Scene) -> tuple[bool, str]:
    """Begin the disturbance and follow the chain to its end, or to the link that is missing."""
    scene.victim.start()
    scene.hog.start()
    began = time.monotonic()
    if not _until(lambda: _alert(scene.private, "interference", f"pod:{VICTIM}"), _VERDICT_S):
        return _no_verdict(scene, time.monotonic() - began)
    verdict_s = time.monotonic() - began
    before = cpu_seconds(scene.hog.pid) / verdict_s
    if not _until(lambda: _alert(scene.private, "response", HOG), _SQUEEZE_S):
        return False, f"a verdict after {fmt.duration(verdict_s)}, and no squeeze of the hog"
    quota = _until(lambda: _quota(scene), _SQUEEZE_S)
    if not quota:
        return False, f"a verdict after {fmt.duration(verdict_s)} and an alert of the squeeze, but the hog has no quota"
    squeezed_s = time.monotonic() - began
    used, throttled = cpu_seconds(scene.hog.pid), _throttled(scene)
    time.sleep(_EFFECT_S)
    share = (cpu_seconds(scene.hog.pid) - used) / _EFFECT_S
    cut = _throttled(scene) - throttled
    words = [fmt.percent(100 * number) for number in (quota, before, share)]
    found = (
        f"verdict after {fmt.duration(verdict_s)}, quota {words[0]} of a CPU after {fmt.duration(squeezed_s)}, "
        f"both alerts; the hog used {words[1]}, then {words[2]}"
    )
    if not cut and share < quota / 2:
        raise BusyError(
            f"the hog has a quota of {words[0]} of a CPU, and had {words[2]}: the CPU was busy with other work"
        )
    # One more period, and the ticks in which the use is counted.
    return cut > 0 and share <= quota * 1.1 + 0.05, found


def _no_verdict(scene: _Scene, seconds: float) -> tuple[bool, str]:
    """Without a disturbance, or without its signal, there was nothing to find. Errors: `CannotTryError`."""
    waited = 1 - cpu_seconds(scene.victim.pid) / seconds
    report = _report(scene.private)
    if report.get("interfered"):
        return False, "the rule found the interference, and no alert of it arrived at the sink"
    if report.get("unknown"):
        raise CannotTryError(f"the wait for a CPU is not measured here: {report.get('verdict')}")
    if waited < _WAITED:
        raise CannotTryError(f"the victim waited for {fmt.percent(100 * waited)} of the time only")
    waits = f"waited for {fmt.percent(100 * waited)} of {fmt.duration(seconds)}"
    return False, f"no verdict of interference: the victim {waits}; {report.get('verdict')}"


# What the parent reads


def _until(question: Callable[[], T], within_s: float) -> T:
    """Ask until the answer is true, or the time is over: the last answer."""
    deadline = time.monotonic() + within_s
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return answer


def _text(path: str) -> str:
    """A file of the trial's own directory; empty where it is not there yet."""
    with suppress(OSError), open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        return file.read(_LARGEST)
    return ""


def _report(private: str) -> Mapping[str, object]:
    try:
        report = json.loads(_text(f"{private}/{_REPORT}") or "{}")
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _alert(private: str, kind: str, part: str) -> bool:
    """Whether the sink has an alert of this kind, whose key has this part; a dry run's does not count."""
    for line in lines_of(_text(f"{private}/{_ALERTS}")):
        with suppress(ValueError):  # the last line may be half written
            alert = json.loads(line)
            if alert["kind"] == kind and part in alert["key"] and alert["labels"].get("mode") != "dry_run":
                return True
    return False


def _last_line(private: str) -> str:
    lines = lines_of(_text(f"{private}/{_LOG_FILE}"))
    return lines[-1][:200] if lines else "no reason in its log"


def _quota(scene: _Scene) -> float | None:
    """The smallest share of a CPU that a group of the hog may use; None: no limit."""
    shares = []
    for group in scene.hog_groups:
        if scene.version == 1:
            quota, period = (group.read("cpu", f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        else:
            quota, period = group.read("cpu", "cpu.max").split()
        if quota not in {"-1", "max"}:
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def _throttled(scene: _Scene) -> int:
    """The periods in which the hog's groups were stopped."""
    texts = (line.split() for group in scene.hog_groups for line in lines_of(group.read("cpu", "cpu.stat")))
    return sum(int(fields[1]) for fields in texts if fields[0] == "nr_throttled")


def _idle_cpu() -> int:
    """The CPU with the most idle time of a moment. Errors: `BusyError` if none is idle for a while."""
    allowed = os.sched_getaffinity(0)
    idle, cpu = 0.0, 0
    for _ in range(_TRIES):
        before = _ticks()
        time.sleep(_IDLE_S)
        shares = idle_shares(before, _ticks())
        idle, cpu = max(((share, cpu) for cpu, share in shares.items() if cpu in allowed), default=(0.0, 0))
        if idle >= 1 - _BUSY:
            return cpu
    busy = fmt.percent(100 * (1 - idle))
    raise BusyError(f"every CPU was busy with other work: the idlest, CPU {cpu}, for {busy} of the time")


def _ticks() -> dict[int, CpuTicks]:
    with open("/proc/stat", encoding="ascii", errors="replace", newline="\n") as file:
        return parse_stat(file.read())


# The child: the daemon's parts on the trial's node


def configuration(private: str) -> dict[str, object]:
    """The trial's configuration: the shipped rule on shorter windows, one response, one sink, and no policy beside."""
    rule = {
        "dry_run": False,
        "when": [[{"run_queue": {"window_s": 0.5, "windows": 3, "bad": 2}}]],
        "responses": ["squeeze"],
    }
    off = {"enabled": False}
    return {
        "mode": "enforce",
        "operator_file": None,
        "node": {"name": "bypassd-prove", "cgroup_root": f"/{PREFIX}{CHAIN}", "sample_s": 0.2, "resync_s": 1},
        "kubelet": off,
        "runtime": {"cri": "off"},
        "apiserver": off,
        "store": {"path": f"{private}/state.db"},
        # No listener; the socket's directory also has the file of intended writes.
        "http": {**off, "socket": f"{private}/bypassd.sock"},
        "classes": {
            "overrides": [{"class": "shared", "uid": VICTIM}, {"class": "reclaimed", "uid": HOG}],
        },
        # BE work's own budget must not hold the hog back before the rule does.
        "policies": {
            "reclaimed": {"form": "quota", "budget": {"floor_percent": 100}},
            "idle_buffer": off,
        },
        "interference": {
            "enabled": True,
            "sample_s": 0.2,
            "rules": {"cpu": rule, "memory": off, "cache": off, "io": off},
        },
        "alerts": {"sinks": {"prove": {"batch_delay_s": 0, "file": {"path": f"{private}/{_ALERTS}"}}}},
    }


def _serve(hierarchy: Hierarchy, private: str) -> None:
    """The child's work. It ends by a signal of the parent, or its own failure, which is in its log."""
    log = os.open(f"{private}/{_LOG_FILE}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    # What the daemon's parts print is for the log, not for the terminal.
    for number in (1, 2):
        os.dup2(log, number)
    stream = os.fdopen(log, "w", encoding="utf-8", buffering=1)
    try:
        import trio

        from reconciler.config import load
        from reconciler.runtime.logs import setup

        path = f"{private}/config.yaml"
        with open(path, "w", encoding="utf-8") as file:
            json.dump(configuration(private), file)
        config = load.load(path, required=True).config
        setup(config.log.level, config.log.format, stream=stream)
        trio.run(_run, hierarchy, config, private)
    except BaseException as exc:
        stream.write(f"{type(exc).__name__}: {exc}\n")
        raise


async def _run(hierarchy: Hierarchy, config: "Config", private: str) -> None:
    import trio

    from reconciler.daemon.agent import Agent
    from reconciler.detectors.config import InterferenceConfig
    from reconciler.responses.config import LadderConfig
    from reconciler.runtime.supervisor import Supervisor
    from reconciler.sources.kubelet_config import KubeletConfig
    from reconciler.sources.node import NodeEnvironment
    from reconciler.sources.runtime_roots import RuntimeDirs
    from state.topology_sysfs import read_topology

    # Of this process, which is the trial's alone: no half minute for a past, and its one step is not evaluated.
    InterferenceConfig.settle_s, LadderConfig.effect_s = 0.0, 60.0
    place = NodeEnvironment(
        root="/",
        hierarchy=hierarchy,
        layout=Layout(Driver.CGROUPFS, f"/{PREFIX}{CHAIN}"),
        topology=read_topology("/"),
        # Neither the node's kubelet nor its runtime: no checkpoint and no bundle of theirs is read.
        kubelet=KubeletConfig(root_dir=private, node_name=config.node.name),
        runtime=RuntimeDirs(states=(), bundles=()),
    )
    agent = Agent(config, place)
    # Those that write outside of cgroups have nothing to do here.
    sides = {side.name for side in agent.sides.all}
    supervisor = Supervisor([[part for part in layer if part.name not in sides] for layer in agent.components()])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_report_findings, agent, private)
        await supervisor.run()


async def _report_findings(agent: "Agent", private: str) -> None:
    """Write what the parent cannot read elsewhere: what the rule finds of the victim."""
    import trio

    interfered = False
    while True:
        observer = agent.interference.observer
        judgement = None if observer is None else observer.judgement
        findings = () if judgement is None else judgement.findings
        for finding in (item for item in findings if item.victim == f"pod:{VICTIM}"):
            interfered = interfered or finding.verdict is Verdict.INTERFERED
            report = {
                "interfered": interfered,
                "unknown": finding.verdict is Verdict.UNKNOWN,
                "verdict": f"{finding.verdict}: {'; '.join(finding.evidence)}",
            }
            _write_report(private, report)
        await trio.sleep(_POLL_S)


def _write_report(private: str, report: Mapping[str, object]) -> None:
    path = f"{private}/{_REPORT}"
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(report, file)
    # Whole at each moment: the parent reads it meanwhile.
    os.replace(f"{path}.new", path)
