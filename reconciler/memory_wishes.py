"""What a pod's annotations ask of its memory, read into one `MemoryWish`. Pure; never fails.

- **Koordinator**: ``memoryQOS`` (``policy`` and the percentages of its strategy) and ``oom-score-adj``. Its watermarks,
  priorities and page-cache limits need a kernel of their own and are left alone.
- **Katalyst**: ``oom_priority`` in ``memory_enhancement``, whose values are all strings.

A broken value is one message with the annotation and the field, and no opinion on that field.

Source: Koordinator's API (apis/slo/v1alpha1, apis/extension); Katalyst's API constants (pkg/consts).
"""

from collections.abc import Mapping
from typing import Final

from reconciler.annotations import JsonAnnotation, UnusableError, one_of, read_plain, text_of, whole_number
from reconciler.wishes import MEMORY_ENHANCEMENT
from state.memory import MemoryWish

MEMORY_QOS: Final = "koordinator.sh/memoryQOS"
OOM_SCORE_ADJ: Final = "koordinator.sh/oom-score-adj"
# "default" and "auto" take the node's own percentages; "none" is an explicit no.
_POLICIES: Final[Mapping[str, bool]] = {"": False, "default": False, "auto": False, "none": True}


def memory_wish_of(annotations: Mapping[str, str]) -> tuple[MemoryWish, tuple[str, ...]]:
    """What the pod asks, and a message for every part of it that could not be used. Unknown fields are not ours."""
    problems: list[str] = []
    qos = JsonAnnotation(annotations, MEMORY_QOS, problems)
    enhancement = JsonAnnotation(annotations, MEMORY_ENHANCEMENT, problems)
    wish = MemoryWish(
        off=qos.read("policy", lambda value: one_of(value, _POLICIES)) or False,
        min_percent=qos.read("minLimitPercent", _percent),
        low_percent=qos.read("lowLimitPercent", _percent),
        throttling_percent=qos.read("throttlingPercent", _percent),
        oom_group=qos.read("oomKillGroup", lambda value: bool(whole_number(value, 0, 1))),
        oom_priority=enhancement.read("oom_priority", lambda value: _number(value, -300, 300)),
        oom_score_adj=read_plain(annotations, OOM_SCORE_ADJ, lambda value: _number(value, -1000, 1000), problems),
    )
    return wish, tuple(problems)


def _percent(value: object) -> int:
    return whole_number(value, 0, 100)


def _number(value: object, low: int, high: int) -> int:
    """A whole number written as a string, which may be negative."""
    expected = f"a whole number from {low} to {high}"
    text = text_of(value, expected)
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 4 and low <= int(text) <= high):
        raise UnusableError(f"{expected}, as a string")
    return int(text)
