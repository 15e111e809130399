"""Completion of names: which ones, that hostile ones are never expanded, and that nothing can keep the shell."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from reconciler.cli.completion import SECTIONS
from reconciler.daemon import status
from tests.fakes.terminal import PROJECT
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon


def names(ctl: Run, kind: str, prefix: str = "", *words: str) -> list[str]:
    ran = ctl("__complete", kind, prefix, "bypassctl", "why", *words)
    assert (ran.code, ran.err) == (0, "")
    return ran.out.splitlines()


@pytest.mark.usefixtures("named")
def test_names_begin_with_the_word_and_have_harmless_characters(ctl: Run) -> None:
    assert names(ctl, "pods") == ["ci/batch-7", "shop/held-0", "shop/web-0", "shop/web-1", "web/x-0"]
    assert names(ctl, "pods", "web") == ["web-0", "web-1", "web/x-0"]
    assert names(ctl, "pods", "", "-n", "shop") == ["held-0", "web-0", "web-1"]
    assert names(ctl, "pods", "b", "--namespace=ci") == ["batch-7"]
    assert names(ctl, "namespaces") == ["ci", "shop", "web"]
    assert names(ctl, "pools") == ["shared"]
    assert names(ctl, "sections", "hold") == ["holds"]
    assert names(ctl, "held", "pod:we") == ["pod:web-0", "pod:web-1", "pod:web/x-0"]
    assert "knob:cpu.quota" in names(ctl, "held", "knob:cpu.")
    assert names(ctl, "held") == ["knob:", "node", "pod:"]
    assert names(ctl, "other") == []


def test_host_workloads_are_beside_pods_where_both_may_be_named(ctl: Run, named: FakeDaemon) -> None:
    named.document["hostlist"] = [{"name": "db"}, {"name": "a b"}]
    assert names(ctl, "workloads") == [
        "ci/batch-7",
        "host:db",
        "shop/held-0",
        "shop/web-0",
        "shop/web-1",
        "web/x-0",
    ]
    assert names(ctl, "workloads", "host:d") == ["host:db"]
    assert names(ctl, "workloads", "we") == ["web-0", "web-1", "web/x-0"]
    assert names(ctl, "pods", "h") == ["held-0"]


@pytest.mark.usefixtures("named")
def test_holds_are_completed_as_they_are_printed(ctl: Run) -> None:
    assert names(ctl, "holds") == [
        "file:shop/held-0/abababababab:cpu.set",
        "node",
        "off:shop/held-0",
        "pod:shop/held-0",
    ]


def test_the_list_is_bounded(ctl: Run, named: FakeDaemon) -> None:
    named.document["podnames"] = [
        {"uid": str(number), "namespace": "a", "name": f"p{number}"} for number in range(5000)
    ]
    assert len(names(ctl, "pods")) == 500


def test_the_sections_are_the_daemons() -> None:
    assert sorted(SECTIONS) == sorted([*status._SECTIONS, *status._VIEWS])


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n[]", b"HTTP/1.1 200 OK\r\n\r\n{}", b"x" * 99])
def test_a_wrong_answer_is_nothing(ctl: Run, named: FakeDaemon, answer: bytes) -> None:
    named.raw = answer
    for kind in ("pods", "holds", "namespaces", "pools"):
        assert names(ctl, kind) == []


def test_no_daemon_is_nothing(run: Run) -> None:
    assert run("__complete", "pods", "", "--socket", "/nonexistent") == (0, "", "")
    assert run("__complete") == (0, "", "")
    assert run("__complete", "pods") == (0, "", "")


def test_a_daemon_that_does_not_answer_keeps_no_shell(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(f"{tmp_path}/s")
        silent.listen()
        words = ["__complete", "pods", "", "--socket", f"{tmp_path}/s"]
        done = subprocess.run(
            [sys.executable, "-m", "reconciler.cli", *words], check=False, capture_output=True, cwd=PROJECT, timeout=60
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
