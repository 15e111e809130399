"""`make run`: the agent against this machine's kubelet; without one, a demo on the embedded node.

    python -m tests.node [--seconds N] [--kubelet none|static-1.22|static-1.21] [--containers auto|containerd|fake]

Exit codes: 0 all went well and everything was put back; 1 something failed (said, and undone); 2 bad usage;
130 stopped with Ctrl-C (everything undone).
"""

import argparse
import fcntl
import os
import sys
from collections.abc import Sequence
from typing import Final

import yaml

from cgroupfs.errors import AgentError
from cgroupfs.hierarchy import Hierarchy
from reconciler.runtime import logs
from reconciler.runtime.log_settings import LogFormat, LogLevel
from tests.e2e.containerd import Unavailable
from tests.e2e.cri import CriError
from tests.e2e.node import LOCK, Node, NodeBusy
from tests.e2e.programs import ProgramError
from tests.fakes.daemonprocess import DaemonFailed
from tests.fakes.kubelet.fake import RuntimeFailed, Version, playing_the_kubelet
from tests.node import report
from tests.node.bypassd import DEMO, BypassdProcess, fake_configuration
from tests.node.containers import ContainerNode
from tests.node.containers import missing as missing_for_containers
from tests.node.demo import Demo, DemoFailed
from tests.node.ending import terminated_like_ctrl_c
from tests.node.inprocess import InProcess
from tests.node.machine import Beside
from tests.node.picture import svg
from tests.node.reaper import watched
from tests.node.screen import Screen, screen_for
from tests.node.scripted import ScriptedNode
from tests.node.selection import Choice, Kind, choose
from tests.node.simulated import CPUS, LABEL, SimulatedStage
from tests.node.values import Values

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
_FAILURES: Final = (
    AgentError,
    DaemonFailed,
    CriError,
    DemoFailed,
    NodeBusy,
    ProgramError,
    RuntimeFailed,
    Unavailable,
    OSError,
    TimeoutError,
)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="make run", description=(__doc__ or "").splitlines()[0])
    top.add_argument("--seconds", type=float, default=60.0, metavar="N", help="measured time of the demo (default 60)")
    top.add_argument(
        "--kubelet",
        type=Version,
        choices=list(Version),
        default=Version.STATIC_122,
        help="what the embedded kubelet writes again, and when (default static-1.22)",
    )
    top.add_argument(
        "--containers",
        choices=("auto", "containerd", "fake"),
        default="auto",
        help="real containers where containerd and runc are installed (auto), required, or own processes",
    )
    top.add_argument("--node", choices=("auto", "embedded", "fake"), default="auto", help="fake: the fake kernel")
    top.add_argument("--config", metavar="FILE", help="the agent's configuration, where a kubelet lives here")
    top.add_argument("--picture", metavar="FILE", help="write the three phases as SVG, too")
    top.add_argument("--plain", action="store_true", help="lines instead of the live table")
    return top


def main(parts: Sequence[str] | None = None) -> int:
    options = parser().parse_args(parts)
    if not 3 <= options.seconds <= 86_400:
        parser().error("--seconds: from 3 to 86400")
    screen = screen_for(plain=options.plain)
    choice = choose()
    if options.node != "auto":
        choice = _asked(choice, options.node)
    screen.say(f"bypassd runs against {choice.kind}: {choice.why}")
    for text in choice.missing:
        screen.say(f"  missing: {text}")
    try:
        with terminated_like_ctrl_c():
            return _run(choice, options, screen)
    except KeyboardInterrupt:
        screen.say("stopped; everything has been undone")
        return EXIT_INTERRUPTED
    except _FAILURES as exc:
        screen.say(f"FAILED: {exc}\neverything has been undone")
        return EXIT_FAILED


def _asked(choice: Choice, text: str) -> Choice:
    if text == "fake":
        return Choice(kind=Kind.FAKE, why="asked for with --node fake", missing=choice.missing)
    if choice.kind is Kind.FAKE:
        raise SystemExit(f"no embedded node here: {'; '.join(choice.missing)}")
    return Choice(kind=Kind.EMBEDDED, why="asked for with --node embedded")


def _run(choice: Choice, options: argparse.Namespace, screen: Screen) -> int:
    if choice.kind is Kind.KUBELET:
        return _on_this_node(options.config, screen)
    if choice.kind is Kind.FAKE:
        return _on_fake_kernel(options, screen)
    return _on_embedded_node(options, screen)


def _on_this_node(config: str | None, screen: Screen) -> int:
    """Become the daemon, in the mode that its configuration says; without one it only observes."""
    text = config or "/etc/bypassd/config.yaml"
    message = f"as {text} says" if os.path.exists(text) else "observing only (mode: observe): nothing is written"
    screen.say(f"the agent runs {message}; stop it with Ctrl-C")
    command = [sys.executable, "-m", "reconciler.daemon.main", "run", *(["--config", config] if config else [])]
    os.execv(sys.executable, command)


def _on_embedded_node(options: argparse.Namespace, screen: Screen) -> int:
    node_type: type[Node] = ScriptedNode
    if options.containers != "fake":
        reason = missing_for_containers()
        if reason is None:
            node_type = ContainerNode
        elif options.containers == "containerd":
            raise Unavailable(reason)
        else:
            screen.say(f"no real containers: {reason}")
    cpus = os.sched_getaffinity(0)
    version: Version = options.kubelet if len(cpus) > 1 else Version.NONE
    reserved = frozenset({min(cpus)})
    # Under policy none a kubelet reserves no CPU by number.
    text = f", CPU {min(cpus)} reserved" if version is not Version.NONE else ""
    screen.say(f"starting: {node_type.kind}, kubelet {version}{text}")
    if _held_by_another_run():
        screen.say(f"waiting: another run uses /kubepods ({LOCK})")
    with (
        playing_the_kubelet(),
        node_type.start(cpu_policy=version.policy, reserved=reserved) as node,
        watched(node.directory),
    ):
        node.kubelet.begin(version)
        facts = f"{node.kind}; kubelet {version}; {len(cpus)} CPUs; protect: {DEMO['protect']}"
        real = node_type is ContainerNode

        def start_agent() -> BypassdProcess:
            agent = BypassdProcess(node, cri_socket=node.containerd.socket if real else None, more=DEMO)
            agent.start()
            try:
                agent.wait_ready()
            except BaseException:
                agent.stop()
                raise
            return agent

        demo = Demo(
            node,
            Values(Hierarchy.detect()),
            screen,
            start_agent=start_agent,
            seconds=options.seconds,
            cpus=len(cpus),
            facts=facts,
            beside_s=Beside(node.cgroups).used_s,
        )
        with screen:
            outcome = demo.run()
        report.show(screen, outcome, label="", node=facts)
        if options.picture is not None:
            with open(options.picture, "w", encoding="utf-8") as file:
                file.write(svg(report.series(outcome)))
            screen.say(f"picture: {options.picture}")
        screen.say("removing pods, groups and processes ...")
    screen.say("everything of the embedded node is removed")
    return 0 if report.good(outcome) else EXIT_FAILED


def _held_by_another_run() -> bool:
    """Only for the words: the node itself takes the lock, and waits for it."""
    with open(LOCK, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _on_fake_kernel(options: argparse.Namespace, screen: Screen) -> int:
    screen.say(f"{LABEL}: the control files are simulated; latency and work are not measured, nothing real is bounded")
    version: Version = options.kubelet
    with SimulatedStage.start(version) as node:
        facts = f"{LABEL}: {node.kind}; kubelet {version}; protect: {DEMO['protect']}"
        file = f"{node.directory}/bypassd.yaml"
        with open(file, "w", encoding="utf-8") as out:
            yaml.safe_dump({**fake_configuration(node.directory), **DEMO}, out)
        logs.setup(LogLevel.ERROR, LogFormat.CONSOLE)

        def start_agent() -> InProcess:
            agent = InProcess(file, node.files)
            try:
                agent.start()
            except BaseException:
                agent.stop()
                raise
            return agent

        demo = Demo(
            node,
            Values(Hierarchy.detect(node.directory), node.files),
            screen,
            start_agent=start_agent,
            seconds=options.seconds,
            cpus=CPUS,
            facts=facts,
            label=LABEL,
            service=False,
        )
        with screen:
            outcome = demo.run()
        report.show(screen, outcome, label=LABEL, node=facts)
    return 0 if report.good(outcome) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
