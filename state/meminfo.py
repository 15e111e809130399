"""meminfo of the machine and of NUMA nodes, and *ordinary memory*: what the kernel manages less all huge pages. Pure.

Huge pages are reserved for the programs that ask for them: never available to others, also while they are unused.
MemTotal contains them; MemFree and MemAvailable do not. So each share of a node's memory is one of ordinary memory.

Source: proc(5); kernel documentation, admin-guide/mm/hugetlbpage (``Hugetlb``: 4.16) and drivers/base/node.c: a NUMA
node's meminfo has a count of the default size only, so its directory ``hugepages`` is read.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from cgroupfs.bounded import digits

_KILO: Final = 1024
_SIZE: Final = "hugepages-"


def meminfo_bytes(text: str) -> dict[str, int]:
    """Bytes by name, of /proc/meminfo or of a NUMA node's (whose lines begin with ``Node N``).

    Counts are left out. ``Hugetlb``: all huge pages; on kernels before 4.16 those of the default size.
    """
    numbers: dict[str, int] = {}
    count = 0
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if not parts or (number := digits(parts[0])) is None:
            continue
        if len(parts) == 2 and parts[1] == "kB":
            numbers[name.rpartition(" ")[2]] = number * _KILO
        elif len(parts) == 1 and name == "HugePages_Total":
            count = number
    if count and "Hugepagesize" in numbers:
        numbers.setdefault("Hugetlb", count * numbers["Hugepagesize"])
    return numbers


def ordinary_bytes(total: int, huge: int) -> int:
    """Memory that can hold any page. More huge pages than memory are a wrong reading: none is left."""
    return max(0, total - huge)


def ordinary(numbers: Mapping[str, int], huge: int | None = None) -> dict[str, int]:
    """The same numbers, MemTotal without huge pages. ``huge``: their bytes where ``Hugetlb`` does not have them."""
    result = dict(numbers)
    if "MemTotal" in result:
        result["MemTotal"] = ordinary_bytes(result["MemTotal"], result.get("Hugetlb", 0) if huge is None else huge)
    return result


def huge_bytes(names: Iterable[str], count_of: Callable[[str], str]) -> int:
    """Huge pages of every size of one NUMA node. ``names``: in its ``hugepages`` directory; others are ignored.

    ``count_of``: the text of ``nr_hugepages`` in one of them. Errors: those of ``count_of``.
    """
    total = 0
    for name in names:
        size = digits(name.removeprefix(_SIZE).removesuffix("kB"))
        if name.startswith(_SIZE) and name.endswith("kB") and size:
            total += size * _KILO * (digits(count_of(name).strip()) or 0)
    return total
