"""The fake kernel's v1 freezer: what is accepted and what reads. (v2 has a core file for it.)"""

import errno

from tests.fakes.kernel_files import Files, Group, PlainController, fail


class Freezer(PlainController):
    name = "freezer"

    def files(self, group: Group) -> Files:
        if group.is_root:
            return {}
        return {
            "freezer.state": (lambda group: "FROZEN\n" if _frozen(group) else "THAWED\n", _state),
            "freezer.self_freezing": (lambda group: f"{group.frozen}\n", None),
            "freezer.parent_freezing": (lambda group: f"{int(_frozen(group.parent))}\n", None),
        }


def _frozen(group: Group | None) -> bool:
    while group is not None:
        if group.frozen:
            return True
        group = group.parent
    return False


def _state(group: Group, text: str) -> None:
    states = {"FROZEN": 1, "THAWED": 0}
    if text.strip() not in states:
        fail(errno.EINVAL)
    group.frozen = states[text.strip()]
