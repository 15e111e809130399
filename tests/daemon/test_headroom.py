"""What BE may be promised, by a real daemon: in the document, the metric and the file, and over its own death."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.process import Daemon, wait_for
from tests.fakes.node import DirectoryNode

pytestmark = pytest.mark.quiet
Make = Callable[..., Daemon]


def test_headroom_is_reported_everywhere_and_outlives_the_daemon(
    node: DirectoryNode, daemon: Make, tmp_path: Path
) -> None:
    file = tmp_path / "headroom.json"
    # So small a step that no change of the pools can cut the promise.
    steps = {"headroom.min_step_milli": 0, "headroom.max_step_milli": 50}
    quick = {"headroom": {"file": str(file), "window_s": 2.0}, "constants": {**steps, "headroom.report_s": 1.0}}
    node.add("be", shares=102)
    item = daemon(**quick).up()

    def told() -> dict[str, Any]:
        fields: dict[str, Any] = item.state("headroom")["headroom"]
        return fields

    # A machine that others keep busy has nothing to promise for a while.
    wait_for(lambda: told()["milli"] > 0, within_s=240, told=item.tail)
    # From here on it stays as it is, so that all reports of it can be compared.
    item.configure(**{**quick, "constants": {**steps, "headroom.report_s": 3600.0}})
    item.stop()
    item.up()
    promised = told()
    assert promised["milli"] > 0
    assert promised["milli"] == sum(row["milli"] for row in promised["nodes"])
    by_node = {str(row["numa_node"]): row["milli"] for row in promised["nodes"]}
    assert item.metric("bypassd_headroom_cpus") == {name: milli / 1000 for name, milli in by_node.items()}

    def written() -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(file.read_text())
        return fields

    wait_for(lambda: written()["cpu_milli"] == promised["milli"], told=item.tail)
    assert {name: row["cpu_milli"] for name, row in written()["numa_nodes"].items()} == by_node
    # What the keeper has not written when the daemon dies is lost.
    item.stop()
    item.up()
    wait_for(lambda: told()["known_s"] is not None and told()["known_s"] < 1.0, told=item.tail)
    assert told()["milli"] == promised["milli"]
    item.kill()
    item.up()
    assert told()["milli"] == promised["milli"]
