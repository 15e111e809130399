import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.errors import InputError
from resctrl.capability import Capability
from resctrl.schemata import (
    NO_LIMIT_MBPS,
    check_schemata,
    contiguous,
    differing,
    format_schemata,
    parse_schemata,
    rounded,
    writable,
)
from tests.resctrl.machines import AMD, AMD_MB, CDP, INTEL, INTEL_MB, INTEL_MBPS, INTEL_WITH_L2, MBPS

FIXTURES = Path(__file__).parent.parent / "fixtures" / "resctrl"
NAMES = ("L3", "L2", "L3CODE", "L3DATA", "MB", "SMBA")
SCHEMATAS = st.dictionaries(
    st.sampled_from(NAMES),
    st.dictionaries(st.integers(0, 200), st.integers(0, NO_LIMIT_MBPS), min_size=1, max_size=4),
    max_size=4,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "    MB:0=100;1= 60\n    L3:0=00f;1=fff\n",
            {"MB": {0: 100, 1: 60}, "L3": {0: 0xF, 1: 0xFFF}},
            id="6.1, bandwidth first, padded",
        ),
        pytest.param("    L3:0=00f\n    MB:0= 10\n", {"L3": {0: 0xF}, "MB": {0: 10}}, id="5.10, cache first"),
        pytest.param(
            "    MB:0=4294967295;1=  0\nL3DATA:0=fff\nL3CODE:0=003\n",
            {"MB": {0: NO_LIMIT_MBPS, 1: 0}, "L3DATA": {0: 0xFFF}, "L3CODE": {0: 3}},
            id="code and data, MB/s",
        ),
        pytest.param("SMBA:0=2048;12=8;\n\n", {"SMBA": {0: 2048, 12: 8}}, id="a semicolon more, an empty line"),
        pytest.param("L3:0=0xf\n", {"L3": {0: 15}}, id="hexadecimal sign"),
        pytest.param("", {}, id="nothing"),
    ],
)
def test_what_kernels_show_is_read(text: str, expected: dict[str, dict[int, int]]) -> None:
    assert parse_schemata(text) == expected


@pytest.mark.parametrize(
    "text",
    ["L3", "L3:", "L3:x=1", "L3:0", "L3:0=f;0=f", "L3:0=f\nL3:1=f", "MB:0=ff", "l3:0=f", "L3:0=-1", "L3 0=f"],
)
def test_what_no_kernel_shows_is_named(text: str) -> None:
    with pytest.raises(InputError, match="schemata"):
        parse_schemata(text)


@given(SCHEMATAS)
def test_what_is_written_is_read_again(schemata: dict[str, dict[int, int]]) -> None:
    text = format_schemata(schemata)
    assert parse_schemata(text) == schemata
    assert text.endswith("\n") or not schemata


def test_every_recorded_schemata_is_read() -> None:
    for path in FIXTURES.glob("*.info.txt"):
        match = re.search(r"^# schemata '(.*)'$", path.read_text(), re.MULTILINE)
        assert match is not None
        assert parse_schemata(match[1].replace("\\n", "\n"))["L3"]


@pytest.mark.parametrize(
    ("machine", "schemata"),
    [
        (INTEL, {"L3": {0: 1, 1: 0xFFF}, "MB": {0: 10, 1: 100}}),
        (INTEL, {"MB": {0: 51}}),
        (AMD, {"L3": {3: 0b1010}, "MB": {0: 1, 1: 2048}, "SMBA": {2: 100}}),
        (MBPS, {"MB": {0: 10, 1: NO_LIMIT_MBPS}}),
        (CDP, {"L3CODE": {0: 3}, "L3DATA": {0: 0xC}}),
        (INTEL_WITH_L2, {"L2": {3: 0x81 ^ 0x80}}),
    ],
)
def test_what_the_kernel_takes_passes(machine: Capability, schemata: dict[str, dict[int, int]]) -> None:
    check_schemata(schemata, machine)


@pytest.mark.parametrize(
    ("machine", "schemata", "expected"),
    [
        pytest.param(INTEL, {"L3": {0: 0}}, "L3:0: '0': expected a mask of ways in fff, not empty", id="empty"),
        pytest.param(AMD, {"L3": {0: 0}}, "not empty", id="empty where the kernel would take it"),
        pytest.param(INTEL, {"L3": {0: 0x1FFF}}, "'1fff': expected a mask of ways in fff", id="too wide"),
        pytest.param(INTEL, {"L3": {1: 5}}, "L3:1: '5': expected contiguous ways", id="holes"),
        pytest.param(INTEL, {"L3": {7: 1}}, "L3:7: 7: expected a domain of 0, 1", id="no such domain"),
        pytest.param(INTEL, {"L2": {0: 1}}, "'L2': expected one of L3, MB", id="no such cache"),
        pytest.param(CDP, {"L3": {0: 1}}, "'L3': expected one of L3CODE, L3DATA, MB", id="not halved"),
        pytest.param(INTEL, {"MB": {0: 5}}, "from 10 to 100", id="below the least percent"),
        pytest.param(INTEL, {"MB": {0: 101}}, "from 10 to 100", id="above the most percent"),
        pytest.param(AMD, {"MB": {0: 0}}, "from 1 to 2048", id="no bandwidth at all"),
        pytest.param(AMD, {"MB": {0: 2049}}, "from 1 to 2048", id="more than no limit"),
        pytest.param(MBPS, {"MB": {0: 0}}, "from 10 to 4294967295", id="no MB/s at all"),
    ],
)
def test_what_the_kernel_refuses_or_would_starve_is_named(
    machine: Capability, schemata: dict[str, dict[int, int]], expected: str
) -> None:
    with pytest.raises(InputError, match=re.escape(expected)):
        check_schemata(schemata, machine)


def test_a_minimum_of_two_ways_is_kept() -> None:
    cache = replace(INTEL.caches[0], min_ways=2)
    with pytest.raises(InputError, match="at least 2 ways"):
        check_schemata({"L3": {0: 1}}, replace(INTEL, caches=(cache,)))


@pytest.mark.parametrize(
    ("wanted", "actual", "expected"),
    [
        ({"MB": {0: 51}}, {"MB": {0: 60}}, {}),
        ({"MB": {0: 51}}, {"MB": {0: 50}}, {"MB": {0: 51}}),
        ({"L3": {0: 3, 1: 3}}, {"L3": {0: 3, 1: 7}}, {"L3": {1: 3}}),
        ({"L3": {0: 3}}, {}, {"L3": {0: 3}}),
        ({}, {"L3": {0: 3}}, {}),
    ],
)
def test_only_what_the_file_does_not_hold_differs(
    wanted: dict[str, dict[int, int]], actual: dict[str, dict[int, int]], expected: dict[str, dict[int, int]]
) -> None:
    assert differing(wanted, actual, INTEL) == expected


def test_no_limit_is_written_so_that_5_10_does_not_wrap_it() -> None:
    wanted = {"MB": {0: NO_LIMIT_MBPS, 1: 500}, "L3": {0: 0xFFF}}
    safe = writable(wanted, MBPS)
    assert safe == {"MB": {0: 4_294_967_290, 1: 500}, "L3": {0: 0xFFF}}
    assert differing(safe, wanted, MBPS) == {}
    assert writable({"MB": {0: 2048}}, AMD) == {"MB": {0: 2048}}


def test_rounding_is_upwards_to_the_hardwares_step_and_within_its_bounds() -> None:
    assert [rounded(INTEL_MB, value) for value in (1, 10, 51, 60, 99, 100)] == [10, 10, 60, 60, 100, 100]
    assert rounded(AMD_MB, 161) == 161
    assert rounded(INTEL_MBPS, NO_LIMIT_MBPS) == NO_LIMIT_MBPS


@given(st.integers(0, 1 << 20))
def test_contiguous_is_one_run_of_ones(mask: int) -> None:
    assert contiguous(mask) == (re.fullmatch("0*1*0*", format(mask, "b")) is not None)
