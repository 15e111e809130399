"""The command line against the daemon's own web part and document: both sides of the socket are the real ones."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import trio

from reconciler.cli import document
from reconciler.cli.document import DaemonRefused, ask, fetch
from reconciler.cli.exits import Exit
from reconciler.cli.main import main, parser
from reconciler.config.model import HttpSection
from reconciler.web.components import components
from tests.fakes.livenode import BATCH, BOX, PINNED, LiveNode, container_id
from tests.fakes.report import status_report


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The web part answers late on a busy machine; a command would read the kernel instead."""
    monkeypatch.setattr(document, "_CONNECT_S", 60.0)
    for function in (document.exchange, document.ask, document.get, document.send):
        assert function.__kwdefaults__ is not None
        monkeypatch.setitem(function.__kwdefaults__, "timeout_s", 60.0)


async def test_look_hold_release_restore_and_reload(live: LiveNode, capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as directory, live.agent() as agent:
        socket = f"{directory}/s"
        show = status_report(agent)
        await live.look(agent)

        async def run(*message: str) -> tuple[int, str]:
            code = await trio.to_thread.run_sync(main, [*message, "--socket", socket])
            return code, capsys.readouterr().out

        async with trio.open_nursery() as nursery:
            (web,) = components(HttpSection(enabled=False, socket=socket), show, show)
            await nursery.start(web.run)
            assert (await run("status"))[0] == Exit.OK
            assert (await run("diff"))[0] == Exit.OK
            assert (await run("why", "batch-7"))[0] == Exit.OK
            code, out = await run("hold", "pod:batch-7", "--reason", "a test, with ümlaut", "--for", "1h")
            assert (code, list(agent.record.holds.all)) == (Exit.OK, [f"pod:{BATCH}"])
            code, out = await run("holds")
            assert "a test, with ümlaut" in out
            assert (await run("hold", "nonsense", "--reason", "x"))[0] == Exit.USAGE
            assert (await run("release", "pod:batch-7"))[0] == Exit.OK
            assert (await run("release", "pod:batch-7"))[0] == Exit.NOT_FOUND
            assert (await run("reload"))[0] == Exit.OK
            code, out = await run("restore")
            assert code == Exit.OK
            assert "4 files: 4 restored" in out
            assert "in mode observe" in out
            await agent.control.reconciler.reconcile(agent.hub.changed.take_nowait())
            code, out = await run("diff")
            assert code == Exit.NOT_OK
            assert out.count("would write") == 4
            nursery.cancel_scope.cancel()


async def test_every_requested_section_exists(live: LiveNode) -> None:
    with tempfile.TemporaryDirectory() as directory, live.agent() as agent:
        socket = f"{directory}/s"
        show = status_report(agent)
        await live.look(agent)
        async with trio.open_nursery() as nursery:
            (web,) = components(HttpSection(enabled=False, socket=socket), show, show)
            await nursery.start(web.run)
            options = parser("dump").parse_args(["dump", "--socket", socket])
            fetched = await trio.to_thread.run_sync(fetch, options)
            assert fetched.live
            text = (Path(__file__).parents[3] / "docs/state.md").read_text()
            for key in (*fetched.body, *fetched.body["agent"], *fetched.body["budget"], *fetched.body["pods"][0]):
                assert f"`{key}`" in text, key
            with pytest.raises(DaemonRefused, match="section"):
                await trio.to_thread.run_sync(ask, socket, "GET", "/state?section=nonsense")
            nursery.cancel_scope.cancel()
    assert not os.path.exists(socket)


async def test_running_containers_without_a_name_are_managed_and_shown_by_their_id(
    live: LiveNode, capsys: pytest.CaptureFixture[str]
) -> None:
    for uid in live.pods:
        path = Path(f"{live.bundles}/{container_id(uid)}/config.json")
        bundle = json.loads(path.read_text())
        del bundle["annotations"]["io.kubernetes.cri.container-name"]
        path.write_text(json.dumps(bundle))
    box, pinned = container_id(BATCH)[:12], container_id(PINNED)[:12]
    with tempfile.TemporaryDirectory() as directory:
        socket = f"{directory}/s"
        async with live.shown() as (agent, show), trio.open_nursery() as nursery:
            pods = agent.control.inventory.pods.values()
            assert {container.name for pod in pods for container in pod.containers} == {None}
            (web,) = components(HttpSection(enabled=False, socket=socket), show, show)
            await nursery.start(web.run)
            for command, *shown in (
                ("status", "reclaimed 1", "settings written 4", "dedicated cccccccc  7"),
                ("pods", "ci/batch-7", "shop/web-0", "shop/db-0"),
                ("top --once", "ci/batch-7", "shop/db-0"),
                ("why batch-7", f"container {box}", "cpu.set     5-6"),
                ("why db-0", f"container {pinned}"),
                ("diff --all", f"ci/batch-7/{box}"),
                ("dump", f"ci/batch-7/{box}"),
                ("events", "ci/batch-7: cpuset.cpus 0-6 -> 5-6"),
                (f"plan --root {live.root}", f"ci/batch-7/{box}", "dedicated shop/db-0"),
            ):
                words = command.split() + (["--socket", socket] if "--root" not in command else [])
                code = await trio.to_thread.run_sync(main, words)
                out = capsys.readouterr().out
                assert (command, code, [text for text in shown if text not in out]) == (command, Exit.OK, [])
                assert "None" not in out, command
            nursery.cancel_scope.cancel()
    assert live.read(BOX, "cpuset", "cpuset.cpus") == "5-6"
