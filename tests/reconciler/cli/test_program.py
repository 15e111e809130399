"""The program itself: what it imports, how it fails, its screens, and what it says of itself."""

import errno
import grp
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import shtab
import trio

from reconciler import __version__
from reconciler.cli import completion, document, exits, places, screen
from reconciler.cli.asking import QueryResults, _ask_daemon
from reconciler.cli.exits import Exit
from reconciler.cli.main import COMMANDS, main, parser
from reconciler.cli.nodeview import InspectedNode
from reconciler.cli.screen import Line, StyledText, Table
from reconciler.config import load
from reconciler.config.model import Config
from reconciler.settings.binder import ConfigError
from state.schema import DEFAULT_PATH
from tests.fakes.livenode import LiveNode
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

PROJECT = Path(__file__).parents[3]
HEAVY = {
    "http",
    "trio",
    "httpx2",
    "httpcore2",
    "msgspec",
    "ssl",
    "email",
    "asyncio",
    "grpc",
    "starlette",
    "yaml",
    "dataclasses",
}


UNUSED_BY_CONFIG = {
    *("yaml", "logging", "secrets", "_hashlib", "shutil", "reconciler.detectors.rule"),
}
"""Libraries that cost `config show` milliseconds, and the detectors' rules, of which only kind and names are shown."""
OWN = ("cgroupfs", "reconciler", "resctrl", "state")
MOST_OF_CONFIG = 149
"""Modules of bypassd that ``config`` may import: one more costs each call 0.1 to 0.5 ms."""
MOST_OF_INIT = 197
"""The same for ``init``, which reads the node."""


def imported(*command: str) -> tuple[int, set[str]]:
    """Exit code and modules of one run of the program."""
    code = (
        "import sys\nfrom reconciler.cli.main import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as exc:\n    code = exc.code\n"
        "print('\\n' + ' '.join(sys.modules), file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=False, cwd=PROJECT, timeout=60
    )
    return done.returncode, set(done.stderr.splitlines()[-1].split())


def heavy(*command: str, allowed: frozenset[str] = frozenset()) -> tuple[int, set[str]]:
    """Which of the heavy libraries one run of the program has imported."""
    code, modules = imported(*command)
    return code, {name.partition(".")[0] for name in modules} & (HEAVY - allowed)


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        *((line, "") for line in ("--help", "--version", "dump --root {root}", "holds --root {root}")),
        *((f"{line} --socket {{socket}}", "") for line in ("status", "dump -o json", "diff", "holds", "reload")),
        *((f"__complete {kind}", "") for kind in ("pods", "holds", "namespaces", "pools", "sections", "held")),
        *((f"why batch-7 {place}", "msgspec") for place in ("--root {root}", "--socket {socket}")),
        ("top --once --interval 0.1 --socket {socket}", "msgspec"),
    ],
)
def test_a_command_that_only_shows_imports_nothing_heavy(
    daemon: FakeDaemon, live: LiveNode, command: str, allowed: str
) -> None:
    """``why`` and ``top`` read the kernel's files with the models alone."""
    if "{root}" in command:
        live.document()
    daemon.answers["POST /reload"] = (200, {"mode": "observe", "needs_restart": []})
    counters = {"at_s": 1.0, "cpu_ns": 0, "periods": 1, "throttled_periods": 1}
    parent = {"path": "/kubepods", "quota_milli": 1, "file": None, "counters": counters}
    daemon.document |= {"podlist": [], "cpumap": [], "podparents": [parent]}
    words = command.format(socket=daemon.socket, root=live.root).split()
    words += ["", "--socket", daemon.socket] if words[0] == "__complete" else []
    assert heavy(*words, allowed=frozenset(allowed.split())) == (0, set())


def test_a_setting_is_explained_without_the_readers_of_the_node() -> None:
    code, libraries = heavy("config", "explain", "node.resync_s", allowed=frozenset({"msgspec", "yaml"}))
    assert (code, libraries & {"trio", "grpc", "starlette", "httpx2"}) == (0, set())


@pytest.mark.parametrize("words", [["show"], ["explain"], ["explain", "node.resync_s"], ["show", "-o", "json"]])
def test_the_configuration_is_shown_without_what_it_does_not_use(tmp_path: Path, words: list[str]) -> None:
    code, modules = imported("config", *words, "--root", str(tmp_path))
    assert (code, modules & UNUSED_BY_CONFIG) == (0, set())
    assert len({name for name in modules if name.startswith(OWN)}) <= MOST_OF_CONFIG


def test_init_reads_the_node_without_what_queries_its_programs(live: LiveNode) -> None:
    code, modules = imported("init", "--root", live.root)
    assert (code, modules & {"h2", "httpcore2", "psutil", "sqlite3", "grpc", "reconciler.cli.asking"}) == (0, set())
    assert len({name for name in modules if name.startswith(OWN)}) <= MOST_OF_INIT


def test_no_command_pays_for_the_width_of_its_help() -> None:
    for words in (("--help",), ("hold", "--help"), ("config", "--help")):
        code, modules = imported(*words)
        assert (code, modules & {"shutil", "bz2", "lzma"}) == (0, set()), words


def test_the_usual_places_are_those_of_the_daemon() -> None:
    assert places.DEFAULT_STORE == Config().store.path == DEFAULT_PATH
    assert Config().http.socket == places.DEFAULT_SOCKET
    assert Config().http.reader_socket == places.DEFAULT_READER
    assert places.DEFAULT_CONFIG == load.DEFAULT_PATH


@pytest.mark.parametrize(("path", "error"), [("/dev/zero", "EINVAL"), ("/", "EISDIR")])
@pytest.mark.parametrize("command", ["status", "why x", "holds", "config show"])
def test_a_configuration_that_is_no_file_is_said_and_not_read_without_end(
    run: Run, command: str, path: str, error: str
) -> None:
    ran = run(*command.split(), "--config", path)
    assert (ran.code, ran.out) == (Exit.USAGE, "")
    assert f"{path}: cannot be read: {error}" in ran.err


def test_state_dump_speaks_of_itself(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["--section"], ["-o", "nothing"], ["--nothing"], ["nothing"]):
        code = main(["dump", *words], "state-dump")
        captured = capsys.readouterr()
        text = captured.out + captured.err
        assert code == (Exit.OK if words == ["--help"] else Exit.USAGE)
        assert text.startswith("usage: state-dump [-h] [--section NAME]" if words == ["--help"] else "state-dump: ")
        assert "bypassctl" not in text
    assert main(["--version"], "state-dump") == Exit.OK
    assert capsys.readouterr().out == f"state-dump {__version__}\n"
    assert run("dump", "--help").out.startswith("usage: bypassctl dump [-h] [--section NAME]")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("stat", "bypassctl: no command 'stat', did you mean status? (see bypassctl --help)"),
        ("explode", "bypassctl: no command 'explode' (see bypassctl --help)"),
        ("pods --klass x", "bypassctl pods: no option '--klass', did you mean --class? (see bypassctl pods --help)"),
        ("status --all", "bypassctl status: no option '--all' (see bypassctl status --help)"),
        ("status all", "bypassctl status: unexpected argument 'all' (see bypassctl status --help)"),
        (
            "-o yml status",
            "bypassctl status: argument --output/-o: 'yml', did you mean yaml? (see bypassctl status --help)",
        ),
        (
            "config explian",
            "bypassctl config: argument action: 'explian', did you mean explain? (see bypassctl config --help)",
        ),
        (
            "init x",
            "bypassctl init: argument subject: 'x', expected one of config, credentials (see bypassctl init --help)",
        ),
        ("why", "bypassctl why: the following arguments are required: TARGET (see bypassctl why --help)"),
        ("help stat", "bypassctl: no command 'stat', did you mean status? (see bypassctl --help)"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_the_nearest_name(run: Run, line: str, said: str) -> None:
    ran = run(*line.split())
    assert (ran.code, ran.out, ran.err) == (Exit.USAGE, "", f"{said}\n")


def test_the_commands_are_listed_without_a_command_and_by_help(run: Run) -> None:
    without, by_help = run(), run("help")
    assert (without.code, without.out) == (Exit.USAGE, "")
    assert (by_help.code, by_help.err) == (Exit.OK, "")
    for text in (without.err, by_help.out):
        assert all(f"    {command.name} " in text or f"    {command.name}\n" in text for command in COMMANDS)
    assert run("help", "why") == run("why", "--help")
    assert run("--version").out == f"bypassctl {__version__}\n"


@pytest.mark.parametrize(
    "before", [("-o", "json"), ("-ojson",), ("--output=json", "--store", "/none"), ("--root", "/", "-o", "json")]
)
def test_options_of_a_command_may_precede_it(ctl: Run, daemon: FakeDaemon, before: tuple[str, ...]) -> None:
    after = ctl("holds", *before)
    assert ctl(*before, "holds") == after
    assert json.loads(after.out)["holds"] == daemon.document["holds"]


@pytest.mark.parametrize("parts", [("-o",), ("-o", "json"), ("--for", "1h", "hold"), ("--pods", "x", "plan")])
def test_other_options_in_front_are_usage_errors(run: Run, parts: tuple[str, ...]) -> None:
    assert run(*parts).code == Exit.USAGE


PLACES = [
    "http:\n  socket: /a/b.sock\nstore:\n  path: /c.db # here\n",
    "http:\n    port: 1\n    reader_socket: /r.sock\nnode:\n  root: /\n",
    "# socket: /no\nhttp: {socket: /flow.sock}\n",
    'http:\n  "socket": "/quoted.sock"\n',
    "http:\n  socket: |-\n    /block.sock\n",
    "alerts:\n  sinks:\n    x:\n      file:\n        path: /other\nstore:\n  path: /c.db\n",
]


@pytest.mark.parametrize("text", PLACES)
def test_places_are_found_as_the_configuration_has_them(tmp_path: Path, text: str) -> None:
    """Without its models where the text is plain, and by them where it is not."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    options = Namespace(config=str(path), socket=None, store=None, root="/")
    config = load.load(str(path)).config
    assert places.find(options)[:3] == (config.http.socket, config.store.path, config.http.reader_socket)


def test_later_files_of_places_count_and_a_section_twice_is_the_loaders_error(tmp_path: Path) -> None:
    path, more = tmp_path / "config.yaml", tmp_path / "conf.d/10.yaml"
    path.write_text("http:\n  socket: /a.sock\n")
    more.parent.mkdir()
    more.write_text("http:\n  socket: /b.sock\n")
    options = Namespace(config=str(path), socket=None, store=None, root="/")
    assert places.find(options).socket == "/b.sock"
    more.write_text("http:\n  socket: /b.sock\nhttp:\n  socket: /c.sock\n")
    with pytest.raises(ConfigError):
        places.find(options)


def test_the_manual_has_every_command_and_every_exit_code() -> None:
    text = (PROJECT / "docs/bypassctl.1.md").read_text()
    for command in COMMANDS:
        assert f"### bypassctl {command.name}" in text
    for code in Exit:
        assert f"| {int(code)} |" in text
    assert exits.__doc__ is not None


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_files_are_those_of_this_command_line(shell: str) -> None:
    assert (PROJECT / completion.FILES[shell]).read_text() == completion.completion(shell)
    assert shtab.complete(parser(), shell=shell)


def test_a_configuration_that_names_places_is_obeyed(run: Run, live: LiveNode, tmp_path: Path) -> None:
    live.document()
    config = tmp_path / "config.yaml"
    config.write_text(f"store:\n  path: {live.config.store.path}\nhttp:\n  socket: {tmp_path}/none\n")
    ran = run("holds", "--config", str(config))
    assert ran.code == Exit.OK
    assert f"{tmp_path}/none: daemon not running (no such socket)" in ran.err
    config.write_text("store:\n  path: relative\n")
    assert run("holds", "--config", str(config)).code == Exit.USAGE
    assert run("holds", "--config", str(tmp_path / "missing.yaml")).code == Exit.USAGE


# The client


@pytest.mark.parametrize(
    ("raw", "words_"),
    [
        (b"", "connection closed"),
        (b"SSH-2.0-x\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}", "incomplete"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", "is not from bypassd"),
    ],
)
def test_whatever_answers_badly_is_one_message_and_the_store_is_tried(
    ctl: Run, daemon: FakeDaemon, tmp_path: Path, raw: bytes, words_: str
) -> None:
    daemon.raw = raw
    ran = ctl("status", "--store", str(tmp_path / "state.db"))
    assert ran.code == Exit.UNREACHABLE
    assert words_ in ran.err
    assert ran.err.count("\n") == 1


def test_a_section_that_a_daemon_of_another_version_lacks_is_one_message(
    ctl: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = (400, {"error": "section: 'podparents': expected one of agent, pods"})
    monkeypatch.setattr(daemon, "answer", lambda *_: refused)
    ran = ctl("pods")
    assert (ran.code, ran.err.count("\n")) == (Exit.REFUSED, 1)
    assert f"another version than {__version__}? (systemctl restart bypassd)" in ran.err
    ran = ctl("dump", "--section", "podparents")
    assert ran.code == Exit.USAGE
    assert "expected one of agent, pods" in ran.err


def test_an_error_of_the_daemons_keeps_its_words(daemon: FakeDaemon) -> None:
    daemon.answers["POST /restore"] = (500, {"error": "internal error; see the log"})
    with pytest.raises(document.DaemonRefused, match="internal error; see the log") as caught:
        document.ask(daemon.socket, "POST", "/restore", {})
    assert caught.value.code is Exit.REFUSED
    daemon.answers["POST /restore"] = (503, [])
    with pytest.raises(document.DaemonRefused, match="HTTP 503"):
        document.ask(daemon.socket, "POST", "/restore", {})


def test_a_daemon_that_is_silent_is_given_up(tmp_path: Path) -> None:
    path = f"/tmp/bypassctl-test-{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        try:
            with pytest.raises(document.Unreachable, match="stale socket"):
                document.exchange(path, "GET", "/")
            silent.listen()
            with pytest.raises(document.Unreachable, match="no answer within"):
                document.exchange(path, "GET", "/", timeout_s=0.05)
        finally:
            os.unlink(path)


# Screens


def test_only_the_last_column_is_wrapped() -> None:
    table = Table(("NAME", "N", "WHY"), [("one", "1", "a long reason that goes on and on"), ("three", "22", "b")])
    assert screen.plain([table], 34) == (
        "NAME   N   WHY\none    1   a long reason that goes\n           on and on\nthree  22  b\n"
    )
    assert screen.plain([table]).splitlines()[1] == "one    1   a long reason that goes on and on"


def test_a_long_line_is_wrapped_under_its_indent_and_a_long_word_stays_whole() -> None:
    text = screen.plain([Line(("ab cd ", StyledText("abcdefghij", "bad")), 2)], 8)
    assert text == "  ab cd\n  abcdefghij\n"


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_has_the_same_words_within_the_width(daemon: FakeDaemon, columns: int) -> None:
    master, slave = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "reconciler.cli", "explain", "batch-7", "--socket", daemon.socket]
    with subprocess.Popen(command, stdout=slave, stderr=subprocess.PIPE, env=environ, cwd=PROJECT) as child:
        os.close(slave)
        shown = bytearray()
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
    os.close(master)
    assert child.returncode == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown.decode()).replace("\r\n", "\n").split("\n")
    assert "ci/batch-7: class reclaimed" in lines[0]
    assert max(map(len, lines)) <= columns


def test_a_reader_that_leaves_early_is_no_error(daemon: FakeDaemon) -> None:
    line = f"{sys.executable} -m reconciler.cli dump -o json --socket {daemon.socket} | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, cwd=PROJECT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def denied(monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    """This user may not use these sockets. (The tests may run as root, which no mode keeps out.)"""
    real = socket.socket.connect

    def connect(self: socket.socket, address: str) -> None:
        if address in paths:
            raise PermissionError(errno.EACCES, "Permission denied")
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


def test_readers_use_their_socket_where_roots_is_denied(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"http: {{socket: {tmp_path}/root, reader_group: ops, reader_socket: {daemon.socket}}}\n")
    denied(monkeypatch, f"{tmp_path}/root")
    assert run("holds", "--config", str(config)).code == Exit.OK
    ran = run("reload", "--config", str(config))
    assert (ran.code, "permission denied" in ran.err) == (Exit.UNREACHABLE, True)
    denied(monkeypatch, f"{tmp_path}/root", daemon.socket)
    group = grp.getgrgid(os.stat(daemon.socket).st_gid)
    ran = run("holds", "--config", str(config))
    assert ran.code == Exit.UNREACHABLE
    assert (f"join group {group.gr_name}" in ran.err) == (group.gr_gid != 0)
    assert "permission denied: run with sudo" in ran.err


def test_doctor_knows_a_denied_daemon_from_one_that_is_down(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = SimpleNamespace(socket=daemon.socket)
    denied(monkeypatch, daemon.socket)
    results = QueryResults()
    _ask_daemon(cast("InspectedNode", node), results)
    assert results.daemon_reasons == (f"{daemon.socket}: permission denied: run with sudo",)


def test_an_answer_without_a_field_is_one_line_and_no_traceback(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answers["GET /events"] = (200, {"run": "a", "events": [], "last": 0})
    assert main(["events", "--socket", daemon.socket]) == Exit.REFUSED
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "version" in err


@pytest.mark.parametrize("inside", [True, False])
def test_ctrl_c_ends_a_command_without_a_traceback(run: Run, monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    """Also while it waits for several programs at once: there the exception comes in a group."""

    async def queries() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.lowlevel.checkpoint()
            signal.raise_signal(signal.SIGINT)

    def query(_: object) -> None:
        if inside:
            trio.run(queries)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("reconciler.cli.doctor.query_node", query)
    assert run("doctor") == (130, "", "")
