"""The planner's input in a recording: exact, read block by block, and absent from older files."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.codecs import DeviceLimits
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import InputError
from reconciler.config.model import Config
from reconciler.config.window_time import WindowConfig
from reconciler.control.inventory import Inventory
from reconciler.interference.nodesteps import NodeStep, NodeStepReader, NodeStepWriter, settings_of
from reconciler.interference.recording import HEAD, LearnedState, RecordingWriter, begin, read
from reconciler.pods.selectors import ClassOverride
from state.cpu import GroupUse
from state.evidence import SampleFrame
from state.model import PodClass
from state.pod_index import FixedTable
from tests.reconciler.interference.nodescript import night, recording, steps, view

KNOBS = st.sampled_from([("/a", "cpu.set"), ("/a", "cpu.quota"), ("/b", "cpu.set"), ("/b", "memory.max")])
VALUES = st.none() | st.integers(-1, 2**62) | st.sets(st.integers(0, 63)).map(CpuSet)
CHANGES = st.lists(
    st.tuples(
        st.dictionaries(KNOBS, VALUES, max_size=4),
        st.dictionaries(st.sampled_from(["/a", "/b"]), st.builds(GroupUse, cpu_milli=st.integers(0, 9)), max_size=2),
        st.booleans(),
        st.none() | st.integers(0, 9000),
    ),
    min_size=1,
    max_size=6,
)


def same(first: NodeStep, second: NodeStep) -> bool:
    """Everything that is recorded of a step."""
    assert first.plan is not None
    assert second.plan is not None
    pools = replace(first.plan.pools, terms=None) == second.plan.pools
    plans = (first.plan.memory, first.plan.starts) == (second.plan.memory, second.plan.starts)
    return first.view == second.view and pools and plans and first.settings == second.settings


def read_steps(data: bytes) -> list[NodeStep]:
    return [item for item in read(io.BytesIO(data), "x.rec") if isinstance(item, NodeStep)]


def test_the_pods_are_one_table_until_one_changes() -> None:
    """What is derived from them is derived once for all plans of a replay in between."""
    tables = [step.view.pods for step in read_steps(recording(list(steps(night(24)))))]
    assert [sorted(table) for table in tables] == [["batch", "web"]] * 20 + [["batch", "other", "web"]] * 4
    assert all(isinstance(table, FixedTable) for table in tables)
    assert len({id(table) for table in tables}) == 2


@given(CHANGES)
def test_what_is_read_is_what_was_written(
    changes: list[tuple[dict[Any, Any], dict[Any, Any], bool, int | None]],
) -> None:
    views = [
        replace(view(second, 1000, 500, more=more), actual=actual, uses=uses, reclaimed_ceiling_milli=ceiling)
        for second, (actual, uses, more, ceiling) in enumerate(changes)
    ]
    written = list(steps(views))
    writer, reader = NodeStepWriter(), NodeStepReader()
    for step, _ in written:
        assert same(step, reader.step(writer.change(step)))


def test_a_recording_has_each_step_before_its_frame_and_every_block_by_itself() -> None:
    written = list(steps(night(70)))
    items = list(read(io.BytesIO(recording(written)), "x.rec"))
    assert [type(item) for item in items[1:5]] == [NodeStep, SampleFrame] * 2
    again = read_steps(recording(written))
    assert len(again) == 70
    assert all(same(step, other) for (step, _), other in zip(written, again, strict=True))
    # Without the first block.
    first, rest = len(recording(written[:30])), recording(written)
    assert same(written[30][0], read_steps(begin(LearnedState()) + rest[first:])[0])


def test_what_did_not_change_is_not_written_again() -> None:
    writer = NodeStepWriter()
    sizes = [len(writer.change(step)) for step, _ in steps([view(0, 1000, 500)] * 3)]
    assert sizes[1] == sizes[2] < sizes[0] / 100


def test_limits_by_disk_are_left_out_of_the_values_read() -> None:
    disk = replace(
        view(0, 1000, 500), actual={("/a", "io.max"): DeviceLimits({"8:0": {"rbps": 1}}), ("/a", "cpu.x"): 1}
    )
    ((step, _),) = steps([disk])
    assert NodeStepReader().step(NodeStepWriter().change(step)).view.actual == {("/a", "cpu.x"): 1}


def test_the_operators_classes_come_back() -> None:
    override = ClassOverride(pod_class=PodClass.SYSTEM, uid="web", origin="file")
    ((step, _),) = steps([view(0, 1000, 500)])
    step = replace(step, settings=replace(step.settings, operator=(override,)))
    assert NodeStepReader().step(NodeStepWriter().change(step)).settings.operator == (override,)


@pytest.mark.parametrize("head", [HEAD, b"bypassd-recording 2\n"])
def test_older_recordings_have_no_steps_and_are_read(head: bytes) -> None:
    frame = SampleFrame(at_s=1.0, wall_s=1.0)
    packer = RecordingWriter()
    packer.add(frame)
    block = packer.block()
    learned = begin(LearnedState())[len(HEAD) :] if head != HEAD else b""
    assert [item for item in read(io.BytesIO(head + learned + block), "x.rec") if item != LearnedState()] == [frame]


def test_settings_that_this_version_does_not_have_are_left_out() -> None:
    """Of a recording that an earlier or a later version has made."""
    ((step, _),) = steps([view(0, 1000, 500)])
    fields, entries, gone = msgspec.msgpack.decode(NodeStepWriter().change(step))
    policies = fields["settings.policies"]
    policies["exclusive"] |= {"remember": 256, "keep_cpus": 3}
    policies["exclusive"]["placement"]["combinations"] = 16
    policies["some_day"] = {"enabled": True}
    read_again = NodeStepReader().step(msgspec.msgpack.encode((fields, entries, gone))).settings.policies
    before = step.settings.policies
    assert read_again == replace(before, exclusive=replace(before.exclusive, keep_cpus=3))


def test_a_field_of_a_newer_version_is_left_out() -> None:
    ((step, _),) = steps([view(0, 1000, 500)])
    fields, entries, gone = msgspec.msgpack.decode(NodeStepWriter().change(step))
    change = msgspec.msgpack.encode((fields | {"view.tides": 7}, entries | {"view.moons": {}}, gone))
    assert same(step, NodeStepReader().step(change))


@pytest.mark.parametrize(
    "change",
    [
        ({}, {}, {}),
        ({"view.topology": {"online": "0-999999999"}}, {}, {}),
        ({"view.topology": {"online": "0-1", "cpus": [{"id": 7, "core": 7}]}}, {}, {}),
        ({}, {"view.actual": {("/a", "cpu.set"): "nonsense"}}, {}),
        ({}, {"view.pods": 3}, {}),
        ({}, {}, {"view.pods": 3}),
        7,
    ],
)
def test_what_no_writer_makes_is_an_input_error(change: object) -> None:
    packer = RecordingWriter()
    packer.add(SampleFrame(at_s=1.0, wall_s=1.0))
    packer._rows[0] = replace(packer._rows[0], step=msgspec.msgpack.encode(change))
    with pytest.raises(InputError, match="frames of version 3"):
        list(read(io.BytesIO(begin(LearnedState()) + packer.block()), "x.rec"))


def test_a_control_planes_settings_are_recorded_and_the_nodes_zone_where_there_are_windows(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/localtime").symlink_to("/usr/share/zoneinfo/Asia/Kathmandu")
    inventory = cast(Inventory, SimpleNamespace(rules=SimpleNamespace(overrides=())))
    without = replace(Config(), node=replace(Config().node, root=str(tmp_path)))
    windows = (WindowConfig(name="office", when="daily 08:00-18:00"),)
    assert settings_of(without, inventory).zone is None
    settings = settings_of(replace(without, windows=windows), inventory, b"a control plane's")
    step = replace(next(iter(steps([view(0, 1500, 500)])))[0], settings=settings)
    recorded = NodeStepReader().step(NodeStepWriter().change(step)).settings
    assert (recorded.zone, recorded.node) == ("Asia/Kathmandu", b"a control plane's")
