"""docs/contributing.md works as printed: its files and lines are put into a copy of the project, its commands are run.

The text is read by its own rules. ``New file `PATH`:``, ``In `PATH`, below `LINE`:`` and ``At the end of `PATH`:`` come
before a block of code. A block of ``sh`` is a command, and a block of ``text`` is in the output of the command before.
"""

import ast
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests import bytecode

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "contributing.md"
TESTS: Final = ".venv/bin/python -m pytest -q "
"""Begins a command of the page that runs tests."""
PACKAGES: Final = ("cgroupfs", "resctrl", "state", "reconciler", "tests", "deploy", "docs")
_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NEW: Final = re.compile(r"New file\s`([^`]+)`:\s*$")
_BELOW: Final = re.compile(r"In\s`([^`]+)`,\sbelow\s`([^`]+)`:\s*$")
_END: Final = re.compile(r"At the end of\s`([^`]+)`:\s*$")


class Step(NamedTuple):
    """A block: ``kind`` is new, below, end, sh or text; ``path`` and ``anchor``: its place."""

    kind: str
    text: str
    path: str = ""
    anchor: str = ""


def steps_of(section: str) -> list[Step]:
    """The blocks of a section in their order. A block of code without a place is an error of the page."""
    steps = []
    for block in _BLOCK.finditer(section):
        language, text, before = block[1], block[2], section[: block.start()]
        if language in {"sh", "text"}:
            steps.append(Step(language, text))
        elif new := _NEW.search(before):
            steps.append(Step("new", text, new[1]))
        elif below := _BELOW.search(before):
            steps.append(Step("below", text, below[1], below[2]))
        elif end := _END.search(before):
            steps.append(Step("end", text, end[1]))
        else:
            raise AssertionError(f"no place is given for this block:\n{text}")
    return steps


SECTIONS: Final[Mapping[str, list[Step]]] = {
    title: steps
    for title, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    if (steps := steps_of(text))
}
POLICY, FILE, DETECTOR, SINK = SECTIONS


def added(title: str) -> tuple[list[str], list[tuple[str, int]]]:
    """What a section adds to the packages, without tests: new files, and (file, lines) of changed ones."""
    steps = [step for step in SECTIONS[title] if step.path.endswith(".py") and not step.path.startswith("tests/")]
    new = [step.path for step in steps if step.kind == "new"]
    return new, [(step.path, len(step.text.splitlines())) for step in steps if step.kind != "new"]


ACT: Final = """
import sys
from contextlib import closing

import trio

from cgroupfs.files import REAL
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.files.node_files import ACTUATOR, NodeFiles
from reconciler.control.planner import plan_node
from reconciler.policies.huge_pages import HugePagesConfig
from reconciler.policies.table import PoliciesConfig
from state.ledger import Ledger
from state.store import Store
from tests.reconciler.actuators.acting import context, undone
from tests.reconciler.nodes import node

DEFRAG = "sys/kernel/mm/transparent_hugepage/defrag"
WORDS = "always defer defer+madvise madvise never"


class Kernel:
    def write(self, directory, file, text):
        assert text in WORDS.split()
        shown = " ".join(f"[{word}]" if word == text else word for word in WORDS.split())
        with open(f"{directory}/{file}", "w") as opened:
            opened.write(shown)

    def __getattr__(self, name):
        return getattr(REAL, name)


root = sys.argv[1]
with closing(Store(f"{root}/state.db", boot="b", version="1", node="n", history_limit=10)) as store:
    ledger = Ledger(store)
    side = NodeFiles(context(ledger, root=root, files=Kernel()))
    view = node()
    plan = plan_node(view, None, PoliciesConfig(huge_pages=HugePagesConfig(enabled=True)))
    side.planned(PlanSnapshot(view=view, plan=plan, enforce=True))
    trio.run(side.sweep)
    status = side.statuses["/"]["thp.defrag"]
    print(status.state, status.actual, open(f"{root}/{DEFRAG}").read())
    print([(row.kind, row.original, row.ours) for row in ledger.of_kind("file")])
    print(*(result.undo for result in undone(ACTUATOR, ledger, root=root, files=Kernel())))
    print(open(f"{root}/{DEFRAG}").read(), len(ledger))
"""
"""Put into the copy and run there: one sweep on a node of files, and a restore."""


class Copy:
    """A copy of the project in which steps are carried out."""

    def __init__(self, root: Path, environment: Mapping[str, str]) -> None:
        self.root = root
        self.environment = environment
        for name in PACKAGES:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, root / name)
        self.output = ""

    def apply(self, step: Step) -> None:
        """Put a block where it belongs."""
        path = self.root / step.path
        if step.kind == "new":
            assert not path.exists(), f"{step.path} is there already"
            path.write_text(step.text)
            return
        old = path.read_text()
        if step.kind == "end":
            path.write_text(old + step.text)
            return
        assert f"{step.anchor}\n" in old, f"{step.path} has no line {step.anchor!r}"
        before, _, after = old.partition(f"{step.anchor}\n")
        path.write_text(f"{before}{step.anchor}\n{step.text}{after}")

    def run(self, command: str) -> str:
        """Run a command of the page; its output. Fails with the output when the command fails."""
        parts = [sys.executable if word == ".venv/bin/python" else word for word in shlex.split(command)]
        done = self.started(parts)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def started(self, parts: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a program in the copy."""
        return subprocess.run(
            parts, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=200, check=False
        )

    def follow(self, *titles: str, commands: bool = True) -> None:
        """Do all that sections say, and compare what they show; without ``commands`` only the files are made."""
        for step in (step for title in titles for step in SECTIONS[title]):
            match step.kind:
                case "sh" if step.text.startswith(TESTS):
                    pass  # below, of all sections at once: to start pytest takes longer than the tests
                case "sh" | "text" if not commands:
                    pass
                case "sh":
                    self.output = self.run(step.text.strip())
                case "text":
                    have = [" ".join(line.split()) for line in self.output.splitlines()]
                    assert [line for line in step.text.splitlines() if " ".join(line.split()) not in have] == []
                case _:
                    self.apply(step)


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Copy]:
    with bytecode.kept_for(tmp_path) as environment:
        yield Copy(tmp_path, environment)


def test_each_addition_is_as_small_as_its_title_promises() -> None:
    new, changed = added(POLICY)
    assert POLICY.endswith("one file, one line")
    assert (len(new), changed) == (1, [("reconciler/policies/table.py", 1)])

    new, changed = added(FILE)
    assert FILE.endswith("one file, one codec, one line")
    assert new == ["reconciler/policies/huge_pages.py"]
    assert {path for path, _ in changed} == {"reconciler/actuators/file_catalog.py", "reconciler/policies/table.py"}
    assert ("reconciler/policies/table.py", 1) in changed

    new, changed = added(DETECTOR)
    assert DETECTOR.endswith("two files, two lines")
    assert len(new) == 2
    assert changed == [("reconciler/signals/catalog.py", 1), ("reconciler/detectors/table.py", 1)]

    new, changed = added(SINK)
    assert SINK.endswith("one file, one line")
    assert (len(new), changed) == (1, [("reconciler/alerts/sinks/table.py", 1)])


def test_every_file_that_the_page_names_exists_or_is_made() -> None:
    made = {step.path for steps in SECTIONS.values() for step in steps}
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE.read_text()))
    assert len(named) > 20
    # The table of libraries names files below its packages.
    tops = (ROOT, ROOT / "reconciler")
    assert [file for file in sorted(named - made) if not any((top / file).exists() for top in tops)] == []


def annotations(function: ast.FunctionDef) -> list[str]:
    """What its parameters are annotated with, but ``self`` and the configuration, which is each policy's own."""
    return [ast.unparse(parameter.annotation) for parameter in function.args.args if parameter.annotation][:-1]


@pytest.mark.parametrize(
    ("title", "name", "protocol"), [(POLICY, "for_pod", "ForPod"), (FILE, "decide_resources", "ResourceAllocator")]
)
def test_a_function_of_a_policy_has_the_parameters_that_it_is_called_with(title: str, name: str, protocol: str) -> None:
    """They are not read in the copy's type check, which takes a minute."""
    policy = next(step for step in SECTIONS[title] if step.kind == "new" and "/policies/" in step.path)
    base = ast.parse((ROOT / "reconciler/policies/base.py").read_text())
    calls = {
        node.name: member
        for node in base.body
        if isinstance(node, ast.ClassDef)
        for member in node.body
        if isinstance(member, ast.FunctionDef) and member.name == "__call__"
    }
    (function,) = [
        node for node in ast.parse(policy.text).body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert annotations(function) == annotations(calls[protocol])


def test_every_parser_of_the_page_is_fed_with_damaged_input() -> None:
    steps = [step for steps in SECTIONS.values() for step in steps if step.path.endswith(".py")]
    parsers = [
        name
        for step in steps
        if not step.path.startswith("tests/")
        for name in re.findall(r"^def ((?:parse|read|decode|load)_\w+)", step.text, re.MULTILINE)
    ]
    fed = "".join(step.text for step in steps if step.path == "tests/damaged/parsers.py")
    assert [name for name in parsers if f":{name}" not in fed] == []
    assert parsers


@pytest.mark.slow
def test_a_policy_on_a_known_file_is_planned(copy: Copy) -> None:
    copy.follow(POLICY)
    assert "default/web" not in "".join(line for line in copy.output.splitlines() if "pids.max" in line)


@pytest.mark.slow
def test_a_policy_on_a_new_file_is_planned_written_and_restored(copy: Copy) -> None:
    copy.follow(POLICY, commands=False)
    copy.follow(FILE)
    # The actuator on a node of files: the policy's value is written, and a restore without a daemon undoes it.
    node = copy.root / "node"
    defrag = node / "sys/kernel/mm/transparent_hugepage/defrag"
    defrag.parent.mkdir(parents=True)
    defrag.write_text("always defer defer+madvise [madvise] never\n")
    (copy.root / "act.py").write_text(ACT)
    done = copy.started([sys.executable, "act.py", str(node)])
    assert done.stdout.splitlines() == [
        "written 2 always [defer] defer+madvise madvise never",
        "[('file', '1', ('2',))]",
        "restored",
        "always defer defer+madvise [madvise] never 0",
    ], done.stderr


@pytest.mark.slow
def test_a_detector_judges_its_new_signal(copy: Copy) -> None:
    copy.follow(DETECTOR)
    code = (
        "import trio; from reconciler.signals.catalog import READERS; from cgroupfs.hierarchy import Hierarchy;"
        "from reconciler.signals.readers import ReaderContext, SampleContext, SampleSheet;"
        "from reconciler.signals.reading import build;"
        "from tests.reconciler.nodes import node;"
        "from state.evidence import NODE;"
        "means = ReaderContext(hierarchy=Hierarchy.detect('/'));"
        "[reader] = build(['load.blocked'], means); sheet = SampleSheet();"
        "view = SampleContext(view=node(), pools=None, wanted=('load.blocked',));"
        "trio.run(reader.read, view, sheet, 0.0);"
        "print(sheet.get(NODE, 'load.blocked') >= 0, reader.problems())"
    )
    done = copy.started([sys.executable, "-c", code])
    assert done.stdout == "True {}\n", done.stderr


@pytest.fixture
def receiver() -> Iterator[tuple[int, list[bytes]]]:
    """A TCP server on this machine that keeps what it gets; its port, and what it got by connection."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(60)
                received.append(b"".join(iter(lambda: connection.recv(65536), b"")))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], received
        thread.join(10)


@pytest.mark.slow
def test_a_sink_delivers_an_alert(copy: Copy, receiver: tuple[int, list[bytes]]) -> None:
    port, received = receiver
    for step in SECTIONS[SINK]:
        if step.path == "sink.yaml":
            copy.apply(step._replace(text=step.text.replace("5170", str(port))))
        elif step.kind == "sh" and not step.text.startswith(TESTS):
            copy.output = copy.run(
                f"{step.text.strip()} --socket /nowhere" if "alert test" in step.text else step.text.strip()
            )
        elif step.kind != "sh":
            copy.apply(step)
    document = json.loads(received[0])
    assert (document["kind"], document["severity"]) == ("test", "info")


@pytest.mark.slow
def test_the_copy_is_clean_and_its_documentation_is_generated(copy: Copy) -> None:
    """After all sections their tests and the style checks pass, and the new settings are in the generated documents."""
    copy.follow(*SECTIONS, commands=False)
    named = [step.text.removeprefix(TESTS) for steps in SECTIONS.values() for step in steps if step.kind == "sh"]
    tests = " ".join(dict.fromkeys(path for text in named if text.startswith("tests/") for path in text.split()))
    copy.run(f"{TESTS}{tests} -p no:cacheprovider -m 'not kernel and not containerd'")
    files = [step.path for steps in SECTIONS.values() for step in steps if step.path.endswith(".py")]
    ruff = Path(sys.executable).with_name("ruff")
    for arguments in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = subprocess.run([ruff, *arguments, *files], cwd=copy.root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    copy.run(".venv/bin/python -m reconciler.config.docs")
    page = (copy.root / "docs" / "config.md").read_text()
    for name in (
        "policies.pids_limit",
        "policies.huge_pages",
        "interference.rules.NAME.when[][].blocked_tasks",
        "alerts.sinks.NAME.tcp",
    ):
        assert f"## `{name}`" in page
    example = Path("deploy", "config.yaml")
    assert (copy.root / example).read_text() == (ROOT / example).read_text(), "it has only what most nodes change"
