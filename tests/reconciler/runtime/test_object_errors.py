"""An object's error ends with the object: counted, shown, due again after a growing wait."""

import errno
import time

import pytest

from cgroupfs.errors import CgroupGoneError, SourceError, cgroup_error
from reconciler.runtime.object_errors import ObjectErrors, error_name

POD = "pod:1"


def fail(error: BaseException) -> None:
    raise error


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_wait_doubles_up_to_a_minute_and_begins_anew(clock: list[float]) -> None:
    errors, waits = ObjectErrors(), []
    for _ in range(9):
        with errors.contained(POD):
            fail(SourceError("tree", "EIO"))
        at = errors.next_retry()
        assert at is not None
        assert errors.due(at - 0.001) == []
        waits.append(at - clock[0])
        clock[0] = at
        # Reported once; the next failure sets another time.
        assert (errors.due(at), errors.due(at), errors.next_retry()) == ([POD], [], None)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    errors.passed(POD)
    assert (errors.problems(), errors.failures(POD), errors.next_retry()) == ([], 0, None)
    errors.failed(POD, OSError(errno.EIO, "x"))
    assert errors.next_retry() == clock[0] + 1
    assert errors.counts == {("pod", "SourceError"): 9, ("pod", "EIO"): 1}


def test_failures_before_the_time_has_come_do_not_put_it_off(clock: list[float]) -> None:
    errors = ObjectErrors()
    for _ in range(10):
        errors.failed(POD, OSError(errno.EMFILE, "x"))
        clock[0] += 0.05
    assert errors.next_retry() == 101
    assert errors.failures(POD) == 10


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), MemoryError(), OSError(errno.ENOMEM, "x")])
def test_no_error_leaves_the_block(error: Exception) -> None:
    errors = ObjectErrors()
    with errors.contained(POD):
        fail(error)
    assert errors.failures(POD) == 1
    with errors.contained("pod:2"):
        pass
    assert [*errors] == [POD]


def test_what_ends_a_task_is_no_objects_error() -> None:
    with pytest.raises(KeyboardInterrupt), ObjectErrors().contained(POD):
        fail(KeyboardInterrupt())


def test_errors_of_one_kind_end_with_their_objects() -> None:
    errors = ObjectErrors()
    for key in ("directory:/a", "directory:/b", POD):
        errors.failed(key, SourceError("tree", "EIO"))
    errors.keep("directory", {"directory:/b"})
    assert [*errors] == ["directory:/b", POD]


def test_lines_are_bounded_in_number_and_length() -> None:
    errors = ObjectErrors()
    for number in range(500):
        errors.failed(f"pod:{number}", ValueError("9" * 10_000))
    lines = errors.problems()
    assert len(lines) < 30
    assert max(map(len, lines)) < 400
    assert lines[-1].startswith(str(500 - (len(lines) - 1)))


def test_an_error_is_counted_by_its_number() -> None:
    refused = cgroup_error("/x", OSError(errno.EMFILE, "x"), "read")
    caused = SourceError("tree", "x")
    caused.__cause__ = OSError(errno.EACCES, "x")
    texts = [error_name(error) for error in (refused, caused, CgroupGoneError("/x", "inode"), OSError(errno.EIO, "x"))]
    assert texts == ["EMFILE", "EACCES", "CgroupGoneError", "EIO"]
