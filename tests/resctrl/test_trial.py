"""The trial of a cache share on a model of resctrl: a group with the smallest share, removed afterwards."""

from contextlib import suppress
from pathlib import Path

import pytest

from cgroupfs.errors import CgroupRefusedError
from resctrl.groups import ControlGroups
from resctrl.trial import NAME, CacheTrial, remove_left_groups
from tests.fakes.resctrl_model import ResctrlModel
from tests.fakes.resctrl_shapes import INTEL


def test_the_group_has_the_smallest_share_and_is_removed_after_an_error_too(tmp_path: Path) -> None:
    model = ResctrlModel(INTEL, root=f"{tmp_path}/sys/fs/resctrl")
    model.install(str(tmp_path))
    groups, pid = ControlGroups(model.root, model), model.fake_tasks.spawn()
    with suppress(ZeroDivisionError), CacheTrial(str(tmp_path), model) as trial:
        assert groups.schemata(NAME)["L3"] == {0: 1, 1: 1}
        assert trial.share_bytes == 2 * ((16 << 20) // 12)
        trial.add(pid)
        assert groups.members(NAME) == {pid}
        model.occupancy(groups.path(NAME), 1, 1 << 20)
        assert trial.occupied_bytes() == 1 << 20
        model.answer(groups.path(NAME), 0, "Unavailable")
        with pytest.raises(CgroupRefusedError, match="occupancy is not available"):
            trial.occupied_bytes()
        raise ZeroDivisionError
    assert groups.ours() == []
    groups.create(NAME)
    assert remove_left_groups(str(tmp_path), model) == [NAME]
    assert remove_left_groups(str(tmp_path), model) == []


def test_a_machine_without_resctrl_has_no_trial_and_nothing_left(tmp_path: Path) -> None:
    with pytest.raises(CgroupRefusedError):
        CacheTrial(str(tmp_path))
    assert remove_left_groups(str(tmp_path)) == []
