"""Labels and annotations of pods: which are read, how long each may be, and which parts of a pod's maps are kept.

Their author is the tenant: up to 256 KiB of annotations and more than 1 MiB of labels a pod, of which a few short ones
are used here. A map of usual size is kept whole. Of a larger one only the keys that are read are kept: those of the
tables below, and those that the configuration names (`MarkReader.use`). A value that is longer than its key allows is
refused with a message, and so is a value with which the kept ones would exceed a pod's share of memory (`MOST_KEPT`).

Source: Kubernetes' API server, validation of ObjectMeta: 256 KiB of annotations a pod, label values of 63 characters.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, final

import msgspec
from msgspec import Raw, Struct

from cgroupfs.bounded import decoded
from cgroupfs.errors import InputError

LONGEST_JSON: Final = 16 * 1024
"""Bytes (UTF-8) of an annotation that holds a JSON object."""
LONGEST_WORD: Final = 2 * 1024
"""Bytes of any other value that is read: a CPU list, a word, a number, an argument of a probe."""
LONGEST_LABEL: Final = 256
"""Bytes of a label's value; the API server takes 63."""
LONGEST_NAME: Final = 253
"""Characters of a pod's, container's, owner's or priority class's name, as of the API server."""
MOST_KEPT: Final = {"annotation": 24 * 1024, "label": 8 * 1024}
"""Bytes of memory of all that is kept of a pod's annotations and of its labels, keys included.

Not the length of their text: one character outside of Latin-1 makes each character of a text cost two or four bytes.
"""
MOST_PROBLEMS: Final = 16
"""Messages about one pod; what else is wrong with it is not listed."""
_SMALL_MAP: Final = 16 * 1024
"""Bytes of JSON up to which a map is kept whole."""
_FEW: Final = 128
"""Keys up to which a decoded map is kept whole."""
# Keys that a message names, and characters of each.
_FEW_NAMED: Final = 4
_NAMED: Final = 60

# A reader of a key that is in no table gets nothing of a large map: each new key must be added. The tests take the keys
# from here and give each its worst values.
_JSON_ANNOTATIONS: Final = (
    "katalyst.kubewharf.io/cpu_enhancement",
    "katalyst.kubewharf.io/memory_enhancement",
    "koordinator.sh/blkioQOS",
    "koordinator.sh/cpuBurst",
    "koordinator.sh/eviction-policy",
    "koordinator.sh/memoryQOS",
    "koordinator.sh/oom-score-adj-spec",
    "node.koordinator.sh/extended-resource-spec",
    "node.koordinator.sh/resctrl",
    "scheduling.koordinator.sh/numa-topology-spec",
    "scheduling.koordinator.sh/resource-spec",
    "scheduling.koordinator.sh/resource-status",
    "volcano.sh/blkio-limit",
)
_WORD_ANNOTATIONS: Final = (
    "bypassd/capacity",
    "bypassd/do-not-evict",
    "bypassd/evict",
    "bypassd/eviction-notice",
    "descheduler.alpha.kubernetes.io/evict",
    "descheduler.alpha.kubernetes.io/prefer-no-eviction",
    "karpenter.sh/do-not-disrupt",
    "karpenter.sh/do-not-evict",
    "katalyst.kubewharf.io/numa_bind_result",
    "katalyst.kubewharf.io/numa_ids",
    "katalyst.kubewharf.io/numa_number",
    "katalyst.kubewharf.io/qos_level",
    "koordinator.sh/eviction-enabled",
    "koordinator.sh/eviction-priority",
    "koordinator.sh/oom-score-adj",
    "kubernetes.io/config.hash",
    "kubernetes.io/config.mirror",
    "kubernetes.io/config.source",
    "kubernetes.io/main-container-name",
    "target.workload.openshift.io/management",
    "volcano.sh/cache-limit",
    "volcano.sh/preemptable",
    "volcano.sh/quota-burst-time",
    "volcano.sh/qos-level",
    "volcano.sh/quota-turbo",
)
_MOST_IMPORTANT: Final = (
    # The class, and the pod's identity.
    "koordinator.sh/qosClass",
    "katalyst.kubewharf.io/qos_level",
    "volcano.sh/qos-level",
    "koordinator.sh/priority-class",
    "koordinator.sh/priority",
    "kubernetes.io/config.mirror",
    "kubernetes.io/config.source",
    "kubernetes.io/config.hash",
    # CPUs and memory that it requests.
    "scheduling.koordinator.sh/resource-status",
    "node.koordinator.sh/extended-resource-spec",
    "scheduling.koordinator.sh/resource-spec",
    "scheduling.koordinator.sh/numa-topology-spec",
    "katalyst.kubewharf.io/cpu_enhancement",
    "katalyst.kubewharf.io/memory_enhancement",
    "koordinator.sh/cpuBurst",
    "koordinator.sh/memoryQOS",
)
"""Where not all keys have room, these are kept first, in this order."""
UNOBEYED: Final[Mapping[str, str]] = {
    "koordinator.sh/networkQOS": (
        "limits of one pod's network are the CNI's (kubernetes.io/egress-bandwidth); BE pods together: policies.network"
    ),
    "katalyst.kubewharf.io/network_enhancement": "the interface is chosen before bypassd sees the pod",
    "katalyst.kubewharf.io/net_class_id": "the traffic class follows from the pod's class: policies.network",
    "katalyst.kubewharf.io/pod_evict_score": "the order of evictions: bypassd/evict, koordinator.sh/eviction-priority",
    "katalyst.kubewharf.io/cpu_weight_burst_ratio": "CPU weights follow from requests; quota: policies.quota_burst",
    "katalyst.kubewharf.io/cpu_weight_demand_cores": "CPU weights follow from requests",
    "katalyst.kubewharf.io/resource_package": "no packages; a pool of its own: cpuset_pool of cpu_enhancement",
    "katalyst.kubewharf.io/resource_pool": "a pool of its own: cpuset_pool of cpu_enhancement",
    "katalyst.kubewharf.io/pod_soft_evict_notify": "the notice before an eviction: bypassd/eviction-notice",
    "scheduling.koordinator.sh/device-allocated": "devices (GPU, RDMA) are given by their device plug-ins",
}
"""Annotations that have an effect at node level with their own agents and none here, with the nearest setting or mark.

A tenant who has written one believes in its effect, so it is named at the pod (docs/annotations.md has the reasons).
Marks of schedulers alone, and those that those agents write themselves, are not in it. Source: Koordinator's
apis/extension (v1.7), Katalyst's consts (v0.6).
"""
UNOBEYED_PARTS: Final[Mapping[tuple[str, str], str]] = {
    ("katalyst.kubewharf.io/cpu_enhancement", "cpu_burst_threshold"): (
        "the threshold of loans is the node's: policies.quota_burst"
    ),
}
"""Keys within an annotation that holds a JSON object; the rest of it is obeyed."""
_LIMITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(_WORD_ANNOTATIONS, LONGEST_WORD),
    **dict.fromkeys(_JSON_ANNOTATIONS, LONGEST_JSON),
    # Their presence is reported; unless the configuration names the key, the value is not kept, whatever its length.
    **dict.fromkeys(sorted(UNOBEYED), LONGEST_JSON),
}
ANNOTATIONS: Final[Mapping[str, int]] = {key: _LIMITS[key] for key in (*_MOST_IMPORTANT, *_LIMITS) if key in _LIMITS}
"""The annotations that are read, the most important first, and how many bytes each may have."""
LABELS: Final = frozenset(
    {
        "koordinator.sh/core-sched-group-id",
        "koordinator.sh/core-sched-policy",
        "koordinator.sh/priority",
        "koordinator.sh/priority-class",
        "koordinator.sh/qosClass",
        "volcano.sh/preemptable",
        # Marks of evictions may be either.
        "bypassd/do-not-evict",
        "bypassd/evict",
        "descheduler.alpha.kubernetes.io/evict",
        "descheduler.alpha.kubernetes.io/prefer-no-eviction",
        "karpenter.sh/do-not-disrupt",
        "karpenter.sh/do-not-evict",
        "koordinator.sh/eviction-enabled",
    }
)
"""The labels that are read."""
_UNUSED: Final = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})
"""A copy of the whole pod that ``kubectl apply`` writes."""

_MAP: Final = msgspec.json.Decoder(dict[str, str])
_TEXT: Final = msgspec.json.Decoder(str)
_NULL: Final = Raw(b"null")


def longest(annotation: str) -> int:
    """How many bytes (UTF-8) an annotation's value may have."""
    return ANNOTATIONS.get(annotation, LONGEST_WORD)


def utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _memory(texts: Mapping[str, str]) -> int:
    """Bytes that keys and values take in this process."""
    return sum(map(sys.getsizeof, texts)) + sum(map(sys.getsizeof, texts.values()))


def too_long(where: str, length: int, most: int, unit: str = "characters") -> str:
    """The message about a text that is refused for its length; never a part of the text."""
    return str(InputError(where, f"{length} {unit}", f"at most {most}"))


def note(problems: list[str], problem: str) -> None:
    """Add one message, unless there are many already."""
    if len(problems) < MOST_PROBLEMS:
        problems.append(problem)


class ReadKeys(Struct, frozen=True, kw_only=True):
    """Keys that the configuration names and that are read, too."""

    annotations: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()


@final
class MarkReader:
    """Takes what is read out of a pod's labels and annotations. One for all sources, so that all keep the same."""

    def __init__(self, configured: ReadKeys) -> None:
        self._load(configured)

    @property
    def configured(self) -> ReadKeys:
        return self._configured

    def use(self, configured: ReadKeys) -> bool:
        """From now on read the configuration's keys, too; True when they differ from before."""
        if configured == self._configured:
            return False
        self._load(configured)
        return True

    def annotations(self, result: Raw | Mapping[str, str], problems: list[str]) -> dict[str, str] | None:
        """The annotations that are kept, from JSON text or from a map; None: they cannot be read (a message)."""
        return self._annotations.read(result, problems)

    def labels(self, result: Raw | Mapping[str, str], problems: list[str]) -> dict[str, str] | None:
        return self._labels.read(result, problems)

    def _load(self, configured: ReadKeys) -> None:
        self._configured = configured
        more = dict.fromkeys(sorted(configured.annotations - ANNOTATIONS.keys()), LONGEST_WORD)
        self._annotations = _Table(
            "annotation", {**ANNOTATIONS, **more}, frozenset(UNOBEYED.keys() - configured.annotations)
        )
        first = (key for key in _MOST_IMPORTANT if key in LABELS)
        self._labels = _Table(
            "label", dict.fromkeys((*first, *sorted(LABELS), *sorted(configured.labels)), LONGEST_LABEL)
        )


@final
class _Table:
    """The keys of one kind of map, each with the most bytes of its value; the most important first.

    ``unread``: keys that are kept with an empty value.
    """

    def __init__(self, kind: str, longest: Mapping[str, int], unread: frozenset[str] = frozenset()) -> None:
        self._kind = kind
        self._unread = unread
        self._other = LONGEST_LABEL if kind == "label" else LONGEST_WORD
        """The most bytes of a value whose key is not in the table, in a small map."""
        self._longest = longest
        self._decoder: msgspec.json.Decoder[Any] | None = None  # of a type that is made here

    def read(self, result: Raw | Mapping[str, str], problems: list[str]) -> dict[str, str] | None:
        """What is kept of a map; None and a message: it is not a map of texts."""
        try:
            taken = self._decoded(result, problems) if isinstance(result, Raw) else self._picked(result)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
            note(problems, f"{self._kind}s unreadable: {str(exc)[:200]}")
            return None
        kept: dict[str, str] = {}
        for key, text in taken.items():
            most = self._longest.get(key)
            if key in self._unread:
                kept[key] = ""
            elif (size := utf8_bytes(text)) <= (self._other if most is None else most):
                kept[key] = text
            elif most is not None:
                note(problems, too_long(f"{self._kind} {key}", size, most, "bytes"))
        return kept if _memory(kept) <= MOST_KEPT[self._kind] else self._fitting(kept, problems)

    def _fitting(self, texts: Mapping[str, str], problems: list[str]) -> dict[str, str]:
        """What has room, the most important first, and one message with the keys that are read and have none."""
        kept: dict[str, str] = {}
        left, most, out = MOST_KEPT[self._kind], MOST_KEPT[self._kind], []
        for key in (
            *(key for key in self._longest if key in texts),
            *(key for key in texts if key not in self._longest),
        ):
            if (size := _memory({key: texts[key]})) <= left:
                kept[key] = texts[key]
                left -= size
            elif key in self._longest:
                out.append(key)
        if out:
            names = ", ".join(key[:_NAMED] for key in out[:_FEW_NAMED])
            names += f" and {len(out) - _FEW_NAMED} more" if len(out) > _FEW_NAMED else ""
            size = _memory(texts)
            note(problems, f"{self._kind}s: {size} bytes of memory: expected at most {most}; ignored: {names}")
        return kept

    def _decoded(self, result: Raw, problems: list[str]) -> Mapping[str, str]:
        text = memoryview(result)
        if len(text) <= _SMALL_MAP:
            # A null map is an empty one.
            return self._picked(_MAP.decode(text) if bytes(text[:4]) != b"null" else {})
        if self._decoder is None:
            # A struct and not a map: the decoder skips unknown keys without making objects of them. Of raw values the
            # length is known before they become texts.
            names = {f"key_{number}": key for number, key in enumerate(self._longest)}
            fields = [(name, Raw, msgspec.field(default=_NULL)) for name in names]
            self._decoder = msgspec.json.Decoder(msgspec.defstruct("Marks", fields, rename=names))
        read = self._decoder.decode(text)
        taken: dict[str, str] = {}
        for (key, most), raw in zip(
            self._longest.items(), (getattr(read, n) for n in read.__struct_fields__), strict=True
        ):
            value = memoryview(raw)
            if bytes(value[:4]) == b"null":
                continue
            if key in self._unread and bytes(value[:1]) == b'"':
                taken[key] = ""
            # In JSON a byte of the text takes six at most (``\u0000``), and the quotes two.
            elif len(value) > 6 * most + 2:
                note(problems, too_long(f"{self._kind} {key}", len(value), most, "bytes"))
            else:
                taken[key] = _TEXT.decode(value)
        return taken

    def _picked(self, texts: Mapping[str, str]) -> Mapping[str, str]:
        """A small map without its unused keys, else only the keys that are read."""
        if len(texts) <= _FEW:
            # A valid key is a prefix of 253 characters at most, a slash and a name of 63.
            return {key: texts[key] for key in texts if key not in _UNUSED and len(key) <= 2 * LONGEST_NAME}
        return {key: texts[key] for key in self._longest if key in texts}


def unobeyed(annotations: Mapping[str, str]) -> Iterator[str]:
    """One text for each such mark of a pod: its key, and what is nearest. Never a part of its value."""
    for key, nearest in UNOBEYED.items():
        if key in annotations:
            yield f"{key}: not obeyed: {nearest}"
    for (key, part), nearest in UNOBEYED_PARTS.items():
        if part in _keys(annotations.get(key, "")):
            yield f"{key}: {part}: not obeyed: {nearest}"


def key_of(text: str) -> str:
    """The mark of a text of `unobeyed`."""
    return text.partition(": not obeyed")[0]


def _keys(text: str) -> frozenset[str]:
    if not text or len(text) > LONGEST_JSON:
        return frozenset()
    try:
        value = decoded(msgspec.json.decode, text.encode())
    except (ValueError, UnicodeError):
        return frozenset()
    return frozenset(value) if isinstance(value, dict) else frozenset()


def shortened(text: str | None, where: str, problems: list[str], most: int = LONGEST_NAME) -> str | None:
    """A name unchanged; None and a message for a name longer than allowed."""
    if text is not None and len(text) > most:
        note(problems, too_long(where, len(text), most))
        return None
    return text


def limited(problems: Iterable[str]) -> tuple[str, ...]:
    """The first messages, each once."""
    return tuple(dict.fromkeys(problems))[:MOST_PROBLEMS]


def keys_of(marks: Collection[str]) -> frozenset[str]:
    """The keys of marks written as ``KEY`` or ``KEY=VALUE``."""
    return frozenset(mark.partition("=")[0] for mark in marks)
