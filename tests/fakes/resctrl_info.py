"""The info directory of the resctrl model: what the machine offers, and the two settings that are in it.

Source: kernel documentation, filesystems/resctrl; transcripts of 5.10, 6.1 and 6.12 (tests/fixtures/resctrl).
"""

import errno
from collections.abc import Callable

from tests.fakes.kernel_files import fail
from tests.fakes.resctrl_groups import Machine, Table
from tests.fakes.resctrl_parts import Counters, unsigned
from tests.fakes.resctrl_schemata import BLANKS
from tests.fakes.resctrl_shapes import CacheShape, MonitorShape, Schema

TRAFFIC_KINDS = 0x7F
AT_FIRST = {"mbm_total_bytes": 0x7F, "mbm_local_bytes": 0x15}
"""Which kinds of traffic are counted before anybody says otherwise."""


def info_files(machine: Machine) -> Table:
    """Path below ``info`` -> what it reads and what a write does."""
    found: Table = {"last_cmd_status": (machine.status.show, None)}
    for schema in machine.allocation.schemas:
        for name, text in _schema(machine, schema).items():
            found[f"{schema.name}/{name}"] = (text, None)
    if machine.shape.monitor is not None:
        assert machine.counters is not None
        for name, entry in _monitor(machine, machine.shape.monitor, machine.counters).items():
            found[f"L3_MON/{name}"] = entry
    return found


def _fixed(value: object) -> Callable[[], str]:
    return lambda: f"{value}\n"


def _schema(machine: Machine, schema: Schema) -> dict[str, Callable[[], str]]:
    part, release = schema.resource, machine.release
    found = {"num_closids": _fixed(schema.closids)}
    if isinstance(part, CacheShape):
        found |= {
            "cbm_mask": _fixed(f"{part.full:x}"),
            "min_cbm_bits": _fixed(machine.allocation.min_bits(part)),
            "shareable_bits": _fixed(f"{part.shareable:x}"),
            "bit_usage": lambda: machine.allocation.bit_usage(schema),
        }
        if release >= (6, 7):
            found["sparse_masks"] = _fixed(int(part.lenient or part.sparse))
        return found
    found |= {
        "min_bandwidth": _fixed(part.minimum),
        "bandwidth_gran": _fixed(part.step),
        "delay_linear": _fixed(int(not part.absolute)),
    }
    if not part.absolute and not part.bits:
        found["thread_throttle_mode"] = _fixed("max")
    return found


def _monitor(machine: Machine, monitor: MonitorShape, counters: Counters) -> Table:
    configurable = monitor.configurable and machine.release >= (6, 3)
    names = [
        name
        for event in monitor.events
        for name in (event, *([f"{event}_config"] * (configurable and event in AT_FIRST)))
    ]
    rmids = machine.rmids
    assert rmids is not None

    def write_threshold(text: str, _writer: int) -> None:
        number = unsigned(text, 0, 32)
        if number is None:
            fail(errno.ERANGE if unsigned(text, 0, 4096) is not None else errno.EINVAL)
        if number > monitor.cache_bytes:
            fail(errno.EINVAL)
        rmids.threshold = number // monitor.unit * monitor.unit

    found: Table = {
        "num_rmids": (_fixed(monitor.rmids), None),
        "mon_features": (_fixed("\n".join(names)), None),
        "max_threshold_occupancy": (lambda: f"{rmids.threshold}\n", write_threshold),
    }
    for event in monitor.events:
        if configurable and event in AT_FIRST:
            found[f"{event}_config"] = _config(machine, monitor, counters, event)
    return found


def _config(
    machine: Machine, monitor: MonitorShape, counters: Counters, event: str
) -> tuple[Callable[[], str], Callable[[str, int], None]]:
    counted = dict.fromkeys(monitor.domains, AT_FIRST[event])

    def read() -> str:
        return ";".join(f"{domain}=0x{kinds:02x}" for domain, kinds in counted.items()) + "\n"

    def write(text: str, _writer: int) -> None:
        if not text.endswith("\n"):
            fail(errno.EINVAL)
        machine.status.clear()
        rest = text[:-1]
        while rest:
            word, _, rest = rest.partition(";")
            number, _, value = word.strip(BLANKS).partition("=")
            domain, kinds = unsigned(number, 10), unsigned(value, 16)
            if domain is None:
                raise machine.status.refuse("Missing '=' or non-numeric domain id")
            if kinds is None:
                raise machine.status.refuse("Non-numeric event configuration value")
            too_many, checks_first = kinds > TRAFFIC_KINDS, machine.release >= (6, 9)
            if too_many and checks_first:
                raise machine.status.refuse(f"Invalid event configuration: max valid mask is 0x{TRAFFIC_KINDS:02x}")
            if domain not in counted:
                fail(errno.EINVAL)
            if too_many:
                raise machine.status.refuse("Invalid event configuration")
            if kinds != counted[domain]:
                counted[domain] = kinds
                counters.forget(domain, monitor.rmids)

    return read, write
