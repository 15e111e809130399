"""SIGKILL between any two steps: every durable alert that was acknowledged is delivered at least once, with one id.

The child sends two alerts as an eviction would: it journals an event, keeps its alert, and only then notes that the
event is acknowledged. It is killed at its Nth step (each write to the store, before and after; each telling, before
and after), for every N. The next run sends again what its journal does not have as acknowledged.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from state.schema import META
from state.store import Store

PROJECT = Path(__file__).parents[3]

CHILD = """
import json, os, signal, sys
import trio
from reconciler.alerts.sinks.journal import JournalSinkConfig
from reconciler.alerts.sinks.table import SinkSection
from reconciler.alerts.alert import Alert, AlertKind
from reconciler.alerts.config import AlertsConfig
from reconciler.alerts.sinks.base import AlertSink, SinkSetup
from reconciler.alerts.dispatcher import AlertDispatcher
from state.store import Store
from tests.reconciler.alerts.durable import keep

directory, kill_at, steps = "", 0, 0

def step(name):
    global steps
    steps += 1
    if steps == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

def append(name, text):
    with open(f"{directory}/{name}", "a") as file:
        file.write(text + "\\n")

class Sink(AlertSink):
    def __init__(self, setup):
        self.name = setup.name
    async def send(self, notices):
        step(f"before {self.name}")
        for one in notices:
            append(f"sink-{self.name}", json.dumps([one.alert.key, one.id]))
        step(f"after {self.name}")

def lines(name):
    try:
        return open(f"{directory}/{name}").read().split()
    except FileNotFoundError:
        return []

async def main():
    store = Store(f"{directory}/state.db", boot="b")
    apply = store.apply
    def stepped(batch):
        step("before a write")
        apply(batch)
        step("after a write")
    store.apply = stepped
    sinks = {name: SinkSection(journal=JournalSinkConfig(), batch_delay_s=0.0) for name in ("a", "b")}
    lane = trio.CapacityLimiter(1)
    teller = AlertDispatcher(AlertsConfig(sinks=sinks), store, lane,
                    lambda name, config: SinkSetup(name=name, config=config, node="n"), build=Sink)
    async with trio.open_nursery() as nursery:
        await nursery.start(teller.run)
        for number in range(2):
            key = f"event-{number}"
            if key in lines("acknowledged"):
                continue
            append("events", key)
            step("event")
            alert = Alert(kind=AlertKind.EVICTION_DONE, key=key, summary=key, at_s=1000.0 + number, durable=True)
            await keep(teller, store, lane, alert)
            append("acknowledged", key)
            step("acknowledged")
        while teller.stored:
            await trio.sleep(0.005)
        nursery.cancel_scope.cancel()
    append("steps", str(steps))
    store.close()

# One interpreter, loaded once: each run is a fork of it.
for line in sys.stdin:
    directory, text = line.rsplit(" ", 1)
    kill_at = int(text)
    child = os.fork()
    if not child:
        trio.run(main)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Run = Callable[[Path, int], int]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run once in this directory, killed at this step (0: not at all); the exit code."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        io, answers = server.stdin, server.stdout

        def ask(directory: Path, kill_at: int) -> int:
            io.write(f"{directory} {kill_at}\n")
            io.flush()
            code = int(answers.readline())
            assert code in {0, -signal.SIGKILL}
            return code

        yield ask
        io.close()


def told(directory: Path, sink: str) -> dict[str, set[str]]:
    texts: dict[str, set[str]] = {}
    for text in (directory / f"sink-{sink}").read_text().splitlines():
        key, name = json.loads(text)
        texts.setdefault(key, set()).add(name)
    return texts


def test_killed_at_any_step_and_started_again_every_alert_reaches_every_sink_under_one_id(
    run: Run, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    assert run(whole, 0) == 0
    steps = int((whole / "steps").read_text())
    assert steps >= 14
    killed = 0
    for at in range(1, steps + 1):
        directory = tmp_path / str(at)
        directory.mkdir()
        # At this step, in full runs twice, and then to the end.
        killed += sum(run(directory, at) != 0 for _ in range(2 if "BYPASSD_FULL" in os.environ else 1))
        run(directory, 0)
        for sink in "ab":
            texts = told(directory, sink)
            assert sorted(texts) == ["event-0", "event-1"], (at, sink)
            assert all(len(names) == 1 for names in texts.values()), (at, sink, texts)
        store = Store(str(directory / "state.db"), boot="b")
        assert [key for key, _ in store.rows(META) if key.startswith("alert:")] == [], at
        store.close()
    # How many writes go together differs from run to run, and so do the steps that there are.
    assert killed >= steps * 2 // 3


def test_an_alert_that_was_not_acknowledged_may_be_lost_only_together_with_its_acknowledgement(
    run: Run, tmp_path: Path
) -> None:
    for at in (1, 2, 3, 4):
        directory = tmp_path / str(at)
        directory.mkdir()
        assert run(directory, at) == -signal.SIGKILL
        store = Store(str(directory / "state.db"), boot="b")
        stored = [key for key, _ in store.rows(META) if key.startswith("alert:")]
        store.close()
        acknowledged = (directory / "acknowledged").exists()
        assert not acknowledged or stored or (directory / "sink-a").exists()
        assert at > 1 or not acknowledged, "killed before anything was kept"
