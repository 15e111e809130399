"""Labels and annotations of pods: which of them are read, how long each may be, and what of a pod's maps is kept.

Their author is the tenant: up to 256 KiB of annotations and more than 1 MiB of labels a pod, of which a few short ones
mean anything here. A map of usual size is kept whole. Of a larger one only the keys that are read are kept: those of
the tables below, and those that the configuration names (`MarkReader.use`). The rest is passed over while decoding and
never becomes an object. A value that is longer than its key allows is refused with a message.

A reader of a key that is not in a table gets nothing of a large map, so each new key must be added here; the tests take
the keys from here and give each its worst values.

Source: Kubernetes' API server, validation of ObjectMeta: 256 KiB of annotations a pod, label values of 63 characters.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, final

import msgspec
from msgspec import Raw, Struct

from cgroupfs.errors import InputError

LONGEST_JSON: Final = 16 * 1024
"""Characters of an annotation that holds a JSON object."""
LONGEST_WORD: Final = 2 * 1024
"""Characters of any other value that is read: a CPU list, a word, a number, an argument of a probe."""
LONGEST_LABEL: Final = 256
"""Characters of a label's value; the API server takes 63."""
LONGEST_NAME: Final = 253
"""Characters of a pod's, container's, owner's or priority class's name, as of the API server."""
MOST_PROBLEMS: Final = 16
"""Messages about one pod; what else is wrong with it is not listed."""
_SMALL_MAP: Final = 16 * 1024
_FEW: Final = 128

_JSON_ANNOTATIONS: Final = (
    "katalyst.kubewharf.io/cpu_enhancement",
    "katalyst.kubewharf.io/memory_enhancement",
    "koordinator.sh/cpuBurst",
    "koordinator.sh/eviction-policy",
    "koordinator.sh/memoryQOS",
    "node.koordinator.sh/extended-resource-spec",
    "node.koordinator.sh/resctrl",
    "scheduling.koordinator.sh/numa-topology-spec",
    "scheduling.koordinator.sh/resource-spec",
    "scheduling.koordinator.sh/resource-status",
)
_WORD_ANNOTATIONS: Final = (
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
    "volcano.sh/cache-limit",
    "volcano.sh/preemptable",
    "volcano.sh/qos-level",
    "volcano.sh/quota-turbo",
)
ANNOTATIONS: Final[Mapping[str, int]] = {
    **dict.fromkeys(_JSON_ANNOTATIONS, LONGEST_JSON),
    **dict.fromkeys(_WORD_ANNOTATIONS, LONGEST_WORD),
}
"""The annotations that are read, and how many characters each may have."""
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

_MAP: Final = msgspec.json.Decoder(dict[str, str])
_TEXT: Final = msgspec.json.Decoder(str)
_NULL: Final = Raw(b"null")


def longest(annotation: str) -> int:
    """How many characters an annotation's value may have."""
    return ANNOTATIONS.get(annotation, LONGEST_WORD)


def too_long(where: str, length: int, most: int) -> str:
    """The message about a text that is refused for its length; never a part of the text."""
    return str(InputError(where, f"{length} characters", f"at most {most}"))


def note(problems: list[str], problem: str) -> None:
    """Add one message, unless there are many already."""
    if len(problems) < MOST_PROBLEMS:
        problems.append(problem)


class ReadKeys(Struct, frozen=True, kw_only=True):
    """Keys that are read."""

    annotations: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()


@final
class MarkReader:
    """Takes what is read out of a pod's labels and annotations. One for all sources, so that all keep the same."""

    def __init__(self, configured: ReadKeys | None = None) -> None:
        self._load(configured or ReadKeys())

    def use(self, configured: ReadKeys) -> bool:
        """From now on read the configuration's keys, too; True when they differ from before."""
        if configured == self._configured:
            return False
        self._load(configured)
        return True

    def annotations(self, found: Raw | Mapping[str, str], problems: list[str]) -> dict[str, str] | None:
        """The annotations that are kept, from JSON text or from a map; None: they cannot be read (a message)."""
        return self._annotations.read(found, problems)

    def labels(self, found: Raw | Mapping[str, str], problems: list[str]) -> dict[str, str] | None:
        """The same of labels."""
        return self._labels.read(found, problems)

    def _load(self, configured: ReadKeys) -> None:
        self._configured = configured
        self._annotations = _Table("annotation", {**dict.fromkeys(configured.annotations, LONGEST_WORD), **ANNOTATIONS})
        self._labels = _Table("label", dict.fromkeys((*configured.labels, *LABELS), LONGEST_LABEL))


@final
class _Table:
    """The keys of one kind of map, each with the most characters of its value."""

    def __init__(self, kind: str, longest: Mapping[str, int]) -> None:
        self._kind = kind
        self._other = LONGEST_LABEL if kind == "label" else LONGEST_WORD
        self._longest = longest
        self._decoder: msgspec.json.Decoder[Any] | None = None  # of a type that is made here

    def read(self, found: Raw | Mapping[str, str], problems: list[str]) -> dict[str, str] | None:
        """What is kept of a map; None and a message: it is no map of texts."""
        try:
            taken = self._decoded(found, problems) if isinstance(found, Raw) else self._picked(found)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
            note(problems, f"{self._kind}s cannot be read: {str(exc)[:200]}")
            return None
        kept: dict[str, str] = {}
        for key, text in taken.items():
            most = self._longest.get(key)
            if len(text) <= (self._other if most is None else most):
                kept[key] = text
            elif most is not None:
                note(problems, too_long(f"{self._kind} {key}", len(text), most))
        return kept

    def _decoded(self, found: Raw, problems: list[str]) -> Mapping[str, str]:
        text = memoryview(found)
        if len(text) <= _SMALL_MAP:
            # A null map is an empty one.
            return self._picked(_MAP.decode(text) if bytes(text[:4]) != b"null" else {})
        if self._decoder is None:
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
            # A character is six bytes at most, as an escape.
            if len(value) > 6 * most + 2:
                note(problems, too_long(f"{self._kind} {key}", len(value), most))
            else:
                taken[key] = _TEXT.decode(value)
        return taken

    def _picked(self, found: Mapping[str, str]) -> Mapping[str, str]:
        """A small map as it is but for what nobody reads, else only the keys that are read."""
        if len(found) <= _FEW:
            return {key: found[key] for key in found if key not in _UNUSED and len(key) <= 2 * LONGEST_NAME}
        return {key: found[key] for key in self._longest if key in found}


def shortened(text: str | None, where: str, problems: list[str], most: int = LONGEST_NAME) -> str | None:
    """A name as it is; None and a message for one that is longer than any name may be."""
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
