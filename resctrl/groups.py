"""Control groups: bypassd's, by their prefix, made under the hardware's budget, filled, and removed again.

Groups of other names are never changed. The kernel's own message (``last_cmd_status``) is part of every refusal. All
calls are synchronous and slow: they belong into a worker thread, never into the loop.
"""

import errno
from typing import Final, final

from cgroupfs.errors import CgroupError, CgroupGoneError, CgroupRefusedError, cgroup_error
from resctrl.capability import Capability
from resctrl.files import REAL, GroupFiles
from resctrl.schemata import Schemata, check_schemata, differing, format_schemata, parse_schemata, writable
from resctrl.tasks import members

PREFIX: Final = "bypassd-"
"""Prefix of the names of all groups of bypassd; it is enough to remove them."""
DEFAULT: Final = ""
"""The name of the default group, in which every thread begins."""
_NO_GROUPS: Final = frozenset({"info", "mon_data", "mon_groups"})
_LONGEST: Final = 200


class OutOfGroupsError(CgroupRefusedError):
    """The hardware has no group to give. ``what``: ``CLOSIDs`` or ``RMIDs``."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(path, f"mkdir: out of {what} (ENOSPC)", errno.ENOSPC)
        self.what = what


@final
class ControlGroups:
    """The control groups below one resctrl mount."""

    def __init__(self, root: str, files: GroupFiles = REAL, prefix: str = PREFIX) -> None:
        self.root = root
        self.files = files
        self.prefix = prefix

    def path(self, name: str) -> str:
        """The directory of a group; `DEFAULT` is the mount itself."""
        return f"{self.root}/{name}" if name else self.root

    def ours(self) -> list[str]:
        """Names of our groups that exist, sorted. Errors: `CgroupError`."""
        return [name for name in self._all() if name.startswith(self.prefix)]

    def foreign(self) -> list[str]:
        """Names of others' control groups, sorted. Errors: `CgroupError`."""
        return [name for name in self._all() if not name.startswith(self.prefix)]

    def of_others(self) -> frozenset[int]:
        """The threads in groups of others. A group that is removed meanwhile has none."""
        numbers: set[int] = set()
        for name in self.foreign():
            try:
                numbers |= members(self.files, self.path(name))
            except CgroupGoneError:
                continue
        return frozenset(numbers)

    def members(self, name: str) -> frozenset[int]:
        """The threads of one group. Errors: `CgroupError`."""
        return members(self.files, self.path(name))

    def create(self, name: str) -> bool:
        """Make a group; False when it was there.

        Errors: `OutOfGroupsError`; `CgroupBusyError` while freed monitoring ids still occupy cache (the kernel checks
        once a second: try again); `CgroupError`.
        """
        path = self.path(self._own(name))
        try:
            self.files.mkdir(path)
        except FileExistsError:
            return False
        except OSError as exc:
            if exc.errno == errno.ENOSPC:
                raise OutOfGroupsError(path, "RMIDs" if "RMID" in self.status() else "CLOSIDs") from exc
            raise self._error(path, exc, "mkdir") from exc
        return True

    def remove(self, name: str) -> bool:
        """Remove a group; its threads move to the default group. False when there was none. Errors: `CgroupError`."""
        path = self.path(self._own(name))
        try:
            self.files.rmdir(path)
        except OSError as exc:
            error = cgroup_error(path, exc, "rmdir")
            if isinstance(error, CgroupGoneError):
                return False
            raise error from exc
        return True

    def schemata(self, name: str) -> dict[str, dict[int, int]]:
        """What a group holds. Errors: `CgroupError`; `InputError` for a text that no kernel shows."""
        path = self.path(name)
        try:
            return parse_schemata(self.files.read(path, "schemata"))
        except OSError as exc:
            raise cgroup_error(f"{path}/schemata", exc, "read") from exc

    def set_schemata(self, name: str, wanted: Schemata, capability: Capability) -> dict[str, dict[int, int]]:
        """Bring a group to ``wanted`` in one write and read it back; returns the written text, empty without a change.

        Errors: `InputError` for an illegal value here (nothing is written then); `CgroupRefusedError` with the kernel's
        reason, or when something else reads back; `CgroupError`.
        """
        check_schemata(wanted, capability)
        wanted = writable(wanted, capability)
        todo = differing(wanted, self.schemata(name), capability)
        if not todo:
            return {}
        path = f"{self.path(name)}/schemata"
        text = format_schemata(todo)
        try:
            self.files.write(self.path(name), "schemata", text)
        except OSError as exc:
            raise self._error(path, exc, f"write {text!r}") from exc
        left = differing(wanted, self.schemata(name), capability)
        if left:
            raise CgroupRefusedError(path, f"wrote {text!r}; it does not hold {format_schemata(left)!r} afterwards")
        return todo

    def status(self) -> str:
        """The kernel's last word on what it refused; "" where it has none.

        The file grows line by line until a command clears it: its end is about the newest.
        """
        try:
            lines = self.files.read(f"{self.root}/info", "last_cmd_status").split("\n")
        except OSError:
            return ""
        last = [line for line in lines if line.strip()][-1:]
        return "" if last in ([], ["ok"]) else last[0].strip()

    def _all(self) -> list[str]:
        try:
            return sorted(name for name in self.files.groups(self.root) if name not in _NO_GROUPS)
        except OSError as exc:
            raise cgroup_error(self.root, exc, "list") from exc

    def _own(self, name: str) -> str:
        if not name.startswith(self.prefix) or "/" in name or "\n" in name or len(name) > _LONGEST:
            raise ValueError(f"{name!r} is not a group name of bypassd")
        return name

    def _error(self, path: str, exc: OSError, doing: str) -> CgroupError:
        status = self.status()
        return cgroup_error(path, exc, f"{doing} ({status})" if status else doing)
