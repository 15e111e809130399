"""Core scheduling on a kernel that has it, with real containers: who gets which cookie, and that it has an effect.

Few kernels are built with it (Debian's are not), and few test machines have hyper-threads: tests/vm/cores.sh makes one
that has both.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from reconciler.actuators.core_sched.prctl import RealPrctl, unable
from tests.e2e.agent import Agent, eventually
from tests.e2e.conftest import PodFactory, StartAgent
from tests.e2e.node import Node, Running
from tests.e2e.pods import best_effort, burstable
from tests.e2e.test_hotplug import MAY
from tests.fakes.kubelet.cgroups import read

# Emulated, on one core, with half of it idle now and then: slow.
pytestmark = [pytest.mark.containerd, pytest.mark.core, pytest.mark.timeout(900)]
STATISTICS = "/proc/sys/kernel/sched_schedstats"


@pytest.fixture(autouse=True)
def prctl() -> RealPrctl:
    """This machine's kernel."""
    real_prctl = RealPrctl()
    if why := unable(real_prctl):
        pytest.skip(f"CORE SCHEDULING TEST NOT RUN: {why} (tests/vm/cores.sh)")
    return real_prctl


SOON = {"policies.core_sched.sweep_s": 0.5}


def policies(groups: str = "class", *, enabled: bool = True) -> dict[str, object]:
    """The configuration's section."""
    return {"core_sched": {"enabled": enabled, "groups": groups}}


def cookies(prctl: RealPrctl, container: Running) -> set[int]:
    """The cookies of a container's threads."""
    file = "cgroup.threads" if container.node.cgroups.v2 else "tasks"
    return {prctl.get(int(tid)) for tid in container.read("cpuset", file).split()}


def only(numbers: set[int]) -> int:
    """The one cookie; -1 where threads differ."""
    return next(iter(numbers)) if len(numbers) == 1 else -1


def test_cookies_follow_the_pods_and_outlive_the_agent(
    containerd_node: Node,
    run_pod: PodFactory,
    agent: StartAgent,
    prctl: RealPrctl,
    visitor: subprocess.Popen[bytes],
    tmp_path: Path,
) -> None:
    earlier, web = run_pod(best_effort("earlier")), run_pod(burstable("web"))
    directory = str(tmp_path / "kept")
    daemon = agent(containerd_node, directory=directory, policies=policies(), constants=SOON)
    later = run_pod(best_effort("later"))

    def both() -> tuple[int, int]:
        """BE's cookie and the online pod's."""
        be = {*cookies(prctl, earlier["main"]), *cookies(prctl, later["main"])}
        return only(be), only(cookies(prctl, web["main"]))

    eventually("BE pods share a cookie, online pods have another", lambda: min(both()) > 0 and len(set(both())) == 2)
    before = both()
    assert prctl.get(os.getpid()) == 0
    with open(f"{later['main'].directory('cpuset')}/cgroup.procs", "w", encoding="ascii") as file:
        file.write(str(visitor.pid))
    eventually("what came from outside has it too", lambda: prctl.get(visitor.pid) == before[0])
    shown = daemon.control("why", earlier.spec.uid).stdout
    # "written" up to the sweep after the one that gave it.
    assert re.search(r"core\.cookie reclaimed  (in place|written)", shown), shown
    assert "core_sched: the pod is BE" in shown

    daemon.kill()
    assert both() == before
    again = agent(containerd_node, directory=directory, policies=policies(), constants=SOON)
    another = run_pod(best_effort("another"))
    eventually("the new run goes on with it", lambda: cookies(prctl, another["main"]) == {before[0]})
    assert both() == before
    again.kill()
    # No daemon runs: by the store alone.
    restored = again.control("restore")
    assert restored.returncode == 0, restored.stdout + restored.stderr
    assert "core cookie" in restored.stdout
    assert both() == (0, 0)
    assert prctl.get(visitor.pid) == 0


def test_a_reload_takes_the_cookies_back(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, prctl: RealPrctl
) -> None:
    crunch = run_pod(best_effort("crunch"))
    daemon = agent(containerd_node, policies=policies(), constants=SOON)
    eventually("it has one", lambda: only(cookies(prctl, crunch["main"])) > 0)
    _reconfigure(daemon, containerd_node, policies(enabled=False))
    eventually("it has none", lambda: cookies(prctl, crunch["main"]) == {0})
    _reconfigure(daemon, containerd_node, policies("reclaimed"))
    eventually("it has one again", lambda: only(cookies(prctl, crunch["main"])) > 0)
    assert daemon.stop() == 0
    assert cookies(prctl, crunch["main"]) == {0}, "on_stop: restore"


def _reconfigure(daemon: Agent, node: Node, section: dict[str, object]) -> None:
    from tests.e2e.agent import config_for

    daemon.write_config(config_for(node, daemon.directory, policies=section))
    assert daemon.control("reload").returncode == 0


@pytest.fixture
def idle_time() -> Iterator[None]:
    """The kernel counts how long a thread of a core was left idle; a switch of the whole machine."""
    if os.environ.get(MAY) != "1" or not os.path.exists(STATISTICS):
        pytest.skip(f"FORCED IDLE NOT TESTED: it switches scheduler statistics on for everybody; only with {MAY}=1")
    before = Path(STATISTICS).read_text()
    Path(STATISTICS).write_text("1")
    yield
    Path(STATISTICS).write_text(before)


def forced_idle(container: Running) -> int:
    """Microseconds for which the other thread of the core was left idle, for this container's sake."""
    lines = dict(line.split() for line in container.read("cpu", "cpu.stat").splitlines())
    if "core_sched.force_idle_usec" not in lines:
        pytest.skip("FORCED IDLE NOT TESTED: this kernel's cpu.stat does not tell (cgroup v2, Linux 6.1)")
    return int(lines["core_sched.force_idle_usec"])


@pytest.mark.usefixtures("idle_time")
def test_online_pods_of_different_cookies_never_run_on_one_core(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, prctl: RealPrctl
) -> None:
    siblings = read("/sys/devices/system/cpu/cpu0/topology", "core_cpus_list")
    if siblings != read("/sys/devices/system/cpu", "online"):
        pytest.skip("FORCED IDLE NOT TESTED: only a machine of one core has nowhere else to run them")
    running, other = (run_pod(burstable(name, run=("burn", "1")))["main"] for name in ("one", "other"))

    def idle() -> int:
        return forced_idle(running) + forced_idle(other)

    daemon = agent(containerd_node, policies=policies("class"), constants=SOON)
    eventually("they share a cookie", lambda: only(cookies(prctl, running) | cookies(prctl, other)) > 0)
    _reconfigure(daemon, containerd_node, policies("pod"))
    eventually("each has its own", lambda: len(cookies(prctl, running) | cookies(prctl, other)) == 2)
    begin = idle()
    eventually("half of the core is left idle", lambda: idle() > begin + 500_000, within_s=30)
