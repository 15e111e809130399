"""Cache and memory bandwidth requests in a pod's annotations. Pure; a broken value is one message, never an exception.

- Koordinator's ``node.koordinator.sh/resctrl``: ``llc.schemata.range``, ``llc.schemataPerCache``,
  ``mb.schemata.percent`` and ``mb.schemataPerCache``, ranges as percents.
- rubik's ``volcano.sh/cache-limit``: one of its levels, for BE pods.

Source: Koordinator's API (apis/extension/resctrl.go), rubik's dynCache. If both are given, the first counts.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, TypeVar

from msgspec import Struct

from reconciler.pods.annotations import JsonAnnotation, UnusableError, attempt, one_of, read_plain, whole_number
from state.model import Pod, PodClass

RESCTRL: Final = "node.koordinator.sh/resctrl"
CACHE_LIMIT: Final = "volcano.sh/cache-limit"
_T = TypeVar("_T")
_REMEMBERED: Final = 256
_MOST_ENTRIES: Final = 256
"""Caches of one machine."""

Range = tuple[int, int]


class CacheLevelName(StrEnum):
    """rubik's levels. ``max`` is all that BE may have, ``dynamic`` what the law gives it now."""

    LOW = "low"
    MIDDLE = "middle"
    HIGH = "high"
    MAX = "max"
    DYNAMIC = "dynamic"


class PodCacheShare(Struct, frozen=True, kw_only=True):
    """A pod's own share: ranges of ways and percents of bandwidth, for all domains and for single ones.

    None and empty: as its class. ``level`` instead of all that: one of BE's sizes.
    """

    range: Range | None = None
    ranges: Mapping[int, Range] = {}
    percent: int | None = None
    percents: Mapping[int, int] = {}
    level: CacheLevelName | None = None

    def __bool__(self) -> bool:
        return self != PodCacheShare()


def pod_share(pod: Pod) -> tuple[PodCacheShare, tuple[str, ...]]:
    """A pod's requests, and the problems of those that could not be used."""
    # A plan is made at each pass: the texts are parsed only when they have changed.
    return _pod_share(pod.annotations.get(RESCTRL), pod.annotations.get(CACHE_LIMIT), pod.pod_class)


@lru_cache(maxsize=_REMEMBERED)
def _pod_share(
    resctrl: str | None, cache_limit: str | None, pod_class: PodClass
) -> tuple[PodCacheShare, tuple[str, ...]]:
    problems: list[str] = []
    texts = {name: text for name, text in ((RESCTRL, resctrl), (CACHE_LIMIT, cache_limit)) if text is not None}
    annotation = JsonAnnotation(texts, RESCTRL, problems)
    cache = annotation.read("llc", lambda value: _part(value, "range", _range, f"{RESCTRL}: llc", problems))
    memory = annotation.read("mb", lambda value: _part(value, "percent", _percent, f"{RESCTRL}: mb", problems))
    share = PodCacheShare(
        range=cache[0] if cache else None,
        ranges=cache[1] if cache else {},
        percent=memory[0] if memory else None,
        percents=memory[1] if memory else {},
    )
    level = read_plain(
        texts,
        CACHE_LIMIT,
        lambda value: one_of(value, {level_name.value: level_name for level_name in CacheLevelName}),
        problems,
    )
    if level is not None and pod_class is not PodClass.RECLAIMED:
        problems.append(f"annotation {CACHE_LIMIT}: {level.value!r}: levels are for BE pods; this one is {pod_class}")
    elif level is not None and not share:
        share = PodCacheShare(level=level)
    return share, tuple(problems)


def _part(
    value: Any,
    key: str,
    reader: Callable[[Any], _T],
    where: str,
    problems: list[str],  # untrusted JSON
) -> tuple[_T | None, dict[int, _T]]:
    if not isinstance(value, dict):
        raise UnusableError("an object with schemata or schemataPerCache")
    whole = value.get("schemata")
    everywhere: _T | None = None
    if whole is not None:
        everywhere = attempt(f"annotation {where}.schemata", whole, lambda item: _field(item, key, reader), problems)
    single: dict[int, _T] = {}
    entries = value.get("schemataPerCache") or []
    if not isinstance(entries, list):
        raise UnusableError("schemataPerCache as a list")
    if len(entries) > _MOST_ENTRIES:
        raise UnusableError(f"schemataPerCache with at most {_MOST_ENTRIES} entries")
    for entry in entries:
        pair = attempt(f"annotation {where}.schemataPerCache", entry, lambda item: _entry(item, key, reader), problems)
        if pair is not None:
            single[pair[0]] = pair[1]
    return everywhere, single


def _field(value: Any, key: str, reader: Callable[[Any], _T]) -> _T | None:  # untrusted JSON
    if not isinstance(value, dict):
        raise UnusableError(f"an object with {key}")
    return None if value.get(key) is None else reader(value[key])


def _entry(value: Any, key: str, reader: Callable[[Any], _T]) -> tuple[int, _T] | None:  # untrusted JSON
    result = _field(value, key, reader)
    # Go leaves a zero out when it writes the number of a cache.
    return None if result is None else (whole_number(value.get("cacheID", 0), 0, 1 << 20), result)


def _range(value: Any) -> Range:  # untrusted JSON
    expected = "a range [start, end] of percents, 0 <= start < end <= 100"
    if not isinstance(value, list) or len(value) != 2:
        raise UnusableError(expected)
    low, high = whole_number(value[0], 0, 100), whole_number(value[1], 0, 100)
    if low >= high:
        raise UnusableError(expected)
    return low, high


def _percent(value: Any) -> int:  # untrusted JSON
    return whole_number(value, 1, 100)
