import errno
import os
import re
from pathlib import Path

import pytest

from cgroupfs.errors import (
    AgentError,
    CgroupBusyError,
    CgroupDeniedError,
    CgroupError,
    CgroupGoneError,
    CgroupRefusedError,
    InputError,
    SourceError,
    StoreError,
    cgroup_error,
    errno_name,
    translated,
)
from tests.cgroupfs.kernelgroup import kernel_groups


def test_an_input_error_tells_where_what_and_what_was_expected() -> None:
    error = InputError("a.yaml:3:7", "x", "a number")
    assert str(error) == "a.yaml:3:7: 'x': expected a number"
    assert (error.where, error.value, error.expected) == ("a.yaml:3:7", "x", "a number")


def test_a_long_value_is_cut_in_the_message_but_kept_whole() -> None:
    error = InputError("file", "x" * 5000, "less")
    assert len(str(error)) < 160
    assert "..." in str(error)
    assert error.value == "x" * 5000


def test_a_source_error_begins_with_its_source() -> None:
    error = SourceError("kubelet", "no answer")
    assert str(error) == "kubelet: no answer"
    assert error.source == "kubelet"


@pytest.mark.parametrize("kind", [InputError, SourceError, StoreError, CgroupError])
def test_every_error_is_an_agent_error(kind: type[Exception]) -> None:
    assert issubclass(kind, AgentError)


TABLE = [
    (errno.ENOENT, CgroupGoneError),
    (errno.ENODEV, CgroupGoneError),
    (errno.ESRCH, CgroupGoneError),
    (errno.EBUSY, CgroupBusyError),
    (errno.EAGAIN, CgroupBusyError),
    (errno.EPERM, CgroupDeniedError),
    (errno.EROFS, CgroupDeniedError),
    (errno.EINVAL, CgroupRefusedError),
    (errno.ERANGE, CgroupRefusedError),
    (errno.ENOSPC, CgroupRefusedError),
    (errno.EACCES, CgroupRefusedError),
]


@pytest.mark.parametrize(("code", "kind"), TABLE)
def test_each_errno_has_its_place_in_the_tree(code: int, kind: type[CgroupError]) -> None:
    cause = OSError(code, os.strerror(code))
    with pytest.raises(CgroupError) as caught, translated("/group/file", "write '1'"):
        raise cause
    assert type(caught.value) is kind
    assert caught.value.__cause__ is cause
    assert (caught.value.path, caught.value.errno) == ("/group/file", code)
    assert str(caught.value).startswith("/group/file: write '1': ")
    assert errno_name(code) in str(caught.value)


def test_an_error_without_a_number_is_a_refusal() -> None:
    error = cgroup_error("/x", OSError("odd"), "read")
    assert isinstance(error, CgroupRefusedError)
    assert error.errno == 0


@pytest.mark.parametrize(("code", "name"), [(22, "EINVAL"), (0, "0"), (None, "None"), (99999, "99999")])
def test_an_errno_is_shown_by_name_where_it_has_one(code: int | None, name: str) -> None:
    assert errno_name(code) == name


def test_other_exceptions_pass_untouched() -> None:
    with pytest.raises(ZeroDivisionError), translated("/x", "read"):
        _ = 1 / 0


def write(path: str, text: str) -> None:
    with translated(path, f"write {text!r}"):
        number = os.open(path, os.O_WRONLY)
        try:
            os.write(number, text.encode())
        finally:
            os.close(number)


@pytest.mark.kernel
def test_real_refusals_of_this_kernel_land_in_the_right_class() -> None:
    with kernel_groups("errors", "cpuset", "cpu") as (hierarchy, group):
        if hierarchy.version("cpuset") != 1 or hierarchy.version("cpu") != 1:
            pytest.skip("needs the v1 cpuset and cpu controllers on this machine")
        cpuset, cpu = hierarchy.directory("cpuset", group), hierarchy.directory("cpu", group)
        cpus = read_first_cpu(hierarchy.directory("cpuset", "/"))
        os.mkdir(f"{cpuset}/child")
        for file, text, kind, name in (
            (f"{cpuset}/cpuset.cpus", "x", CgroupRefusedError, "EINVAL"),
            (f"{cpuset}/child/cpuset.cpus", cpus, CgroupRefusedError, "EACCES"),
            (f"{cpu}/cpu.cfs_quota_us", "5", CgroupRefusedError, "EINVAL"),
            (f"{cpu}/gone/cpu.cfs_quota_us", "5", CgroupGoneError, "ENOENT"),
            (f"{cpu}/cgroup.procs", "999999999", CgroupGoneError, "ESRCH"),
        ):
            with pytest.raises(kind, match=f"{re.escape(file)}: write .*{name}"):
                write(file, text)
        write(f"{cpuset}/cpuset.cpus", cpus)
        write(f"{cpuset}/child/cpuset.cpus", cpus)
        with pytest.raises(CgroupBusyError, match="EBUSY"):
            write(f"{cpuset}/cpuset.cpus", "\n")


def read_first_cpu(directory: str) -> str:
    return re.split("[-,\n]", Path(directory, "cpuset.cpus").read_text())[0]
