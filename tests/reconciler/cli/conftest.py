"""One real document, made once; a daemon that shows it; and the program run in this process."""

import marshal
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reconciler.cli.main import main, parser
from reconciler.cli.nodeview import InspectedNode, inspect_node
from reconciler.clients.kube_config import NodeSettings
from reconciler.config.node_settings import KeptObject, KeptSettings, KeptValue, encode_kept
from state.schema import META, NODE_SETTINGS
from state.store import Store, StoreBatch
from tests.fakes.livenode import LiveNode
from tests.reconciler.cli.fakedaemon import FakeDaemon, listening

HELD = "0b0c4fa9-6a5e-4a0f-8fd7-1f8a5b7c3d21"
GROUP = f"/kubepods/burstable/pod{HELD}/{'ab' * 32}"
HOSTILE = (
    *("$(touch owned)", "`touch owned`", "web;touch owned", "web 1", "web\nweb-9", "web$IFS", "web*", "~root"),
    *("web'", 'web"', "web\\x", "web|x", "web&", "{web,x}", "w\x1b[2J", "w\u0435b", "web" * 200),
)
"""Names of pods that a shell would act on."""


class Ran(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def inspected(root: str, config: str | None = None) -> InspectedNode:
    """What commands read of the node below ``root``; with a text as its configuration, which is valid."""
    if config is not None:
        path = Path(root, "etc/bypassd/config.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config)
    node = inspect_node(parser("doctor").parse_args(["doctor", "--root", root]))
    assert config is None or "config" not in node.problems, node.problems["config"]
    return node


def kept_row(values: Mapping[str, str | int], node: str = "n1") -> bytes:
    """The settings that koordinator has of the node, as a daemon keeps them."""
    kept = KeptObject(title=f"NodeSLO {node}", values=tuple(KeptValue(*item) for item in values.items()))
    return encode_kept(KeptSettings(source=NodeSettings.KOORDINATOR, node=node, objects=(kept,)))


def keep_settings(directory: Path, row: bytes) -> None:
    """A state file with them."""
    batch = StoreBatch()
    batch.put(META, NODE_SETTINGS, row)
    with closing(Store(f"{directory}/state.db")) as store:
        store.apply(batch)


@pytest.fixture(autouse=True)
def _short_samples(short_samples: None) -> None:
    """In every test here."""


@pytest.fixture(scope="session")
def _document() -> bytes:
    """Of plain values: hundreds of tests change a copy, which is made from this in a tenth of the time."""
    with tempfile.TemporaryDirectory() as directory:
        return marshal.dumps(LiveNode(Path(directory)).document())


@pytest.fixture
def live(tmp_path: Path) -> LiveNode:
    """The node in memory, with all files on the disk: commands read there."""
    return LiveNode(tmp_path)


@pytest.fixture
def document(_document: bytes) -> dict[str, Any]:
    plain: dict[str, Any] = marshal.loads(_document)
    return plain


@pytest.fixture
def daemon(document: dict[str, Any]) -> Iterator[FakeDaemon]:
    # A unix socket's path has at most 107 bytes; pytest's own directories can be longer.
    with tempfile.TemporaryDirectory() as directory:
        fake = FakeDaemon(document)
        fake.socket = f"{directory}/s"
        with listening(fake, fake.socket):
            yield fake


@pytest.fixture
def named(daemon: FakeDaemon) -> FakeDaemon:
    names = [("shop", "web-0"), ("shop", "web-1"), ("ci", "batch-7"), ("web", "x-0")]
    daemon.document["podnames"] = [
        *({"uid": f"u-{name}", "namespace": space, "name": name} for space, name in names),
        *({"uid": f"u-{number}", "namespace": "shop", "name": name} for number, name in enumerate(HOSTILE)),
        {"uid": HELD, "namespace": "shop", "name": "held-0"},
        {"uid": "u-option", "namespace": "-rf", "name": "-x"},
        {"uid": "u-none", "namespace": None, "name": None},
    ]
    daemon.document["holds"] = [
        {"target": target, "reason": "x", "by": "ana", "until": None}
        for target in ("node", f"pod:{HELD}", f"off:{HELD}", f"file:{GROUP}:cpu.set", "file:/kubepods/a b")
    ]
    daemon.document["pools"] = {"shared": "0-3", "dedicated/u/c": "4", "$(x)": ""}
    return daemon


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``bypassctl`` with these words."""

    def call(*message: str) -> Ran:
        try:
            code = main(message)
        except SystemExit as exc:
            code = int(exc.code or 0)
        result = capsys.readouterr()
        return Ran(code, result.out, result.err)

    return call


@pytest.fixture
def ctl(run: Run, daemon: FakeDaemon) -> Run:
    """The same with the daemon that shows the document."""
    return lambda *message: run(*message, "--socket", daemon.socket)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """For tests that are another user, outside of pytest's own: each start of a pytest closes that one to others."""
    if "nobody" not in request.fixturenames:
        yield request.getfixturevalue("tmp_path")
        return
    with tempfile.TemporaryDirectory(prefix="bypassd-") as path:
        os.chmod(path, 0o755)
        yield Path(path)


@pytest.fixture
def nobody() -> Callable[[], AbstractContextManager[None]]:
    """To be another user for a moment."""
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: needs root, to be another user for a moment")

    @contextmanager
    def being() -> Iterator[None]:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return being
