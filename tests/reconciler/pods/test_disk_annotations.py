"""A pod's limits for its own disk traffic: what is read of two dialects, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.pods.disk_annotations import BLKIO_LIMIT, BLKIO_QOS, disk_preferences
from state.disk import DiskPreference


def block(**more: Any) -> str:
    return json.dumps({"blocks": [{"name": "/dev/vda", "type": "device"} | more]})


def rows(**lists: Any) -> str:
    return json.dumps(lists)


@pytest.mark.parametrize(
    ("annotations", "limits"),
    [
        ({}, {}),
        (
            {
                BLKIO_LIMIT: rows(
                    device_read_bps=[{"device": "/dev/vda", "value": "1048576"}],
                    device_write_iops=[{"device": "/dev/vda", "value": "20"}],
                )
            },
            {"/dev/vda": {"rbps": 1048576, "wiops": 20}},
        ),
        (
            {BLKIO_QOS: block(ioCfg={"readIOPS": 7, "writeBPS": 9, "ioWeightPercent": 5})},
            {"/dev/vda": {"riops": 7, "wbps": 9}},
        ),
        ({BLKIO_QOS: block(iocfg={"readIOPS": 7})}, {"/dev/vda": {"riops": 7}}),
        ({BLKIO_QOS: block(ioCfg={"readIOPS": 0})}, {}),
        (
            {
                BLKIO_QOS: block(ioCfg={"readIOPS": 7}),
                BLKIO_LIMIT: rows(device_read_iops=[{"device": "/dev/vda", "value": "5"}]),
            },
            {"/dev/vda": {"riops": 5}},
        ),
    ],
)
def test_limits(annotations: dict[str, str], limits: dict[str, dict[str, int]]) -> None:
    wanted = tuple(DiskPreference(disk=disk, limits=row) for disk, row in limits.items())
    assert disk_preferences(annotations) == (wanted, ())


@pytest.mark.parametrize(
    "annotations",
    [
        {BLKIO_LIMIT: "[]"},
        {BLKIO_LIMIT: rows(device_read_bps={})},
        {BLKIO_LIMIT: rows(device_read_bps=[7])},
        {BLKIO_LIMIT: rows(device_read_bps=[{"device": "/dev/vda", "value": 7}])},
        {BLKIO_LIMIT: rows(device_read_bps=[{"device": "/dev/vda", "value": "0"}])},
        {BLKIO_LIMIT: rows(device_read_bps=[{"device": "a\nb", "value": "7"}])},
        {BLKIO_LIMIT: rows(device_read_bps=[{"device": "/dev/vda", "value": "7"}] * 33)},
        {BLKIO_QOS: block(type="podvolume", ioCfg={"readIOPS": 7})},
        {BLKIO_QOS: block(ioCfg=[])},
        {BLKIO_QOS: block(ioCfg=[1])},
        {BLKIO_QOS: block(ioCfg={"readIOPS": -1})},
        {BLKIO_QOS: block(ioCfg={"readIOPS": True})},
        {BLKIO_QOS: block(name="x" * 65, ioCfg={"readIOPS": 7})},
    ],
)
def test_a_broken_value_limits_nothing(annotations: dict[str, str]) -> None:
    preferences, problems = disk_preferences(annotations)
    assert preferences == ()
    assert len(problems) == (annotations.get(BLKIO_QOS) != block(ioCfg=[]))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["device_read_bps", "device_write_iops"]), _JSON), _JSON)
def test_no_text_raises(rubik: dict[str, Any], blocks: Any) -> None:
    disk_preferences({BLKIO_LIMIT: json.dumps(rubik), BLKIO_QOS: json.dumps({"blocks": blocks})})
