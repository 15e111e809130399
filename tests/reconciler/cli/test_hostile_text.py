"""What others choose, in every field, through every command and every format: nothing of it reaches a terminal raw.

A command that is new fails here until it has its line in `WORDS`.
"""

import io
import json
import marshal
import os
import re
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from reconciler.cli import recorded
from reconciler.cli.exits import Exit
from reconciler.cli.main import COMMANDS, main
from reconciler.daemon.status import StatusReport
from reconciler.runtime.cooperative import all_steps
from reconciler.runtime.systemd import LoopHeartbeat
from reconciler.telemetry.metrics import PodMetrics
from reconciler.web.answers import FORMATS, Answers
from reconciler.web.limits import HttpCounts
from state.printable import encodable
from tests.fakes import livenode
from tests.fakes.livenode import BATCH, USAGE, WEB, LiveNode
from tests.fakes.report import reloads
from tests.fakes.web import FakePulse
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon
from tests.reconciler.cli.test_alerts import KNOWN, SINK
from tests.reconciler.cli.test_events import event
from tests.reconciler.cli.test_evictions import document as evictions
from tests.reconciler.cli.test_headroom import OWNERS, PROMISED
from tests.reconciler.cli.test_livescreen import CPU
from tests.reconciler.cli.test_pods import row as pod_row
from tests.reconciler.cli.test_report import effect_row
from tests.reconciler.cli.test_simulate import CONFIG, record
from tests.reconciler.cli.test_watched import BLAME, HELD, SQUEEZED, SUFFERS, watched
from tests.reconciler.interference.test_engine import trouble
from tests.reconciler.telemetry.rendered import render

PROJECT = Path(__file__).parents[3]
UTF_8 = (
    "\x1b[31m\x1b]0;own\x07\x1b[2J\x07\x08\r\n<0>forged\t\x7f\x85\x9b31m"
    "\u2028\u2029\u202e\u2066\u200b\ufeff[red][link=x]"
)
HOSTILE = f"{UTF_8}\udc80"
EVENT = event(1)
_SGR = re.compile(r"\x1b\[[0-9;]*m")
OURS = frozenset({"class", "qos", "state", "verdict", "severity", "status", "health", "undo", "mode", "knob", "turn"})
"""Fields whose words are the daemon's own, of a fixed set; others choose none of them."""
_CHOSEN_KEYS = frozenset({"labels", "annotations", "details", "alerts", "resizes", "pools", "reasons"})


def hostile(value: Any, key: str = "") -> Any:
    """The same document with the text in every field that another party can choose."""
    if isinstance(value, str):
        return value if key in OURS or (key == "uid" and value in (BATCH, WEB)) else f"{value}{HOSTILE}"
    if isinstance(value, list):
        return [hostile(item, key) for item in value]
    if isinstance(value, dict):
        extra = {f"key{HOSTILE}": HOSTILE} if key in {"labels", "annotations", "details", "resizes"} else {}
        own = {name: hostile(item, "" if key in _CHOSEN_KEYS else name) for name, item in value.items()}
        return {**own, **extra}
    return value


class Scene(NamedTuple):
    """What the commands need: a daemon, a node, and files that another party has written."""

    daemon: FakeDaemon
    live: LiveNode
    recorded: Path
    path: Path

    def words(self, name: str) -> list[str]:
        """A command with what it needs."""
        return [word.format(**self._places()) for word in WORDS[name]]

    def _places(self) -> dict[str, str]:
        return {
            "socket": self.daemon.socket,
            "root": self.live.root,
            "record": str(self.recorded / "a.rec"),
            "config": str(self.recorded / "simulate.yaml"),
            "own": str(self.path / "own.yaml"),
            "new": str(self.path / f"capture-{os.urandom(4).hex()}"),
            "text": UTF_8,
        }


WORDS: dict[str, list[str]] = {
    "status": ["--socket", "{socket}"],
    "why": [BATCH, "--socket", "{socket}"],
    "pods": ["--interval", "0", "--socket", "{socket}"],
    "top": ["--once", "--interval", "0.1", "--socket", "{socket}"],
    "explain": [BATCH, "--socket", "{socket}"],
    "events": ["--socket", "{socket}"],
    "report": ["--socket", "{socket}", "--gate"],
    "diff": ["--all", "--socket", "{socket}"],
    "dump": ["--socket", "{socket}"],
    "restore": ["--pod", BATCH, "--socket", "{socket}"],
    "thaw": ["--root", "{root}"],
    "off": [BATCH, "--for", "1h", "--reason", "{text}", "--socket", "{socket}"],
    "hold": ["node{text}", "--for", "1h", "--reason", "{text}", "--socket", "{socket}"],
    "release": ["node", "--socket", "{socket}"],
    "holds": ["--socket", "{socket}"],
    "headroom": ["--socket", "{socket}"],
    "owners": ["--socket", "{socket}"],
    "evictions": ["--all", "--socket", "{socket}"],
    "alerts": ["--socket", "{socket}"],
    "alert": ["test", "--socket", "{socket}"],
    "interference": ["--socket", "{socket}"],
    "simulate": ["--record", "{record}", "--config", "{config}"],
    "reload": ["--socket", "{socket}"],
    "protect": ["--config", "{own}"],
    "doctor": ["--root", "{root}"],
    "capture": ["{new}", "--root", "{root}", "--interval", "0"],
    "plan": ["--root", "{root}"],
    "init": ["credentials", "--config", "{own}"],
    "config": ["show", "--config", "{own}"],
}
SILENT = frozenset({"thaw", "report", "headroom", "reload", "protect", "doctor", "capture", "plan", "init", "config"})
"""Commands that may well show nothing of it, as nothing that others choose is among what they show."""


@pytest.fixture(scope="module")
def _root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNode]:
    """A node whose pods, files and store hold it; a killed daemon has left the store."""
    patch = pytest.MonkeyPatch()
    path = tmp_path_factory.mktemp("hostile")
    for uid, names in livenode.NAMES.items():
        patch.setitem(livenode.NAMES, uid, (f"{names[0]}{UTF_8}", f"{names[1]}{UTF_8}"))
    live = LiveNode(path)
    live.put(recorded.USAGE, msgspec.json.encode(USAGE).decode())
    live.put("etc/hostname", UTF_8)
    live.put("var/lib/kubelet/memory_manager_state", f'{{"policyName": "{"x" * 9}{chr(0x9B)}"}}')
    live.put("var/lib/kubelet/kubelet_internal_checkpoint", UTF_8)
    live.put(f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{'e' * 64}/config.json", UTF_8)
    live.document(killed=True)
    yield live
    patch.undo()


@pytest.fixture(scope="module")
def _recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with it, and a configuration to replay it with."""
    path = tmp_path_factory.mktemp("recorded")
    frames = [
        replace(frame, pods={uid: replace(pod, title=f"{pod.title}{UTF_8}") for uid, pod in frame.pods.items()})
        for frame in trouble()
    ]
    record(path / "a.rec", frames)
    (path / "simulate.yaml").write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def _shown(_document: bytes) -> bytes:
    """What the daemon shows, with it in every field."""
    whole: dict[str, Any] = marshal.loads(_document)
    whole["headroom"] = PROMISED
    whole["alerts"] = {"sinks": [SINK], "stored": [KNOWN], "recent": [{**KNOWN, "id": "other"}]}
    whole["owners"] = OWNERS
    whole["podlist"] = [pod_row("web-0", 1.0, 5)]
    whole["cpumap"] = [CPU]
    whole["eviction"] = evictions(cases=True, dry=False)
    whole["interference"] = watched(SUFFERS, replace(SUFFERS, suspects=(BLAME,)), steps=(SQUEEZED, HELD))
    whole["holds"] = [{"target": f"pod:{BATCH}", "reason": "r", "by": "b", "until": None}]
    whole["history"][0] |= {"pod_uid": BATCH, "error": "e", "process": "p", "before": "1", "after": "2"}
    return marshal.dumps(hostile(whole))


@pytest.fixture
def scene(
    daemon: FakeDaemon, _shown: bytes, _root: LiveNode, _recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Scene:
    monkeypatch.setenv("SUDO_USER", UTF_8)
    daemon.document = {**marshal.loads(_shown), "effect": hostile([effect_row(int(time.time()) // 3600)])}
    undone = {"path": "/p", "file": "f", "undo": "restored", "text": "t", "detail": "d"}
    hold = {"target": "node", "reason": "r", "by": "b", "until": 4_000_000_000.0}
    sink = {"sink": "log", "kind": "journal", "ok": True, "detail": "taken", "seconds": 0.001}
    restored = {"files": [undone], "restored": 1, "left": 0, "mode": "observe", "hold": hold}
    daemon.answers = {
        "POST /restore": (200, hostile(restored)),
        "POST /holds": (201, hostile(hold)),
        "POST /off": (200, hostile({**restored, "hold": {**hold, "budget": True}, "kept": hold})),
        "DELETE /holds/node": (200, hostile({"released": "node"})),
        "POST /alerts/test": (200, hostile({"sinks": [sink]})),
        "GET /events": (200, {"run": "r", "next": 1, "missing": 0, "events": [hostile(EVENT)]}),
        "POST /reload": (200, {"mode": f"observe{HOSTILE}", "needs_restart": [f"store.path{HOSTILE}"]}),
    }
    own = {"alerts": {"labels": {"cluster": UTF_8}}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    return Scene(daemon, _root, _recorded, tmp_path)


def check(text: str, *, terminal: bool = False) -> None:
    """Nothing but what can be seen, line ends, and on a terminal our own colours."""
    if terminal:
        text = _SGR.sub("", text.replace("\r\n", "\n"))
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.startswith("<0>")


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Standard output is one, with a reader behind it; call for what it has got, once."""
    master, slave = os.openpty()
    tty.setraw(slave, termios.TCSANOW)
    parts: list[bytes] = []

    def read() -> None:
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:
                return
            if not part:
                return
            parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    out = os.fdopen(slave, "w", encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        patched.setenv("TERM", "xterm-256color")
        patched.setenv("COLUMNS", "200")
        patched.delenv("NO_COLOR", raising=False)

        def got() -> str:
            out.close()
            reader.join()
            return b"".join(parts).decode()

        yield got
    reader.join()
    os.close(master)


def test_every_command_is_tried_here() -> None:
    assert WORDS.keys() == {command.name for command in COMMANDS}


@pytest.mark.parametrize("name", WORDS)
def test_no_command_writes_what_others_have_chosen_as_it_is(scene: Scene, run: Run, name: str) -> None:
    (command,) = (item for item in COMMANDS if item.name == name)
    for form in command.formats:
        parts = [name, *scene.words(name), *(["-o", form] if len(command.formats) > 1 else [])]
        if form == "msgpack":
            continue  # binary: it is no text, and not for terminals
        ran = run(*parts)
        assert ran.code in {Exit.OK, Exit.NOT_OK, Exit.NO_EVIDENCE}, ran.err
        check(ran.out)
        check(ran.err)
        if form == "json":
            for text in ran.out.splitlines() if name == "events" else [ran.out]:
                json.loads(text)
        elif form == "yaml":
            yaml.load(ran.out, Loader=yaml.CSafeLoader)
        elif name not in SILENT:
            assert r"\x1b[31m" in ran.out
            assert "[red][link=x]" in ran.out


@pytest.mark.parametrize("name", WORDS)
def test_nor_on_a_terminal(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with terminal(monkeypatch) as got:
        code = main([name, *scene.words(name)])
        out = got()
    assert code in {Exit.OK, Exit.NOT_OK, Exit.NO_EVIDENCE}
    check(out, terminal=True)
    check(capsys.readouterr().err)
    if name not in SILENT:
        assert r"\x1b[31m" in _SGR.sub("", out)


@pytest.mark.parametrize("name", ["status", "why", "diff", "dump", "holds", "headroom", "alerts", "restore"])
def test_nor_from_the_store_of_a_daemon_that_is_down(scene: Scene, run: Run, name: str) -> None:
    pod = {"why": [BATCH], "restore": ["--pod", "none"]}.get(name, [])
    for form in ("table", "json", "yaml"):
        ran = run(name, *pod, "--root", scene.live.root, "-o", form)
        assert ran.code in {Exit.OK, Exit.NOT_OK, Exit.NOT_FOUND}, ran.err
        check(ran.out)
        check(ran.err)


@pytest.mark.parametrize("name", WORDS)
def test_nor_what_a_command_says_of_a_mistake(scene: Scene, run: Run, name: str) -> None:
    scene.daemon.raw = f"HTTP/1.1 503 x\r\n\r\n{json.dumps({'error': HOSTILE})}".encode()
    for parts in (
        [*scene.words(name)],
        [*scene.words(name), f"--{UTF_8}"],
        [*scene.words(name), UTF_8],
        [*scene.words(name), "--config", UTF_8.replace("\x00", ""), "--socket", UTF_8, "--store", UTF_8],
        [*scene.words(name), "--root", UTF_8],
        ["--output", UTF_8],
    ):
        ran = run(name, *parts)
        check(ran.out)
        check(ran.err)


def test_what_answers_on_the_socket_may_be_anything(scene: Scene, run: Run) -> None:
    for raw in (UTF_8.encode(), b"HTTP/1.1 200 x\r\n\r\n" + UTF_8.encode(), b"HTTP/1.1 200 x\r\n\r\n[]", b"\xff\xfe"):
        scene.daemon.raw = raw
        ran = run("reload", "--socket", scene.daemon.socket)
        check(ran.out)
        check(ran.err)


@pytest.mark.parametrize(
    "command",
    ["config show", "status", "restore", "plan", "plan --machine 4_cores", "alert test"],
)
def test_a_configurations_problems_are_lines_of_their_own(run: Run, tmp_path: Path, command: str) -> None:
    path = tmp_path / "bad.yaml"
    mistakes = {f"key{UTF_8}": UTF_8, "mode": UTF_8, "log": {"level": UTF_8}, "store": {"path": UTF_8}}
    path.write_text(yaml.safe_dump(mistakes))
    words = [word.replace("_", " ") for word in command.split()]
    ran = run(*words, "--config", str(path))
    assert ran.code == Exit.USAGE
    check(ran.err)
    assert len(ran.err.splitlines()) == len(mistakes)
    assert all(line.startswith(f"{path}:") for line in ran.err.splitlines())


def test_msgpack_is_never_written_to_a_terminal(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal(monkeypatch) as got:
        code = main(["dump", "-o", "msgpack", "--socket", scene.daemon.socket])
        out = got()
    assert (code, out) == (Exit.USAGE, "")
    assert "binary" in capsys.readouterr().err


def test_a_mistake_of_ours_is_shown_with_its_traceback_and_nothing_raw() -> None:
    code = f"from reconciler.runtime import streams\nwith streams.prepared():\n    raise KeyError({UTF_8!r})\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, cwd=PROJECT, timeout=60)
    assert done.returncode == 1
    text = done.stderr.decode()
    assert text.startswith("Traceback")
    check(text)


def test_a_long_value_does_not_fill_the_screen_and_is_whole_for_programs(scene: Scene, run: Run) -> None:
    for pod in scene.daemon.document["pods"]:
        pod["annotations"] = {"long": "x" * 250_000, "zz": "last"}
        pod["problems"] = ["y" * 250_000]
    ran = run("why", BATCH, "--socket", scene.daemon.socket)
    assert max(map(len, ran.out.splitlines())) < 10_000
    assert "zz=last" in ran.out
    whole = json.loads(run("why", BATCH, "-o", "json", "--socket", scene.daemon.socket).out)
    assert len(whole["pod"]["annotations"]["long"]) == 250_000


# What the daemon itself answers


async def test_the_daemons_documents_are_safe_to_print(live: LiveNode) -> None:
    pulse: LoopHeartbeat = FakePulse()
    async with live.looked() as agent:
        pods = {
            uid: replace(pod, labels={HOSTILE: HOSTILE}, annotations={HOSTILE: HOSTILE}, name=HOSTILE)
            for uid, pod in agent.control.inventory.pods.items()
        }
        agent.control.inventory.pods.clear()
        agent.control.inventory.pods.update(pods)
        show = StatusReport(agent, pulse, statuses=list, reload=reloads)
        answers = Answers(show, HttpCounts())
        for form in FORMATS.keys() - {"msgpack"}:
            body = (await answers.state(["pods"], form)).decode()
            check(body)
            read = json.loads(body) if form == "json" else yaml.load(body, Loader=yaml.CSafeLoader)
            assert {pod["annotations"][encodable(HOSTILE)] for pod in read["pods"]} == {encodable(HOSTILE)}
        assert await answers.state(["pods"], "msgpack")
        snapshot = all_steps(show.metrics_steps())
    metrics = replace(
        snapshot, pods=(PodMetrics(uid=HOSTILE, namespace=HOSTILE, name=HOSTILE, pod_class=HOSTILE, source=HOSTILE),)
    )
    for accept in ("", "application/openmetrics-text"):
        check(render(metrics, accept)[0].decode())


# Standard output that is full, closed, without a reader, or of an encoding that lacks characters


@pytest.mark.parametrize("name", WORDS)
def test_a_full_disk_is_an_exit_code(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        code = main([name, *scene.words(name)])
        # `give_up` has put another file in its place: the rest can be flushed.
    assert code == (Exit.OUTPUT if name != "thaw" else Exit.OK)
    assert ("ENOSPC" in capsys.readouterr().err) is (code == Exit.OUTPUT)


@pytest.mark.parametrize("name", WORDS)
def test_a_closed_standard_output_is_an_exit_code(scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main([name, *scene.words(name)]) == Exit.OUTPUT


@pytest.mark.parametrize("name", WORDS)
def test_an_encoding_that_lacks_characters_gets_escapes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    scene.daemon.document["problems"] = ["850 µs … ü"]
    raw = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
        assert main([name, *scene.words(name)]) in {Exit.OK, Exit.NOT_OK, Exit.NO_EVIDENCE}
        shown = raw.getvalue().decode("ascii")
    if name == "status":
        assert r"850 \xb5s" in shown


# Each output with a buffer and without one, and each way to print. All are processes that are forked from one which has
# imported the daemon, as that takes longer than the rest of them.
OUTPUTS = [
    ("check-config --config /dev/null", "", ">/dev/full", 6),
    ("check-config --config /dev/null", "1", ">&-", 6),
    ("check-config --config /dev/null", "", "| true", 0),
    ("--help", "1", ">/dev/full", 6),
    ("--help", "", ">&-", 6),
    ("--version", "", ">/dev/full", 6),
    ("--version", "1", "| true", 0),
]
FORKED = """
import gc, io, json, os, sys
import reconciler.daemon.main as daemon
gc.freeze()

def run(words, unbuffered, redirect, error):
    # Standard output as the interpreter makes it of this descriptor.
    if redirect == ">&-":
        os.close(1)
        sys.stdout = None
    else:
        if redirect == "| true":
            reader, writer = os.pipe()
            os.close(reader)
        else:
            writer = os.open("/dev/full", os.O_WRONLY)
        os.dup2(writer, 1)
        raw = open(1, "wb", 0 if unbuffered else -1)
        sys.stdout = io.TextIOWrapper(raw, write_through=bool(unbuffered))
    os.dup2(error, 2)
    sys.exit(daemon.main(words.split()))

for number, (words, unbuffered, redirect, _) in enumerate(json.loads(sys.argv[1])):
    error = os.memfd_create("error")
    if (child := os.fork()) == 0:
        run(words, unbuffered, redirect, error)
    _, status = os.waitpid(child, 0)
    os.lseek(error, 0, os.SEEK_SET)
    print(json.dumps([os.waitstatus_to_exitcode(status), os.read(error, 65536).decode()]), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes() -> list[tuple[int, str]]:
    """How all of them ended, and what they wrote to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, json.dumps(OUTPUTS)], capture_output=True, check=True, cwd=PROJECT, timeout=120
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(OUTPUTS)))
def test_nor_does_the_daemons_own_program(outcomes: list[tuple[int, str]], number: int) -> None:
    code, error = outcomes[number]
    assert (code, error.count("\n")) == (OUTPUTS[number][3], int(OUTPUTS[number][3] != 0)), error


def test_nor_does_the_daemons_own_program_where_the_output_is_closed_before_its_start() -> None:
    """What is opened while it is imported has the number of standard output."""
    words, unbuffered, redirect, code = OUTPUTS[1]
    assert redirect == ">&-"
    script = f"{sys.executable} -m reconciler.daemon.main {words} {redirect}; exit ${{PIPESTATUS[0]}}"
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, cwd=PROJECT, env=environ, timeout=120
    )
    assert (done.returncode, done.stderr.count("\n")) == (code, int(code != 0)), done.stderr


SHELL = [
    ("status >/dev/full", Exit.OUTPUT),
    ("status -o json >/dev/full", Exit.OUTPUT),
    ("--help >/dev/full", Exit.OUTPUT),
    ("--version >&-", Exit.OUTPUT),
    ("holds >&-", Exit.OUTPUT),
    ("dump -o json >&-", Exit.OUTPUT),
    ("dump | true", Exit.OK),
    ("dump -o json | head -c 1 >/dev/null", Exit.OK),
    ("--help | true", Exit.OK),
    ("holds <&- 2>&-", Exit.OK),
    ("release none 2>/dev/full", Exit.NOT_FOUND),
    ("release none >&- 2>&-", Exit.NOT_FOUND),
    ("explode >&- 2>&-", Exit.USAGE),
]


@pytest.mark.parametrize(
    ("line", "code", "unbuffered"),
    [(*entry, "1" if number % 2 else "") for number, entry in enumerate(SHELL)],
)
def test_no_shell_line_ends_in_a_traceback(scene: Scene, line: str, code: Exit, unbuffered: str) -> None:
    name, redirects = re.fullmatch(r"(.*?)( [<>|2].*)", line).groups()  # type: ignore[union-attr]
    options = "" if name.startswith("-") or name == "explode" else f"--socket {scene.daemon.socket}"
    script = f"{sys.executable} -m reconciler.cli.main {name} {options} {redirects}; exit ${{PIPESTATUS[0]}}"
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, cwd=PROJECT, env=environ, timeout=120
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode == code, done.stderr


def test_an_ascii_locale_is_no_traceback(scene: Scene) -> None:
    scene.daemon.document["problems"] = ["850 µs …"]
    environ = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = subprocess.run(
        [sys.executable, "-m", "reconciler.cli.main", "status", "--socket", scene.daemon.socket],
        capture_output=True,
        check=False,
        cwd=PROJECT,
        env=environ,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (Exit.OK, b"")
    assert rb"850 \xb5s" in done.stdout
