"""The trial of a cache share on a model of resctrl: a group with the smallest share, gone afterwards."""

from contextlib import suppress
from pathlib import Path

import pytest

from cgroupfs.errors import CgroupRefusedError
from resctrl.capability import read_capability
from resctrl.groups import ControlGroups
from resctrl.trial import NAME, CacheTrial, remove_left_groups
from tests.fakes.resctrl_fuse import mounted
from tests.fakes.resctrl_model import ResctrlModel
from tests.fakes.resctrl_shapes import INTEL

MACHINE = (INTEL, (6, 1))


def test_the_group_has_the_smallest_share_and_is_removed_after_an_error_too(tmp_path: Path) -> None:
    with mounted(*MACHINE, tmp_path / "sys/fs/resctrl") as mount:
        ResctrlModel(*MACHINE, root=mount.root).describe(str(tmp_path))
        capability = read_capability(str(tmp_path))
        assert capability.root is not None
        groups = ControlGroups(capability.root)
        cache = next(cache for cache in capability.caches if cache.name == "L3")
        with suppress(ZeroDivisionError), CacheTrial(str(tmp_path)) as trial:
            masks = groups.schemata(NAME)["L3"]
            assert {mask.bit_count() for mask in masks.values()} == {max(1, cache.min_ways)}
            assert trial.share_bytes > 0
            assert trial.occupied_bytes() >= 0
            raise ZeroDivisionError
        assert groups.ours() == []
        groups.create(NAME)
        assert remove_left_groups(str(tmp_path)) == [NAME]
        assert remove_left_groups(str(tmp_path)) == []


def test_a_machine_without_resctrl_has_no_trial_and_nothing_left(tmp_path: Path) -> None:
    with pytest.raises(CgroupRefusedError):
        CacheTrial(str(tmp_path))
    assert remove_left_groups(str(tmp_path)) == []
