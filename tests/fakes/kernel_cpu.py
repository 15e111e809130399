"""The fake kernel's cpuset, cpu and cpuacct files: what is accepted, what is refused with which errno, what reads."""

import errno
import re

from tests.fakes.kernel_files import (
    Files,
    Group,
    PlainController,
    Reader,
    Writer,
    fail,
    kernel_list,
    show,
    signed,
    unsigned,
)

MAX_BANDWIDTH_US = (1 << 44) - 1
MAX_NODES = 1024
_HOTPLUG = "No cpu available due to hotplug"


class Cpuset(PlainController):
    name = "cpuset"

    def born(self, group: Group) -> None:
        if group.parent is None:
            group.cpus = (1 << self._machine.cpus) - 1
            group.mems = (1 << self._machine.nodes) - 1
        elif self._version == 1 and group.parent.clone_children:
            group.cpus, group.mems = group.parent.cpus, group.parent.mems

    def files(self, group: Group) -> Files:
        if self._version == 2:
            table: Files = {
                "cpuset.cpus.effective": (lambda group: show(self.effective(group, "cpus")), None),
                "cpuset.mems.effective": (lambda group: show(self.effective(group, "mems")), None),
            }
            if group.is_root:
                return table
            return {
                **table,
                "cpuset.cpus": (self._shown("cpus"), self._cpus),
                "cpuset.mems": (self._shown("mems"), self._mems),
                "cpuset.cpus.partition": (lambda group: f"{_shown_partition(group)}\n", self._partition),
                **(
                    {"cpuset.cpus.exclusive.effective": (_exclusive_cpus, None)}
                    if self._machine.release >= (6, 7)
                    else {}
                ),
            }
        return {
            "cpuset.cpus": (self._shown("cpus"), self._cpus),
            "cpuset.mems": (self._shown("mems"), self._mems),
            "cpuset.effective_cpus": (self._shown("cpus"), None),
            "cpuset.effective_mems": (self._shown("mems"), None),
            "cpuset.memory_migrate": (lambda group: f"{group.memory_migrate}\n", self._migrate),
        }

    def may_attach(self, group: Group) -> None:
        if self._version == 1 and not (group.cpus and group.mems):
            fail(errno.ENOSPC)

    def effective(self, group: Group, kind: str) -> int:
        own = _mask(group, kind)
        taken = 0
        for child in group.children.values() if kind == "cpus" else ():
            if _is_partition(child):
                taken |= child.cpus
        if group.parent is None:
            return own & ~taken
        if kind == "cpus" and _is_partition(group):
            return own & self._online(group) & ~taken
        above = self.effective(group.parent, kind)
        return (own & above or above) & ~taken

    @staticmethod
    def _online(group: Group) -> int:
        return list(group.above())[-1].cpus

    def plugged(self, group: Group) -> None:
        """The online CPUs have changed: a partition without any of its own ends, and is granted when they are back."""
        if self._version == 2 and group.partition != "member":
            hotplug = not group.cpus & self._online(group)
            group.partition_error = _HOTPLUG if hotplug and group.populated else self._refused(group)

    # Partitions, as the kernel grants them since 6.1. Before, what it does not grant is EINVAL and changes nothing.

    def _refused(self, group: Group) -> str:
        """Why the kernel does not grant a partition; empty: it does. In the order of its checks."""
        parent = group.parent
        assert parent is not None
        siblings = [sibling for sibling in parent.children.values() if sibling is not group]
        if any(sibling.cpus & group.cpus for sibling in siblings):
            return "Cpu list in cpuset.cpus not exclusive"
        if not group.cpus:
            return f"cpuset.cpus {'and cpuset.cpus.exclusive are' if self._machine.release >= (6, 7) else 'is'} empty"
        if not parent.is_root and not _is_partition(parent):
            return f"Parent is {'not a' if parent.partition == 'member' else 'an invalid'} partition root"
        others = (sibling for sibling in siblings if not _is_partition(sibling))
        populated = parent.is_root or bool(parent.pids) or any(sibling.populated for sibling in others)
        left = parent.cpus & self._online(group)
        for sibling in siblings:
            left &= ~sibling.cpus if _is_partition(sibling) else -1
        if not left & group.cpus or (populated and not left & ~group.cpus):
            return "Parent unable to distribute cpu downstream"
        return ""

    def _judge(self, group: Group) -> None:
        """Grant or end the partition of a group, and of those below it that depend on it."""
        if group.partition != "member":
            group.partition_error = self._refused(group)
        for child in group.children.values():
            if child.partition != "member":
                self._judge(child)

    def _partition(self, group: Group, text: str) -> None:
        kinds = {"member", "root", "isolated"} if self._machine.release >= (6, 1) else {"member", "root"}
        if text.strip() not in kinds:
            fail(errno.EINVAL)
        if text.strip() == group.partition and not group.partition_error:
            return
        if self._machine.release < (6, 1) and text.strip() != "member" and self._refused(group):
            fail(errno.EINVAL)
        group.partition, group.partition_error = text.strip(), ""
        self._judge(group)

    def _exclude(self, group: Group, mask: int) -> None:
        """A set is about to be written: the partitions beside it that it overlaps end, and so does its own."""
        siblings = [] if group.parent is None else group.parent.children.values()
        ended = [other for other in siblings if other is not group and other.cpus & mask and _is_partition(other)]
        overlaps = any(other is not group and other.cpus & mask for other in siblings)
        if self._machine.release < (6, 1) and (ended or (_is_partition(group) and (overlaps or not mask))):
            fail(errno.EINVAL)
        for other in ended:
            other.partition_error = "Cpu list in cpuset.cpus not exclusive"
            for child in other.children.values():
                self._judge(child)

    @staticmethod
    def _shown(kind: str) -> Reader:
        return lambda group: show(_mask(group, kind))

    def _cpus(self, group: Group, text: str) -> None:
        if group.is_root:
            fail(errno.EACCES)
        mask = kernel_list(text, self._machine.cpus)
        if self._version == 1 and mask & ~list(group.above())[-1].cpus:
            fail(errno.EINVAL)
        if mask != group.cpus:
            self._validate(group, mask, group.mems)
            if self._version == 2:
                self._exclude(group, mask)
            group.cpus = mask
            self._judge(group)

    def _mems(self, group: Group, text: str) -> None:
        if group.is_root:
            fail(errno.EACCES)
        mask = kernel_list(text, MAX_NODES)
        if mask >> self._machine.nodes:
            fail(errno.EINVAL)
        if mask != group.mems:
            self._validate(group, group.cpus, mask)
            group.mems = mask

    def _migrate(self, group: Group, text: str) -> None:
        group.memory_migrate = int(unsigned(text) != 0)

    def _validate(self, group: Group, cpus: int, mems: int) -> None:
        # The order matters: the kernel answers the first rule that is broken.
        if self._version == 1 or self._machine.release < (6, 1):
            for child in group.children.values():
                if child.cpus & ~cpus or child.mems & ~mems:
                    fail(errno.EBUSY)
        parent = group.parent
        if parent is None:
            return
        if self._version == 1 and (cpus & ~parent.cpus or mems & ~parent.mems):
            fail(errno.EACCES)
        if group.populated and ((group.cpus and not cpus) or (group.mems and not mems)):
            fail(errno.ENOSPC)


def _is_partition(group: Group) -> bool:
    return group.parent is not None and group.partition != "member" and not group.partition_error


def _shown_partition(group: Group) -> str:
    return f"{group.partition} invalid ({group.partition_error})" if group.partition_error else group.partition


def _exclusive_cpus(group: Group) -> str:
    return show(group.cpus if _is_partition(group) else 0)


def _mask(group: Group, kind: str) -> int:
    return group.cpus if kind == "cpus" else group.mems


class Cpu(PlainController):
    name = "cpu"

    def born(self, group: Group) -> None:
        """A fresh group has the defaults of `Group`, but for what distributions' kernels hand down."""
        if group.parent is not None:
            group.identity, group.qos_level = group.parent.identity, group.parent.qos_level

    def files(self, group: Group) -> Files:
        release = self._machine.release
        if self._version == 1:
            table: dict[str, tuple[Reader, Writer | None]] = {
                "cpu.shares": (lambda group: f"{group.shares}\n", self._shares),
                "cpu.cfs_quota_us": (lambda group: f"{group.quota}\n", self._quota),
                "cpu.cfs_period_us": (lambda group: f"{group.period}\n", self._period),
                "cpu.stat": (
                    lambda group: f"nr_periods 0\nnr_throttled 0\nthrottled_time {group.throttled_ns}\n",
                    None,
                ),
            }
            burst = "cpu.cfs_burst_us"
        else:
            table = {
                "cpu.stat": (
                    lambda group: (
                        f"usage_usec {group.cpu_ns // 1000}\nnr_throttled 0\n"
                        f"throttled_usec {group.throttled_ns // 1000}\n"
                    ),
                    None,
                )
            }
            if group.is_root:
                return table
            table["cpu.max"] = (_shown_max, self._max)
            table["cpu.weight"] = (self._shown_weight, self._weight)
            burst = "cpu.max.burst"
        if release >= (5, 14):
            table[burst] = (lambda group: f"{group.burst}\n", self._burst)
        if release >= (5, 15):
            table["cpu.idle"] = (lambda group: f"{group.idle}\n", self._idle)
        # Not seen on a real kernel here: by Anolis' and openEuler's documentation and what their agents rely on.
        if self._machine.distribution == "anolis":
            table["cpu.bvt_warp_ns"] = (lambda group: f"{group.identity}\n", self._identity)
        if self._machine.distribution == "openeuler":
            table["cpu.qos_level"] = (lambda group: f"{group.qos_level}\n", self._qos_level)
        return table

    @staticmethod
    def _identity(group: Group, text: str) -> None:
        number = signed(text)
        if group.is_root or not -1 <= number <= 2:
            fail(errno.EINVAL)
        group.identity = number

    @staticmethod
    def _qos_level(group: Group, text: str) -> None:
        number = signed(text)
        if group.is_root or number not in {0, -1} or number > group.qos_level:
            fail(errno.EINVAL)
        group.qos_level = number

    def _shares(self, group: Group, text: str) -> None:
        number = unsigned(text)
        if group.is_root or group.idle:
            fail(errno.EINVAL)
        group.shares = min(262_144, max(2, number))

    def _weight(self, group: Group, text: str) -> None:
        number = unsigned(text)
        if not 1 <= number <= 10_000:
            fail(errno.ERANGE)
        if group.idle:
            fail(errno.EINVAL)
        group.shares = (number * 1024 + 50) // 100

    def _shown_weight(self, group: Group) -> str:
        weight = (group.shares * 100 + 512) // 1024
        return f"{max(weight, 1) if self._machine.release >= (6, 12) else weight}\n"

    def _idle(self, group: Group, text: str) -> None:
        flag = signed(text)
        if group.is_root or flag not in {0, 1}:
            fail(errno.EINVAL)
        if flag != group.idle:
            group.idle = flag
            group.shares = 3 if flag else 1024

    def _quota(self, group: Group, text: str) -> None:
        number = signed(text)
        self._set(group, -1 if number < 0 else number, group.period, group.burst)

    def _period(self, group: Group, text: str) -> None:
        self._set(group, group.quota, unsigned(text), group.burst)

    def _burst(self, group: Group, text: str) -> None:
        self._set(group, group.quota, group.period, unsigned(text))

    def _max(self, group: Group, text: str) -> None:
        parts = text.split()
        if not parts:
            fail(errno.EINVAL)
        number = re.match(r"\d+", parts[0])
        if number is None and parts[0] != "max":
            fail(errno.EINVAL)
        second = re.match(r"\d+", parts[1]) if len(parts) > 1 else None
        self._set(group, int(number[0]) if number else -1, int(second[0]) if second else group.period, group.burst)

    def _set(self, group: Group, quota: int, period: int, burst: int) -> None:
        if group.is_root or (0 <= quota < 1000) or not 1000 <= period <= 1_000_000 or quota > MAX_BANDWIDTH_US:
            fail(errno.EINVAL)
        if quota >= 0 and (burst > quota or burst + quota > MAX_BANDWIDTH_US):
            fail(errno.EINVAL)
        old = group.quota, group.period
        group.quota, group.period = quota, period
        if self._version == 1 and not _schedulable(next(top for top in group.above() if top.is_root), None):
            group.quota, group.period = old
            fail(errno.EINVAL)
        group.burst = burst


def _schedulable(group: Group, limit: int | None) -> bool:
    ratio = None if group.quota < 0 else (group.quota << 20) // group.period
    if ratio is not None and limit is not None and ratio > limit:
        return False
    return all(_schedulable(child, limit if ratio is None else ratio) for child in group.children.values())


def _shown_max(group: Group) -> str:
    return f"{'max' if group.quota < 0 else group.quota} {group.period}\n"


class Cpuacct(PlainController):
    name = "cpuacct"

    def files(self, group: Group) -> Files:
        return {"cpuacct.usage": (lambda group: f"{group.cpu_ns}\n", None)}
