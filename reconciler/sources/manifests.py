"""Static pods from the kubelet's manifest directory: the whole pod, readable with every API down.

Source: Kubernetes documentation, "static pods"; the kubelet's file source: every file of the directory that does not
begin with a dot, no sub-directories, YAML or JSON by content, one pod a file.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar, final

import msgspec
from msgspec import Struct

from cgroupfs.errors import InputError, SourceError
from reconciler.pods.marks import MarkReader
from reconciler.runtime.safe_files import FileRule, list_directory, read_file
from reconciler.settings.yaml import YamlDocument, read_yaml
from reconciler.sources.podspec import PodObject, marks_of, meta_of
from state.model import PodMeta

NAME: Final = "manifest"

_LARGEST: Final = 1024 * 1024
_DEFAULT_NAMESPACE: Final = "default"

T = TypeVar("T")


class Manifest(Struct, frozen=True, kw_only=True):
    """One static pod as its file describes it. ``meta.uid`` is empty when the file has no uid.

    ``meta.name`` is the file's, without the node.
    """

    path: str
    meta: PodMeta


class Manifests(Struct, frozen=True, kw_only=True):
    """All manifests that could be read, and a message for each file that could not."""

    found: tuple[Manifest, ...] = ()
    problems: tuple[str, ...] = ()


class _MarkedMeta(Struct, frozen=True):
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Marked(Struct, frozen=True):
    metadata: _MarkedMeta = _MarkedMeta()


def read_manifest(text: str, path: str, reader: MarkReader) -> Manifest:
    """One file. ``reader`` takes what is kept of labels and annotations.

    Errors: `InputError` with file, line and column for what the kubelet would not take either.
    """
    document = read_yaml(text, path)
    if not isinstance(document.data, dict):
        raise document.refusal((), "a Pod")
    if document.data.get("kind") != "Pod":
        raise document.refusal(("kind",), "Pod, the only kind that a static manifest may have")
    pod, marked = _converted(document, PodObject), _converted(document, _Marked).metadata
    if not pod.metadata.name:
        raise document.refusal(("metadata",), "a name")
    marks = marks_of(marked.labels or {}, marked.annotations or {}, reader)
    try:
        # `meta_of` refuses a pod without any uid.
        meta = meta_of(pod, NAME, marks, uid=pod.metadata.uid or "?", static=True)
    except ValueError as exc:
        raise document.refusal(("metadata", "uid"), "a uid") from exc
    uid = "" if meta.uid == "?" else meta.uid
    meta = msgspec.structs.replace(meta, uid=uid, namespace=meta.namespace or _DEFAULT_NAMESPACE)
    return Manifest(path=path, meta=meta)


def _converted(document: YamlDocument, kind: type[T]) -> T:
    try:
        return msgspec.convert(document.data, kind)
    except msgspec.ValidationError as exc:
        raise document.explain(exc) from exc


def resolve(manifests: Iterable[Manifest], names: Mapping[str, tuple[str, str]], node: str | None) -> list[PodMeta]:
    """The manifests' pods under the uids of their cgroups; one without a uid is joined by name, ``<name>-<node>``.

    ``names`` maps the uids that exist to (namespace, name) from other sources (bundles, CRI); ``node`` is the node's
    name where known. A manifest whose pod is not among them is left out: it describes no existing directory.
    Source: Kubernetes, pkg/kubelet/config/common.go (applyDefaults).
    """
    # Without a uid in the manifest it is a hash of the kubelet's internal structures, which cannot be computed here.
    # The hash has no dash. A uid of the API server has: its pod may have a name that begins like a static one's.
    by_name = {name: uid for uid, name in names.items() if "-" not in uid}
    pods: list[PodMeta] = []
    for manifest in manifests:
        meta = manifest.meta
        if meta.uid:
            full = names[meta.uid][1] if meta.uid in names else meta.name
            pods.append(msgspec.structs.replace(meta, name=full))
            continue
        namespace, short = meta.namespace or _DEFAULT_NAMESPACE, meta.name or ""
        # The kubelet's name of its node is in lower case.
        suffixes = [node.lower()] if node else _suffixes(namespace, short, by_name)
        # Two nodes' names cannot both fit on one node: an ambiguous prefix matches nothing.
        uid = by_name.get((namespace, f"{short}-{suffixes[0]}")) if len(suffixes) == 1 else None
        if uid is not None:
            pods.append(msgspec.structs.replace(meta, uid=uid, name=f"{short}-{suffixes[0]}"))
    return pods


def _suffixes(namespace: str, short: str, by_name: Mapping[tuple[str, str], str]) -> list[str]:
    prefix = f"{short}-"
    return [name.removeprefix(prefix) for space, name in by_name if space == namespace and name.startswith(prefix)]


@final
class ManifestDirectory:
    """Reads the directory again on demand, a file only when it has changed.

    A file that became invalid keeps its last good pod. ``path`` is the kubelet's; ``root`` the node's prefix; ``rule``
    names the origin of the path.
    """

    def __init__(self, path: str, marks: MarkReader, root: str = "/", rule: FileRule = FileRule.OPERATOR) -> None:
        self._marks = marks
        self._path = path
        self._root = root
        self._rule = rule
        self._directory = os.path.join(root, path.lstrip("/"))
        self._seen: dict[str, tuple[object, Manifest | None, str | None]] = {}
        """By file name: its version, the last good manifest, and what is wrong with it now."""

    def read(self) -> Manifests:
        """The manifests now.

        Errors: `SourceError` when the directory itself cannot be read.
        """
        try:
            listed = list_directory(self._path, self._rule, root=self._root)
            names = [name for name in listed if not name.startswith(".")]
        except OSError as exc:
            raise SourceError(NAME, f"{self._path}: {exc.strerror or exc}") from exc
        seen: dict[str, tuple[object, Manifest | None, str | None]] = {}
        for name in names:
            file = os.path.join(self._directory, name)
            if os.path.isdir(file):
                continue
            seen[name] = self._read_file(name, file)
        self._seen = seen
        return Manifests(
            found=tuple(manifest for _, manifest, _ in seen.values() if manifest is not None),
            problems=tuple(problem for _, _, problem in seen.values() if problem is not None),
        )

    def _read_file(self, name: str, file: str) -> tuple[object, Manifest | None, str | None]:
        before = self._seen.get(name)
        shown = os.path.join(self._path, name)
        last_good = before[1] if before else None
        try:
            stat = os.stat(file)
            # Other keys are read now: its last reading has others.
            version = (self._marks.configured, stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if before is not None and before[0] == version:
                return before
            if stat.st_size > _LARGEST:
                return version, last_good, str(InputError(shown, stat.st_size, "at most 1 MiB"))
            text = read_file(shown, self._rule, root=self._root, largest=_LARGEST).decode()
            return version, read_manifest(text, shown, self._marks), None
        except OSError as exc:
            # No version: it may become readable without a change, and is read again.
            return None, last_good, f"{shown}: {exc.strerror or exc}"
        except UnicodeDecodeError:
            return version, last_good, f"{shown}: not UTF-8 text"
        except InputError as exc:
            return version, last_good, str(exc)
