"""One slow call at a time in a thread."""

import pytest
import trio

from reconciler.signals.background_job import BackgroundJob


async def test_an_error_of_any_type_is_raised_once_and_the_next_job_can_start() -> None:
    job = BackgroundJob[int]("test")

    def fail() -> int:
        raise ValueError("a name that cannot be encoded")

    assert job.start(fail)
    assert await job.wait_idle(10)
    with pytest.raises(ValueError, match="cannot be encoded"):
        job.take()
    assert job.free
    assert job.start(lambda: 7)
    assert await job.wait_idle(10)
    assert (job.take(), job.take()) == (7, None)


async def test_a_job_at_work_is_not_joined_by_another() -> None:
    job = BackgroundJob[None]("test")
    end = trio.Event()
    token = trio.lowlevel.current_trio_token()
    assert job.start(lambda: trio.from_thread.run(end.wait, trio_token=token))
    assert not job.start(lambda: None)
    assert (job.free, job.take()) == (False, None)
    assert job.busy_s() > 0
    end.set()
    assert await job.wait_idle(10)
    assert not job.free, "its result was not taken"
    assert job.take() is None
    assert job.free
