"""Host workloads in the command line's answers: rows of their own kind, and never a pod's."""

import json
from typing import Any

import pytest

from cgroupfs.cpuset import CpuSet
from reconciler.cli.checks import CheckState
from reconciler.cli.checks.agent import host_workloads
from reconciler.cli.exits import Exit
from reconciler.daemon.views import host_rows
from state.hosts import CountsAs, HostValue, HostWorkload, HostWorkloads
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

VALUES = {
    "cpu.use": 1250.0,
    "cpu.wait": 7.5,
    "cpu.wait_milli": 100.0,
    "cpu.pressure": 3.0,
    "memory.use": float(3 << 30),
    "disk.read": 2048.0,
    "disk.write": 0.0,
}
HOSTS = HostWorkloads(
    at_s=10.0,
    entries={
        "db": HostWorkload(
            name="db",
            counts_as=CountsAs.VICTIM,
            match="unit:db@*",
            groups=tuple(f"/system.slice/db@{number}\x1b[31m.service" for number in range(12)),
            matched=300,
            processes=12,
            cpus=CpuSet.parse("0-7"),
            values={name: HostValue(value) for name, value in VALUES.items()},
            problem="300 groups; 12 of them are read",
        ),
        "builds": HostWorkload(
            name="builds", counts_as=CountsAs.BE, match="user:ci", problem="no such user in /etc/passwd"
        ),
    },
)

ROWS = {"host_workloads": list(host_rows(HOSTS, 12.0))}


@pytest.fixture
def hosts(daemon: FakeDaemon) -> FakeDaemon:
    rows = list(host_rows(HOSTS, 12.0))
    daemon.document["hostlist"] = rows
    daemon.document["agent"]["host_workloads"] = rows
    daemon.document.setdefault("podlist", [])
    daemon.document["podparents"] = []
    return daemon


def test_a_row_has_what_was_read_and_at_most_eight_groups() -> None:
    builds, db = host_rows(HOSTS, 12.0)
    assert (db["use_milli"], db["wait_percent"], db["age_s"], db["cpus"]) == (1250.0, 7.5, 2.0, "0-7")
    assert (len(db["groups"]), db["read"], db["matched"]) == (8, 12, 300)  # type: ignore[arg-type]
    assert (builds["use_milli"], builds["cpus"], builds["problem"]) == (None, None, "no such user in /etc/passwd")


def test_pods_lists_them_as_rows_of_their_own_kind(ctl: Run, hosts: FakeDaemon) -> None:
    ran = ctl("pods", "--interval", "0")
    lines = [line.split() for line in ran.out.splitlines() if "host:" in line]
    assert lines[0][:3] == ["BE", "-", "-"]
    assert lines[1][:4] == ["victim", "0-7", "1.25", "7.5"]
    answer = json.loads(ctl("pods", "--interval", "0", "-o", "json").out)
    assert [row["name"] for row in answer["hosts"]] == ["builds", "db"]
    assert not [pod for pod in answer["pods"] if pod["name"] in {"builds", "db"}]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((), ["builds", "db"]),
        (("d",), ["db"]),
        (("host:b",), ["builds"]),
        (("-n", "x"), []),
        (("--class", "shared"), []),
    ],
)
def test_filters_for_pods_leave_them_out(
    ctl: Run, hosts: FakeDaemon, arguments: tuple[str, ...], names: list[str]
) -> None:
    ran = ctl("pods", "--interval", "0", "-o", "json", *arguments)
    assert [row["name"] for row in json.loads(ran.out)["hosts"]] == names


def test_status_counts_them_and_names_those_that_match_nothing(ctl: Run, hosts: FakeDaemon) -> None:
    (line,) = [line for line in ctl("status").out.splitlines() if line.startswith("host ")]
    assert "2 host workloads: 1 victim, 1 BE" in line
    assert "nothing matches: builds" in line


def finding(victim: str, title: str, suspects: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "rule": "cpu",
        "victim": victim,
        "title": title,
        "verdict": "interfered",
        "for_s": 3.0,
        "resource": "cpu",
        "severity": 2.0,
        "gap": None,
        "evidence": ["waits for a CPU 40 % of the time"],
        "suspects": suspects,
    }


def test_why_has_what_is_read_and_each_verdict_in_which_it_is(ctl: Run, hosts: FakeDaemon) -> None:
    hog = {"uid": "uid-hog", "title": "ci/hog", "score": 0.9, "reason": "used 2.50 CPU"}
    ours = {"uid": "host:db", "title": "host workload db", "score": 0.4, "reason": "used 1.25 CPU"}
    hosts.document["interference"] = {
        "findings": [finding("host:db", "host workload db", [hog]), finding("pod:web", "shop/web", [ours])]
    }
    ran = ctl("why", "host:db")
    assert ran.code == Exit.OK
    for text in (
        "host workload db: unit:db@*, counts as an online victim",
        "bypassd writes nothing to it, and never ends it",
        "12 processes, CPUs 0-7",
        "1.25 CPU, 3 GiB of memory",
        "7.5 % of its time for a CPU",
        "interfered (cpu): waits for a CPU 40 % of the time",
        "suspect ci/hog (0.90): used 2.50 CPU",
        "of shop/web (cpu, 0.40): used 1.25 CPU",
        "and 4 more",
    ):
        assert text in ran.out
    assert "\x1b" not in ran.out


def test_why_takes_the_name_alone_where_no_pod_has_it_and_names_those_that_are_configured(
    ctl: Run, hosts: FakeDaemon
) -> None:
    shown = ctl("why", "builds").out
    assert "host workload builds: user:ci" in shown
    # Of what is not there, only that.
    assert shown.splitlines()[-1] == "! no such user in /etc/passwd"
    ran = ctl("why", "buildsx")
    assert ran.code == Exit.NOT_FOUND
    assert "no pod 'buildsx'" in ran.err
    ran = ctl("why", "host:web")
    assert ran.code == Exit.NOT_FOUND
    assert "no host workload 'web' (host_workloads: builds, db)" in ran.err


@pytest.mark.parametrize(
    ("state", "watched", "expected", "text"),
    [
        ({}, True, CheckState.WARN, "nothing is read of them yet"),
        (ROWS, True, CheckState.WARN, "builds (user:ci): no such user"),
        (ROWS, False, CheckState.WARN, "1 victim among them: measured, and not judged"),
        ({"host_workloads": [{"name": "a", "match": "unit:a", "problem": None}]}, False, CheckState.OK, "1 are read"),
    ],
)
def test_doctor_names_the_entries_that_match_nothing(
    state: dict[str, Any], watched: bool, expected: CheckState, text: str
) -> None:
    result = host_workloads(state, watched=watched)
    assert result.state is expected
    assert text in result.found
