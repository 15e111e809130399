import contextlib
import itertools
import operator
import os
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgroupfs.cpuset import EMPTY, LONGEST_LIST, MAX_CPUS, CpuSet
from cgroupfs.files import read_text
from tests.cgroupfs.kernelgroup import kernel_groups
from tests.cputime import least_cpu_s
from tests.examples import examples

numbers = st.frozensets(st.integers(0, 300), max_size=80) | st.frozensets(st.integers(0, MAX_CPUS - 1), max_size=8)
cpusets = numbers.map(CpuSet)


@given(cpusets)
def test_what_is_printed_is_read_back(cpus: CpuSet) -> None:
    assert CpuSet.parse(str(cpus)) == cpus
    assert CpuSet.parse(f" {str(cpus).replace(',', ' ,, ')}\n") == cpus
    assert eval(repr(cpus)) == cpus


@given(numbers)
def test_a_set_holds_its_numbers_in_order(cpus: frozenset[int]) -> None:
    made = CpuSet(cpus)
    assert list(made) == sorted(cpus)
    assert len(made) == len(cpus)
    assert bool(made) == bool(cpus)
    assert CpuSet.from_mask(made.mask) == made
    assert all(cpu in made for cpu in cpus)
    assert all((cpu in made) == (cpu in cpus) for cpu in range(-2, 305))


@given(cpusets)
def test_the_printed_form_is_the_shortest_with_ascending_ranges(cpus: CpuSet) -> None:
    ends = [tuple(map(int, part.split("-"))) for part in str(cpus).split(",") if part]
    assert all(part[0] < part[-1] for part in ends if len(part) == 2)
    # Two ranges that touch would have been one.
    assert all(before[-1] + 1 < after[0] for before, after in itertools.pairwise(ends))


@pytest.mark.parametrize("operation", [operator.or_, operator.and_, operator.sub, operator.xor])
@given(numbers, numbers)
def test_operators_are_those_of_sets(
    operation: Callable[[object, object], object], one: frozenset[int], other: frozenset[int]
) -> None:
    combined = operation(one, other)
    assert isinstance(combined, frozenset)
    assert operation(CpuSet(one), CpuSet(other)) == CpuSet(combined)


@pytest.mark.parametrize("compare", [operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne])
@given(numbers, numbers)
def test_comparison_is_inclusion(
    compare: Callable[[object, object], bool], one: frozenset[int], other: frozenset[int]
) -> None:
    assert compare(CpuSet(one), CpuSet(other)) == compare(one, other)
    assert compare(CpuSet(one), CpuSet(one | other)) == compare(one, one | other)


@given(numbers, st.integers(0, 90))
def test_the_lowest_are_the_first_in_order(cpus: frozenset[int], count: int) -> None:
    assert CpuSet(cpus).lowest(count) == CpuSet(sorted(cpus)[:count])


def test_equal_sets_hash_alike_and_a_set_is_no_number() -> None:
    assert hash(CpuSet([1, 2])) == hash(CpuSet.parse("2,1"))
    assert CpuSet([0]) != 1
    assert {CpuSet.span(2): "x"}[CpuSet.parse("0-1")] == "x"
    assert CpuSet.span(0) == EMPTY
    assert str(EMPTY) == ""


def test_a_set_cannot_be_changed() -> None:
    cpus = CpuSet([1])
    with pytest.raises(AttributeError, match="immutable"):
        cpus.mask = 5


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("", ""),
        ("\n", ""),
        (",", ""),
        ("0,,1", "0-1"),
        (" 0 , 1 ", "0-1"),
        ("3,1,2,1", "1-3"),
        ("00-01", "0-1"),
        ("0-1:1/2", "0"),
        ("0-7:2/4", "0-1,4-5"),
        ("0-6:2/4", "0-1,4-5"),
        ("0-4:2/4", "0-1,4"),
        ("0-3:0/2", ""),
        ("0-8191", "0-8191"),
    ],
)
def test_lists_are_read_as_leniently_as_the_kernel_reads_them(text: str, plain: str) -> None:
    assert str(CpuSet.parse(text)) == plain


REFUSED = [
    *("a", "0-", "-1", "1-0", "0--1", "0x1", "+1", "1.5", "0;1", "0- 1", "0 -1"),
    *("1:1/2", "0-1:1", "0-1:/2", "0-3:3/2"),
]


@pytest.mark.parametrize("text", [*REFUSED, "0-3:1/0", "8192", "0-99999", "0-1,x", "\u0661", "\u00a00"])
def test_what_the_kernel_refuses_is_refused_with_the_culprit(text: str) -> None:
    with pytest.raises(ValueError, match="is not a CPU list"):
        CpuSet.parse(text)


@pytest.mark.parametrize("cpu", [-1, MAX_CPUS])
def test_numbers_beyond_the_limit_are_refused(cpu: int) -> None:
    with pytest.raises(ValueError, match="outside 0-8191"):
        CpuSet([cpu])
    with pytest.raises(ValueError, match="outside 0-8191"):
        CpuSet.from_mask(-1 if cpu < 0 else 1 << cpu)


def written(directory: str, text: str) -> str | None:
    """What the kernel makes of a list: its normal form, or None for a refusal."""
    number = os.open(f"{directory}/cpuset.cpus", os.O_WRONLY)
    try:
        os.write(number, b"\n")
        os.write(number, f"{text}\n".encode())
    except OSError:
        return None
    finally:
        os.close(number)
    return read_text(f"{directory}/cpuset.cpus").strip()


@pytest.mark.kernel
def test_this_kernel_reads_and_prints_lists_the_same_way() -> None:
    possible = CpuSet.parse(read_text("/sys/devices/system/cpu/possible"))
    with kernel_groups("cpuset", "cpuset") as (hierarchy, group):
        directory = hierarchy.directory("cpuset", group)
        allowed = CpuSet.parse(read_text(f"{hierarchy.directory('cpuset', '/')}/cpuset.cpus")) or possible
        for text in REFUSED:
            assert written(directory, text) is None, text

        # Blanks are left out: the kernel also takes them for commas, and ends at a newline, which should not be used.
        @settings(max_examples=examples(400), deadline=None)
        @given(
            st.text("01,-:/", max_size=12) | st.frozensets(st.sampled_from(list(allowed))).map(lambda s: str(CpuSet(s)))
        )
        def agree(text: str) -> None:
            try:
                cpus = CpuSet.parse(text)
            except ValueError:
                assert written(directory, text) is None, text
            else:
                if cpus <= allowed:
                    assert written(directory, text) == str(cpus), text

        agree()
        for text in ("0,,1", " 0 , 1 ", "0-1:1/2"):
            if CpuSet.parse(text) <= allowed:
                assert written(directory, text) == str(CpuSet.parse(text))


def test_the_union_of_sets_is_what_is_in_any_of_them() -> None:
    assert CpuSet.union([CpuSet.parse("0-1"), CpuSet.parse("1,70")]) == CpuSet.parse("0-1,70")
    assert CpuSet.union([]) == CpuSet()


@given(st.integers(0, 40), st.integers(0, 90), st.integers(0, 12), st.integers(1, 12))
def test_a_stride_is_the_first_of_each_group(first: int, length: int, used: int, group: int) -> None:
    used = min(used, group)
    text = f"{first}-{first + length}:{used}/{group}"
    assert CpuSet.parse(text) == CpuSet(first + at for at in range(length + 1) if at % group < used)


@pytest.mark.parametrize(
    "text",
    [
        "0-8191:1/1," * 23_000,
        "0," * 125_000,
        ",".join(["0-8191:1/2"] * 65),
        "0" * 5000,
        "9" * 5000,
        "0-" + "9" * 5000,
        "0-7:1/" + "9" * 5000,
        "x" * 250_000,
    ],
    ids=lambda text: f"{text[:12]}x{len(text)}",
)
def test_a_list_that_no_kernel_takes_is_refused_in_few_words_and_at_once(text: str) -> None:
    with pytest.raises(ValueError, match="is not a CPU list") as refused:
        CpuSet.parse(text)
    assert len(str(refused.value)) < 300

    def parse() -> None:
        with contextlib.suppress(ValueError):
            CpuSet.parse(text)

    assert least_cpu_s(parse, 0.5) < 0.5


def test_the_longest_normal_form_is_taken() -> None:
    cpus = CpuSet(range(0, MAX_CPUS, 2))
    assert CpuSet.parse(str(cpus)) == cpus
    assert len(str(cpus)) < LONGEST_LIST
