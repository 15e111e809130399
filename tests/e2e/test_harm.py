"""The harm law with real containers: no quota while BE pods yield, and the quota again as soon as they do not."""

from pathlib import Path

import pytest

from tests.e2e.agent import config_for, eventually
from tests.e2e.conftest import PodFactory, StartAgent
from tests.e2e.node import Node
from tests.e2e.pods import best_effort, burstable
from tests.e2e.values import besteffort_quota

pytestmark = [pytest.mark.containerd, pytest.mark.quiet, pytest.mark.core]
UNLIMITED = {"-1", "max"}
FAST = {
    "policies.idle_class.sweep_s": 1,
    **{
        f"policies.reclaimed.budget.harm.{name}": value
        for name, value in {"calm_s": 0.1, "raise_percent": 50, "wait_milli": 64_000}.items()
    },
}
"""Up in a moment, and the load of the tests' machine is no harm."""
LONG_S = 30.0


def policies(*, idle: bool) -> dict[str, object]:
    return {"idle_class": {"enabled": idle, "group": True, "threads": True}}


def test_be_work_has_no_quota_while_it_yields_and_one_as_soon_as_it_does_not(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, tmp_path: Path
) -> None:
    directory = str(tmp_path / "agent")
    daemon = agent(containerd_node, directory=directory, policies=policies(idle=True), constants=FAST)
    run_pod(burstable("web"))
    be = run_pod(best_effort("be", run=("burn", "1")))

    eventually("the harm law is at its top", lambda: besteffort_quota(containerd_node) in UNLIMITED, within_s=LONG_S)
    assert "budget law harm" in daemon.control("why", be.spec.uid).stdout
    daemon.write_config(config_for(containerd_node, directory, policies=policies(idle=False)))
    assert daemon.control("reload").returncode == 0
    eventually("the quota law decides", lambda: besteffort_quota(containerd_node) not in UNLIMITED, within_s=LONG_S)
    assert "budget law quota" in daemon.control("why", be.spec.uid).stdout
