import errno

import pytest

from cgroupfs.errors import CgroupBusyError, CgroupDeniedError, CgroupGoneError, CgroupRefusedError, InputError
from resctrl.groups import DEFAULT, ControlGroups, OutOfGroupsError, expel, gather
from tests.resctrl.machines import INTEL
from tests.resctrl.stub import tree


def test_groups_of_others_are_told_apart_by_name() -> None:
    files = tree(other__tasks="7\n8\n", gone__tasks="")
    groups = ControlGroups("/r", files)
    groups.create("bypassd-be")
    assert groups.ours() == ["bypassd-be"]
    assert groups.foreign() == ["gone", "other"]
    files.refuse["read", "/r/gone/tasks"] = errno.ENODEV
    assert groups.of_others() == {7, 8}


@pytest.mark.parametrize("name", ["be", "bypassd-a/b", "bypassd-a\nb", "bypassd-" + "x" * 200, ""])
def test_no_name_but_ours_is_ever_made_or_removed(name: str) -> None:
    files = tree()
    groups = ControlGroups("/r", files)
    with pytest.raises(ValueError, match="not a group name of bypassd"):
        groups.create(name)
    with pytest.raises(ValueError, match="not a group name of bypassd"):
        groups.remove(name)


@pytest.mark.parametrize(
    ("code", "status", "error", "words"),
    [
        (errno.ENOSPC, "ok\nOut of CLOSIDs\n", OutOfGroupsError, "out of CLOSIDs"),
        (errno.ENOSPC, "Out of CLOSIDs\nOut of RMIDs\n", OutOfGroupsError, "out of RMIDs"),
        (errno.EBUSY, "ok\n", CgroupBusyError, "mkdir: EBUSY"),
        (errno.EPERM, "ok\n", CgroupDeniedError, "mkdir: EPERM"),
        (errno.EINVAL, "Bad name\n", CgroupRefusedError, r"mkdir \(Bad name\): EINVAL"),
    ],
)
def test_why_there_is_no_group_is_said(code: int, status: str, error: type[Exception], words: str) -> None:
    files = tree(info__last_cmd_status=status)
    files.refuse["mkdir", "/r/bypassd-be"] = code
    with pytest.raises(error, match=words):
        ControlGroups("/r", files).create("bypassd-be")


def test_making_and_removing_twice_is_no_error() -> None:
    groups = ControlGroups("/r", tree())
    assert [groups.create("bypassd-be"), groups.create("bypassd-be")] == [True, False]
    assert [groups.remove("bypassd-be"), groups.remove("bypassd-be")] == [True, False]


def test_only_what_differs_is_written_in_one_write() -> None:
    files = tree()
    groups = ControlGroups("/r", files)
    wanted = {"L3": {0: 0xF, 1: 0xFFF}, "MB": {0: 100, 1: 50}}
    assert groups.set_schemata(DEFAULT, wanted, INTEL) == {"L3": {0: 0xF}, "MB": {1: 50}}
    assert files.writes == [("/r/schemata", "L3:0=f\nMB:1=50\n")]


def test_what_stands_there_is_not_written_again() -> None:
    files = tree(schemata="MB:0= 60;1= 60\nL3:0=00f;1=00f\n")
    assert ControlGroups("/r", files).set_schemata(DEFAULT, {"MB": {0: 51}, "L3": {1: 15}}, INTEL) == {}
    assert files.writes == []


def test_an_illegal_value_never_reaches_the_kernel() -> None:
    files = tree()
    with pytest.raises(InputError, match="contiguous"):
        ControlGroups("/r", files).set_schemata(DEFAULT, {"L3": {0: 5}}, INTEL)
    assert files.writes == []


def test_a_refusal_carries_the_kernels_own_words() -> None:
    files = tree(info__last_cmd_status="Overlaps with exclusive group\n")
    files.refuse["write", "/r/schemata"] = errno.EINVAL
    with pytest.raises(CgroupRefusedError, match=r"/r/schemata: write 'L3:0=f\\n' \(Overlaps with exclusive group\)"):
        ControlGroups("/r", files).set_schemata(DEFAULT, {"L3": {0: 15}}, INTEL)


def test_a_value_that_does_not_read_back_is_a_refusal() -> None:
    files = tree()

    def other(path: str, text: str) -> None:
        files.texts[path] = "L3:0=ff;1=fff\n"

    files.on_write = other
    with pytest.raises(CgroupRefusedError, match=r"does not hold 'L3:0=f\\n' afterwards"):
        ControlGroups("/r", files).set_schemata(DEFAULT, {"L3": {0: 15}}, INTEL)


def test_threads_that_appear_while_others_move_are_moved_too() -> None:
    files = tree()
    ControlGroups("/r", files).create("bypassd-be")
    alive = {10}

    def fork(path: str, text: str) -> None:
        if len(alive) < 4:
            alive.add(10 + len(alive))

    files.on_write = fork
    done = gather(files, "/r/bypassd-be", lambda: set(alive))
    assert done.complete
    assert done.moved == 4
    assert ControlGroups("/r", files).members("bypassd-be") == {10, 11, 12, 13}


def test_a_fork_bomb_ends_at_the_bounds() -> None:
    files = tree()
    ControlGroups("/r", files).create("bypassd-be")
    alive = {10}
    files.on_write = lambda path, text: alive.update({max(alive) + 1, max(alive) + 2})
    done = gather(files, "/r/bypassd-be", lambda: set(alive), passes=3)
    assert not done.complete
    assert done.moved == len(files.writes)
    before = len(files.writes)
    assert not gather(files, "/r/bypassd-be", lambda: set(alive), most=5).complete
    assert len(files.writes) == before + 5


def test_the_dead_are_fine_and_the_refused_are_counted_and_tried_once() -> None:
    files = tree()
    ControlGroups("/r", files).create("bypassd-be")
    alive = [10, 11, 12]
    files.refuse["write 10", "/r/bypassd-be/tasks"] = errno.ESRCH
    files.refuse["write 11", "/r/bypassd-be/tasks"] = errno.EINVAL
    dying = iter([alive, alive[1:], alive[1:]])
    done = gather(files, "/r/bypassd-be", lambda: next(dying))
    assert (done.moved, done.gone, dict(done.refused), done.complete) == (1, 1, {"EINVAL": 1}, False)


def test_a_group_that_goes_away_meanwhile_says_so() -> None:
    files = tree()
    ControlGroups("/r", files).create("bypassd-be")
    files.refuse["write 10", "/r/bypassd-be/tasks"] = errno.ENODEV
    with pytest.raises(CgroupGoneError):
        gather(files, "/r/bypassd-be", lambda: [10])


def test_who_does_not_belong_goes_home() -> None:
    files = tree()
    groups = ControlGroups("/r", files)
    groups.create("bypassd-be")
    for tid in (10, 11):
        files.write("/r/bypassd-be", "tasks", f"{tid}\n")
    assert expel(files, "/r/bypassd-be", lambda inside: inside - {11, 12}, "/r") == 1
    assert groups.members("bypassd-be") == {11}
    assert 10 in groups.members(DEFAULT)
