"""The fake kernel's memory and pids files: what is accepted, what is refused with which errno, what reads."""

import errno

from tests.fakes.kernel_files import (
    PAGE,
    PAGE_COUNTER_MAX,
    Files,
    Group,
    PlainController,
    Reader,
    Writer,
    fail,
    kernel_bytes,
    kernel_int,
    signed,
)

PIDS_LIMIT = 4_194_304


class Memory(PlainController):
    name = "memory"

    def born(self, group: Group) -> None:
        group.limits = dict.fromkeys(("max", "memsw", "soft", "high", "swap"), PAGE_COUNTER_MAX) | {"low": 0, "min": 0}

    def files(self, group: Group) -> Files:
        if self._version == 1:
            return {
                "memory.usage_in_bytes": (lambda group: f"{group.usage}\n", None),
                "memory.limit_in_bytes": (_shown_v1("max"), self._limit_v1),
                "memory.memsw.limit_in_bytes": (_shown_v1("memsw"), self._memsw),
                "memory.soft_limit_in_bytes": (_shown_v1("soft"), self._soft),
                "memory.memsw.usage_in_bytes": (lambda group: f"{group.usage}\n", None),
                "memory.oom_control": (
                    lambda group: f"oom_kill_disable {group.oom_kill_disable}\nunder_oom 0\noom_kill 0\n",
                    self._oom_control,
                ),
                "memory.force_empty": (_no_reading, self._force_empty),
                "memory.stat": (_stat(1), None),
                "memory.numa_stat": (self._numa_stat, None),
            }
        if group.is_root:
            return {}
        return {
            "memory.current": (lambda group: f"{group.usage}\n", None),
            "memory.max": (_shown_v2("max"), self._limit_v2),
            "memory.high": (_shown_v2("high"), self._high),
            "memory.low": (_shown_v2("low"), _set_v2("low")),
            "memory.min": (_shown_v2("min"), _set_v2("min")),
            "memory.swap.max": (_shown_v2("swap"), _set_v2("swap")),
            "memory.oom.group": (lambda group: f"{group.oom_group}\n", self._oom_group),
            "memory.stat": (_stat(2), None),
            "memory.numa_stat": (self._numa_stat, None),
            **({"memory.reclaim": (_no_reading, self._reclaim)} if self._machine.release >= (5, 19) else {}),
        }

    def _limit_v1(self, group: Group, text: str) -> None:
        pages = kernel_bytes(text, "-1")
        if group.is_root or pages > group.limits["memsw"]:
            fail(errno.EINVAL)
        self._resize(group, "max", pages)

    def _memsw(self, group: Group, text: str) -> None:
        pages = kernel_bytes(text, "-1")
        if group.is_root or pages < group.limits["max"]:
            fail(errno.EINVAL)
        self._resize(group, "memsw", pages)

    def _soft(self, group: Group, text: str) -> None:
        group.limits["soft"] = kernel_bytes(text, "-1")

    def _resize(self, group: Group, name: str, pages: int) -> None:
        reclaim(group, pages * PAGE)
        if group.usage > pages * PAGE:
            fail(errno.EBUSY)
        group.limits[name] = pages

    def _limit_v2(self, group: Group, text: str) -> None:
        group.limits["max"] = kernel_bytes(text, "max")
        reclaim(group, group.limits["max"] * PAGE)
        # The limit holds whatever happens: what does not fit under it is killed.
        for member in group.walk():
            for pid in sorted(member.pids):
                if group.usage > group.limits["max"] * PAGE:
                    self._machine.kill(pid)

    def _high(self, group: Group, text: str) -> None:
        group.limits["high"] = kernel_bytes(text, "max")
        reclaim(group, group.limits["high"] * PAGE)

    def _reclaim(self, group: Group, text: str) -> None:
        amount, _, options = text.strip().partition(" ")
        if any(self._machine.release < (6, 9) or not _is_swappiness(option) for option in options.split()):
            fail(errno.EINVAL)
        wanted = kernel_bytes(amount, "") * PAGE
        before = group.usage
        reclaim(group, before - wanted)
        if before - group.usage < wanted:
            fail(errno.EAGAIN)

    def _oom_group(self, group: Group, text: str) -> None:
        number = kernel_int(text.strip(), -(1 << 31), (1 << 31) - 1)
        if number not in (0, 1):
            fail(errno.EINVAL)
        group.oom_group = number

    def _oom_control(self, group: Group, text: str) -> None:
        number = kernel_int(text.strip(), -(1 << 31), (1 << 31) - 1)
        if group.is_root or number not in (0, 1):
            fail(errno.EINVAL)
        group.oom_kill_disable = number

    def _force_empty(self, group: Group, text: str) -> None:
        del text
        if group.is_root:
            fail(errno.EINVAL)
        reclaim(group, 0)

    def _numa_stat(self, group: Group) -> str:
        """Where the memory is, of the group and all below; v1 counts pages, and reports the group alone as well."""
        whole = list(group.walk())
        if self._version == 2:
            texts = {"anon": ("anon",), "file": ("cache",), "file_mapped": (), "inactive_file": ("cache",)}
            return "".join(f"{name}{self._by_node(whole, parts)[1]}\n" for name, parts in texts.items()) + (
                f"active_file{self._by_node(whole, ())[1]}\n"
            )
        lines = []
        for prefix, groups in (("", [group]), ("hierarchical_", whole)):
            for name, parts in {"total": ("anon", "cache"), "file": ("cache",), "anon": ("anon",)}.items():
                total, nodes = self._by_node(groups, parts)
                lines.append(f"{prefix}{name}={total}{nodes}\n")
            lines.append(f"{prefix}unevictable=0{self._by_node(groups, ())[1]}\n")
        return "".join(lines)

    def _by_node(self, groups: list[Group], parts: tuple[str, ...]) -> tuple[int, str]:
        sizes = dict.fromkeys(range(self._machine.nodes), 0)
        for group in groups:
            sizes[group.home] += sum(getattr(group, part) for part in parts) // (PAGE if self._version == 1 else 1)
        return sum(sizes.values()), "".join(f" N{node}={size}" for node, size in sizes.items())


def _is_swappiness(option: str) -> bool:
    """From Linux 6.9 on: how much of what is taken may be anonymous memory."""
    name, _, value = option.partition("=")
    return name == "swappiness" and value.isdecimal() and int(value) <= 200


def _no_reading(group: Group) -> str:
    del group
    fail(errno.EINVAL)


def _stat(version: int) -> Reader:
    """The lines of the page cache, with all groups below (on v1 their names begin with ``total_``)."""

    def read(group: Group) -> str:
        anon, cache = (sum(getattr(node, name) for node in group.walk()) for name in ("anon", "cache"))
        if version == 1:
            lines = {"cache": group.cache, "rss": group.anon, "total_cache": cache, "total_rss": anon}
            lines |= {"total_mapped_file": 0, "total_inactive_file": cache, "total_active_file": 0}
        else:
            lines = {"anon": anon, "file": cache, "file_mapped": 0, "inactive_file": cache, "active_file": 0}
        return "".join(f"{name} {number}\n" for name, number in lines.items())

    return read


def reclaim(group: Group, limit: int) -> None:
    """Drop page cache below the group until its usage fits, as far as there is any."""
    for member in group.walk():
        excess = group.usage - limit
        if excess <= 0:
            return
        member.cache -= min(member.cache, -(-excess // PAGE) * PAGE)


def _shown_v1(name: str) -> Reader:
    return lambda group: f"{group.limits[name] * PAGE}\n"


def _shown_v2(name: str) -> Reader:
    def read(group: Group) -> str:
        pages = group.limits[name]
        return "max\n" if pages == PAGE_COUNTER_MAX else f"{pages * PAGE}\n"

    return read


def _set_v2(name: str) -> Writer:
    def write(group: Group, text: str) -> None:
        group.limits[name] = kernel_bytes(text, "max")

    return write


class Pids(PlainController):
    name = "pids"

    def files(self, group: Group) -> Files:
        if group.is_root:
            return {}
        return {
            "pids.max": (lambda group: "max\n" if group.max_pids is None else f"{group.max_pids}\n", self._max),
            "pids.current": (lambda group: f"{sum(len(member.pids) for member in group.walk())}\n", None),
        }

    @staticmethod
    def _max(group: Group, text: str) -> None:
        text = text.strip()
        if text == "max":
            group.max_pids = None
            return
        number = signed(text)
        if not 0 <= number <= PIDS_LIMIT:
            fail(errno.EINVAL)
        group.max_pids = number
