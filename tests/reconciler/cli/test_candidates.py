"""Completion of names: which ones, that hostile ones are never expanded, and that nothing can keep the shell."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from reconciler.cli import completion
from reconciler.cli.candidates import SECTIONS
from reconciler.daemon import status
from tests.fakes.terminal import PROJECT
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

UID = "0b0c4fa9-6a5e-4a0f-8fd7-1f8a5b7c3d21"
GROUP = f"/kubepods/burstable/pod{UID}/{'ab' * 32}"
HOSTILE = (
    *("$(touch owned)", "`touch owned`", "web;touch owned", "web 1", "web\nweb-9", "web$IFS", "web*", "~root"),
    *("web'", 'web"', "web\\x", "web|x", "web&", "{web,x}", "w\x1b[2J", "w\u0435b", "web" * 200),
)


@pytest.fixture
def named(daemon: FakeDaemon) -> FakeDaemon:
    names = [("shop", "web-0"), ("shop", "web-1"), ("ci", "batch-7"), ("web", "x-0")]
    daemon.document["podnames"] = [
        *({"uid": f"u-{name}", "namespace": space, "name": name} for space, name in names),
        *({"uid": f"u-{number}", "namespace": "shop", "name": name} for number, name in enumerate(HOSTILE)),
        {"uid": UID, "namespace": "shop", "name": "held-0"},
        {"uid": "u-option", "namespace": "-rf", "name": "-x"},
        {"uid": "u-none", "namespace": None, "name": None},
    ]
    daemon.document["holds"] = [
        {"target": target, "reason": "x", "by": "ana", "until": None}
        for target in ("node", f"pod:{UID}", f"off:{UID}", f"file:{GROUP}:cpu.set", "file:/kubepods/a b")
    ]
    daemon.document["pools"] = {"shared": "0-3", "dedicated/u/c": "4", "$(x)": ""}
    return daemon


def names(run: Run, daemon: FakeDaemon, kind: str, prefix: str = "", *words: str) -> list[str]:
    ran = run("__complete", kind, prefix, "bypassctl", "why", "--socket", daemon.socket, *words)
    assert (ran.code, ran.err) == (0, "")
    return ran.out.splitlines()


def test_names_begin_with_the_word_and_have_harmless_characters(run: Run, named: FakeDaemon) -> None:
    assert names(run, named, "pods") == ["ci/batch-7", "shop/held-0", "shop/web-0", "shop/web-1", "web/x-0"]
    assert names(run, named, "pods", "web") == ["web-0", "web-1", "web/x-0"]
    assert names(run, named, "pods", "", "-n", "shop") == ["held-0", "web-0", "web-1"]
    assert names(run, named, "pods", "b", "--namespace=ci") == ["batch-7"]
    assert names(run, named, "namespaces") == ["ci", "shop", "web"]
    assert names(run, named, "pools") == ["shared"]
    assert names(run, named, "sections", "hold") == ["holds"]
    assert names(run, named, "held", "pod:we") == ["pod:web-0", "pod:web-1", "pod:web/x-0"]
    assert "knob:cpu.quota" in names(run, named, "held", "knob:cpu.")
    assert names(run, named, "held") == ["knob:", "node", "pod:"]
    assert names(run, named, "other") == []


def test_holds_are_completed_as_they_are_printed(run: Run, named: FakeDaemon) -> None:
    assert names(run, named, "holds") == [
        "file:shop/held-0/abababababab:cpu.set",
        "node",
        "off:shop/held-0",
        "pod:shop/held-0",
    ]


def test_the_list_is_bounded(run: Run, named: FakeDaemon) -> None:
    named.document["podnames"] = [
        {"uid": str(number), "namespace": "a", "name": f"p{number}"} for number in range(5000)
    ]
    assert len(names(run, named, "pods")) == 500


def test_the_sections_are_the_daemons() -> None:
    assert sorted(SECTIONS) == sorted([*status._SECTIONS, *status._VIEWS])


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n[]", b"HTTP/1.1 200 OK\r\n\r\n{}", b"x" * 99])
def test_a_wrong_answer_is_nothing(run: Run, named: FakeDaemon, answer: bytes) -> None:
    named.raw = answer
    for kind in ("pods", "holds", "namespaces", "pools"):
        assert names(run, named, kind) == []


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


# The shell itself


def completed(line: str, tmp_path: Path, daemon: FakeDaemon) -> list[str]:
    """What bash puts in the place of the last word."""
    program = tmp_path / "bin/bypassctl"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\ncd {PROJECT} && exec {sys.executable} -m reconciler.cli "$@"\n')
    program.chmod(0o755)
    (tmp_path / "bypassctl").write_text("#!/bin/sh\ntouch owned\n")
    (tmp_path / "bypassctl").chmod(0o755)
    line = line.replace("SOCKET", daemon.socket)
    script = f"""
        source {PROJECT / completion.FILES["bash"]}
        COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
        COMP_LINE={line!r} COMP_POINT={len(line)}
        _bypassctl 2>&1
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{program.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        timeout=60,
    )
    assert not (tmp_path / "owned").exists()
    return [text for text in done.stdout.splitlines() if text and not text.startswith("bash: ")]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("bypassctl why --socket SOCKET sh", ["shop/held-0", "shop/web-0", "shop/web-1"]),
        ("bypassctl why --socket SOCKET -n shop w", ["web-0", "web-1"]),
        ("bypassctl why --socket SOCKET -n ", ["ci", "shop", "web"]),
        ("./bypassctl why --socket SOCKET ci/", ["ci/batch-7"]),
        ("bypassctl hold --socket SOCKET pod:we", ["web-0", "web-1", "web/x-0"]),
        ("bypassctl release --socket SOCKET off:", ["shop/held-0"]),
        ("bypassctl events --socket SOCKET --pod ba", ["batch-7"]),
        ("bypassctl dump --section hol", ["holds"]),
        ("bypassctl config explain node.resync", ["node.resync_s"]),
        ("bypassctl why --socket SOCKET $(touch", []),
        ("bypassctl top --socket SOCKET --pool s", ["shared"]),
    ],
)
def test_bash_completes_names_and_expands_none(tmp_path: Path, named: FakeDaemon, line: str, found: list[str]) -> None:
    assert completed(line, tmp_path, named) == found
