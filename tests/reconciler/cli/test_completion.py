"""Completion of names: which ones, in the shells, too; that none is executed, and that nothing can keep the shell."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from reconciler.cli import completion
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


BASH = """
source {file}
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
COMP_LINE={line} COMP_POINT={length}
_bypassctl 2>&1
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
FISH = """
source {file}
complete -C {line}
"""
ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
take() {{ local line; while zpty -r shell line; do line="${{line%%[$'\\r\\n']*}}"; [[ $line == $1 ]] && return; done; }}
zpty -w shell "source {setup}"
take 'is ready'
zpty -w -n shell {line}$'\\t'
while zpty -r shell line; do
  line="${{line%%[$'\\r\\n']*}}"
  [[ $line == *'is over' ]] && break
  [[ $line == 'offers '* ]] && print -r -- "${{line#offers }}"
done
zpty -d shell
"""
ZSH_INSIDE = """
PROMPT= RPROMPT= PROMPT2=
stty -echo
unsetopt zle_bracketed_paste
fpath=({directory} $fpath)
autoload -U compinit
compinit -u -D
bindkey '^I' complete-word
compadd() {{
  local -a offered
  builtin compadd -O offered "$@"
  for each in "${{offered[@]}}"; do print -r -- $'\\n'"offers $each"; done
  builtin compadd "$@"
}}
over() {{ print -r -- $'\\n'"is over"; }}
comppostfuncs=(over)
print -r -- $'\\n'"is ready"
"""


def shell_word(line: str) -> str:
    """The line in single quotes; no line of these tests has one."""
    assert "'" not in line
    return f"'{line}'"


def offered(shell: str, line: str, tmp_path: Path, daemon: FakeDaemon) -> list[str]:
    """What a shell offers in the place of the last word."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"NOT RUN: {shell} is not installed; its completion file is untried here")
    fake = tmp_path / "bin/bypassctl"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(f'#!/bin/sh\ncd {PROJECT} && exec {sys.executable} -m reconciler.cli "$@"\n')
    fake.chmod(0o755)
    # In the current directory there is another of this name.
    (tmp_path / "bypassctl").write_text("#!/bin/sh\ntouch owned\n")
    (tmp_path / "bypassctl").chmod(0o755)
    line = line.replace("SOCKET", daemon.socket)
    file = PROJECT / completion.FILES[shell]
    (tmp_path / "setup").write_text(ZSH_INSIDE.format(directory=file.parent))
    template, options = SHELLS[shell]
    script = template.format(file=file, line=shell_word(line), length=len(line), setup=tmp_path / "setup")
    done = subprocess.run(
        [program, *options, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "dumb"},
        timeout=60,
    )
    assert not (tmp_path / "owned").exists()
    lines = (text.partition("\t")[0] for text in done.stdout.splitlines())
    return [text for text in lines if text and not text.startswith("bash: ")]


SHELLS = {"bash": (BASH, ("--norc",)), "fish": (FISH, ("--no-config",)), "zsh": (ZSH, ("-f",))}


@pytest.fixture(params=sorted(SHELLS))
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


LINES = [
    ("bypassctl why --socket SOCKET sh", ["shop/held-0", "shop/web-0", "shop/web-1"]),
    ("bypassctl why --socket SOCKET -n shop w", ["web-0", "web-1"]),
    ("bypassctl why --socket SOCKET -n ", ["ci", "shop", "web"]),
    ("./bypassctl why --socket SOCKET ci/", ["ci/batch-7"]),
    ("bypassctl events --socket SOCKET --pod ba", ["batch-7"]),
    ("bypassctl dump --section hol", ["holds"]),
    ("bypassctl config explain node.resync", ["node.resync_s"]),
    ("bypassctl top --socket SOCKET --pool s", ["shared"]),
]


@pytest.mark.parametrize(("line", "names"), LINES)
def test_a_shell_completes_names_and_expands_none(
    shell: str, tmp_path: Path, named: FakeDaemon, line: str, names: list[str]
) -> None:
    assert offered(shell, line, tmp_path, named) == names


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("bypassctl hold --socket SOCKET pod:we", ["web-0", "web-1", "web/x-0"]),
        ("bypassctl release --socket SOCKET off:", ["shop/held-0"]),
    ],
)
def test_a_word_with_a_colon_is_one_word(
    shell: str, tmp_path: Path, named: FakeDaemon, line: str, names: list[str]
) -> None:
    """Bash divides words at colons: it gets what is behind the last one."""
    before = "" if shell == "bash" else line.rpartition(" ")[2].partition(":")[0] + ":"
    assert offered(shell, line, tmp_path, named) == [before + name for name in names]


@pytest.mark.parametrize("word", ["$(touch owned", "web;touch", "`touch owned"])
def test_what_is_in_the_line_is_not_executed(shell: str, tmp_path: Path, named: FakeDaemon, word: str) -> None:
    """A shell may offer commands and variables of its own there."""
    names = offered(shell, f"bypassctl why --socket SOCKET {word}", tmp_path, named)
    assert not {f"{row['namespace']}/{row['name']}" for row in named.document["podnames"]} & set(names)
    assert not {row["name"] for row in named.document["podnames"]} & set(names)


def test_an_option_and_its_value_in_one_word(tmp_path: Path, named: FakeDaemon) -> None:
    assert offered("fish", "bypassctl events --socket SOCKET --pod=ba", tmp_path, named) == ["--pod=batch-7"]


def test_all_names_that_a_shell_offers_are_harmless(shell: str, tmp_path: Path, named: FakeDaemon) -> None:
    names = offered(shell, "bypassctl why --socket SOCKET ", tmp_path, named)
    assert names == ["ci/batch-7", "shop/held-0", "shop/web-0", "shop/web-1", "web/x-0"]
