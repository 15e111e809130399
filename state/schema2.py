"""The rows that schema 2 kept outside of the ledger, as rows of the ledger.

Up to schema 2 only cgroup files were in the ledger. Everything else that was changed had one private row for each
feature in the table META. They become rows of the ledger when a store is opened, in the transaction of the opening, and
each time a store that cannot be written is read.

Pure, and imports nothing heavy: the command line reads a store without msgspec.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgpack

from cgroupfs.bounded import decoded
from state.kinds import COOKIE, NETWORK, PROCESS, RESCTRL, SYSCTL
from state.schema import FILES, META

_DEEPEST: Final = 8
_LAST: Final = 1 << 60
"""A larger order is damage: the numbers that are counted on from it have to fit into 64 bits."""
_DEVICE: Final = "bypassd-be"
Row = dict[str, Any]  # a field's value is a text, a number or a list of texts


class Converted(NamedTuple):
    """The rows of the ledger by their keys, and the keys of META that they replace."""

    files: dict[str, bytes]
    replaced: tuple[str, ...]


def convert(rows: Mapping[str, Mapping[str, bytes]], boot: str) -> Converted:
    """What is to be changed in a store's tables. ``boot``: the running one; the rows of another one are dropped."""
    meta, files = rows.get(META, {}), rows.get(FILES, {})
    made: dict[str, bytes] = {}
    replaced: list[str] = []
    order = 0
    for name, rows_of in _PRIVATE.items():
        if name not in meta:
            continue
        if not replaced:
            order = max((_order(body) for body in files.values()), default=0)
        try:
            kept = decoded(_unpack, meta[name], deepest=_DEEPEST)
            fresh = [] if boot and kept["boot"] not in {"", boot} else list(rows_of(kept))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # an invalid private row remains unchanged
        for row in fresh:
            key = f"{row['kind']}:{row['path']}:{row['file']}"
            if key not in files:
                order += 1
                made[key] = msgpack.packb({"controller": "", **row, "order": order})
        replaced.append(name)
    return Converted(made, tuple(replaced))


def _unpack(body: bytes) -> Row:
    # Cookies and resctrl's domains are keys that are numbers.
    kept: Row = msgpack.unpackb(body, strict_map_key=False)
    return kept


def _number(value: object) -> int:
    """Errors: `TypeError`."""
    if type(value) is not int:
        raise TypeError
    return value


def _order(body: bytes) -> int:
    try:
        order = decoded(msgpack.unpackb, body, deepest=_DEEPEST).get("order", 0)
    except (ValueError, AttributeError):
        return 0
    return order if isinstance(order, int) and 0 <= order <= _LAST else 0


def _row(kind: str, path: str, field: str, policy: str, *, original: str | None, ours: list[str], **more: Any) -> Row:
    """``more``: other fields, and those that differ: ``knob`` from the field, ``wanted`` from the last of ``ours``."""
    row = {"kind": kind, "path": path, "file": field, "knob": field, "policy": policy, "original": original}
    return {**row, "ours": ours, "wanted": ours[-1] if ours else None, **more}


def _sysctls(kept: Row) -> Iterator[Row]:
    for name, value in kept["values"].items():
        ours = [str(_number(number)) for number in value["ours"]]
        yield _row(SYSCTL, "/", str(name), "watermarks", original=str(_number(value["original"])), ours=ours)


def _scores(kept: Row) -> Iterator[Row]:
    for path, box in kept["containers"].items():
        ours = [str(_number(number)) for number in box["ours"]]
        originals = {"oom_score_adj": box["original"]}
        originals |= {f"oom_score_adj of {process}": had for process, had in box.get("odd", {}).items()}
        more = {"knob": "oom.score", "inode": _number(box["inode"]), "pod_uid": str(box["pod_uid"]) or None}
        for field, original in originals.items():
            yield _row(PROCESS, str(path), field, "oom_score", original=str(_number(original)), ours=ours, **more)


def _cookies(kept: Row) -> Iterator[Row]:
    for cookie, group in kept["ours"].items():
        name = f"{_number(cookie):#x}"
        more = {"knob": "core.cookie", "wanted": str(group)}
        yield _row(COOKIE, name, "core cookie", "core_sched", original="none", ours=[name], **more)


def _resctrl(kept: Row) -> Iterator[Row]:
    places = {} if kept.get("original") is None else {"schemata": "/"}
    places |= {"groups": "/"} if kept.get("groups") else {}
    places |= {} if kept.get("place") is None else {"mount": str(kept["place"])}
    values = {
        "schemata": [_schemata(kept.get("original") or {}), *map(_schemata, kept.get("written", ()))],
        "groups": ["none", "bypassd-*"],
        "mount": ["none", "bypassd"],
    }
    for field, place in places.items():
        original, *ours = values[field]
        yield _row(RESCTRL, place, field, "cache", original=original, ours=ours, knob=f"resctrl.{field}")


def _schemata(values: Row) -> str:
    """As the kernel shows it: masks of caches in hexadecimal, bandwidths in decimal."""
    lines = []
    for name, domains in sorted(values.items()):
        form = "x" if name.startswith("L") and name[1:2].isdigit() else "d"
        parts = ";".join(f"{_number(domain)}={_number(value):{form}}" for domain, value in sorted(domains.items()))
        lines += [f"{name}:{parts}"] if parts else []
    return "\n".join(lines)


def _network(kept: Row) -> Iterator[Row]:
    for name, kind in kept.get("roots", {}).items():
        more: Row = {} if kind else {"origin": "unknown"}
        yield _device(str(name), "root qdisc", "4250:", str(kind) if kind else None, **more)
    if kept.get("gather"):
        yield _device(_DEVICE, "device", _DEVICE, "none")
    for name, led in kept.get("cables", {}).items():
        original = "none" if led["made"] else "ingress"
        more = {"inode": _number(led["index"]), "pod_uid": str(led["pod_uid"]) or None}
        yield _device(str(name), "ingress filter", f"slot {_number(led.get('slot', 0))}", original, **more)


def _device(name: str, field: str, ours: str, original: str | None, **more: Any) -> Row:
    return _row(NETWORK, name, field, "network", original=original, ours=[ours], knob=f"network.{field}", **more)


_PRIVATE: Final[Mapping[str, Callable[[Row], Iterator[Row]]]] = {
    "core_cookies": _cookies,
    "network": _network,
    "oom_scores": _scores,
    "resctrl": _resctrl,
    "watermarks": _sysctls,
}
PRIVATE: Final = frozenset(_PRIVATE)
"""The keys of the private rows in META. Later versions have none of them."""
