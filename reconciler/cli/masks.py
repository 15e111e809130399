"""What a capture must not carry: environment, arguments, tokens, keys, passwords. Pure: text in, masked text out.

Of texts of others (pods, bundles, containerd's configuration) only the fields that the agent reads are kept (`Shape`),
and those are masked by name and form. Names of labels, annotations and secrets' files are kept, so that a plan made
from the capture is the node's own. When in doubt, masked.
"""

import json
import re
import tomllib
from contextlib import suppress
from typing import Any, Final

import yaml

from cgroupfs.bounded import decoded
from reconciler.pods.marks import ANNOTATIONS
from reconciler.settings.yaml_composer import events
from state import checksum

MASK: Final = "MASKED"
"""A plain word in every format that a masked file may have."""
_SECRET_NAME: Final = re.compile(
    r"(?i)(?:pass(?:word|wd|phrase)?|secret|token|credentials?|auth(?:orization)?|bearer|cookie"
    r"|(?:api|private|access|secret)[-_.]?key(?:[-_.]?id)?|connection[-_.]?string)$"
)
# Whole values that are never kept, whatever their content.
_ALWAYS: Final = frozenset({"env", "Env", "args", "command", "httpHeaders", "staticPodURLHeader", "stringData", "exec"})
_MANIFESTS: Final = frozenset(
    {
        "kubectl.kubernetes.io/last-applied-configuration",
        "io.kubernetes.cri-o.Annotations",
        "io.kubernetes.cri-o.Volumes",
    }
)
"""Annotations that have whole manifests, with their environment."""
_READ: Final = ("io.kubernetes.cri", "kubernetes.io/config.")
"""How annotations begin that the agent reads."""
_WORD: Final = re.compile(r"[\w./:@+-]{0,253}")
_LABELS: Final = frozenset({"io.kubernetes.cri-o.Labels"})
"""Maps of labels as JSON in an annotation."""
_FORMS: Final = (
    # A JSON Web Token, PEM, keys of AWS; tokens of GitHub, GitLab and Slack, of Vault; user and password of a URL.
    re.compile(r"eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"),
    re.compile(r"-----BEGIN[^-]*PRIVATE KEY-----.*?(?:-----END[^-]*-----|\Z)", re.DOTALL),
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    re.compile(r"\b(?:gh[pousr]_|glpat-|xox[abprs]-)[\w-]{10,}"),
    re.compile(r"\bhv[sbr]\.[\w-]{16,}"),
    # The last @ of the authority ends what is before the host.
    re.compile(r"(?<=://)[^\s/?#\"'<>]+(?=@)"),
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]{8,}"),
    re.compile(r"(?i)(?<=basic )[\w+/=-]{8,}"),
)
_URL: Final = re.compile(r"(?<=://)([^\s?#\"'<>:]*+(?::[^\s?#\"'<>:/]*+)?(?>(?:/[^\s?#\"'<>:]*+)?))[?#][^\s\"'<>]++")
_QUERY: Final = re.compile(r"\?[\w.%-]++=[^\s\"'<>]*+")
# Nothing is tried twice (possessive, or atomic as in `pod_list`): a word of names without a value takes its length, not
# its square.
_NAME: Final = re.compile(r"(?<![\w.-])([\w.-]++)\\*+[\"']?+\s*+[=:]\s*+")
_VALUE: Final = re.compile(
    r"(?!(?:true|false|null)\b)(?:\\++\"[^\"]*+\"?+|\"(?:[^\"\\]|(?=\\.)\\.)*+\"?+|'[^']*+'?+|\[[^\]]*+\]?+|\{[^}]*+\}?+|[^\s,;&]++)",
    re.DOTALL,
)
_SECRET_WORD: Final = re.compile(
    r"(?i)(?:password|passwd|passphrase|pwd|secret|token|api[-_]?key|private[-_]?key|access[-_]?key|credential)s?$"
)
_LONGEST_WORD: Final = 20
"""Characters at the end of a name that are searched: more than any word above has."""
_LONG: Final = re.compile(r"(?<![\w-])[\w-]{1025,}+")
"""No name, no number and no digest is so long: a key, or made to keep the forms above busy."""
_DEEPEST: Final = 64
_MOST_ALIASES: Final = 8
# Long, with both cases: a generated key, unless it consists of words.
_RANDOM: Final = re.compile(r"(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])[A-Za-z0-9+/_=.~-]{32,}")
# Words in lower case with digits (names, uids, digests), short ones in upper case, and those in camel case: of 30,000
# generated keys of 32 characters one has nothing else. A value with digits needs a dash or a dot between the words.
_WORDS: Final = re.compile(
    r"(?=[^-.]*[-.]|\D*\Z)"
    r"(?>(?:[+/_=.~-]|(?:[a-z0-9]++|[A-Z0-9]{1,16}+|[a-z]*+(?>(?:[A-Z][a-z]++\d*+)+))(?![A-Za-z0-9]))*)"
)
_STR: Final = "tag:yaml.org,2002:str"
_PLAIN_WORDS: Final = frozenset({"", "~", "null", "Null", "NULL", "true", "True", "false", "False"})
_PROGRAMS: Final = frozenset({"args", "argv", "command", "exec", "cmd"})
_EMPTIED: Final = frozenset({"env", "environment", "httpHeaders", "staticPodURLHeader", "stringData"})
_HIDDEN: Final = frozenset({"headers", "header"})

Shape = Any
"""What is kept of a document: a map of fields, a list of one shape, or a word: ``""`` a value, ``"labels"``,
``"annotations"``, ``"texts"`` a map of values, ``"pairs"`` a list of ``name=value``. In TOML ``*`` is any name.

A new field of the readers (`reconciler.sources.podspec`, `reconciler.sources.bundles`,
`reconciler.sources.runtime_roots`) is added here; a test compares a plan from a capture with the node's own.
"""


def _values(names: str) -> dict[str, Shape]:
    """Fields with a value each; between the ``names`` are blanks."""
    return dict.fromkeys(names.split(), "")


_RESOURCES: Final[Shape] = {"requests": "texts", "limits": "texts"}
_CONTAINER: Final[Shape] = {**_values("name restartPolicy"), "resources": _RESOURCES}
_STATUS: Final[Shape] = {**_values("name containerID"), "allocatedResources": "texts", "resources": _RESOURCES}
POD: Final[Shape] = {
    **_values("apiVersion kind"),
    "metadata": {
        **_values("name namespace uid deletionTimestamp deletionGracePeriodSeconds"),
        "labels": "labels",
        "annotations": "annotations",
        "ownerReferences": [_values("kind name controller")],
    },
    "spec": {
        **_values("priorityClassName priority nodeName terminationGracePeriodSeconds"),
        **{name: [_CONTAINER] for name in ("containers", "initContainers", "ephemeralContainers")},
    },
    "status": {
        **_values("qosClass podIP resize"),
        "podIPs": [_values("ip")],
        "conditions": [_values("type status reason message")],
        **{f"{kind}Statuses": [_STATUS] for kind in ("container", "initContainer", "ephemeralContainer")},
    },
}
POD_LIST: Final[Shape] = {**_values("kind apiVersion"), "items": [POD]}

BUNDLE: Final[Shape] = {
    # An OCI bundle's config.json ...
    "ociVersion": "",
    "annotations": "annotations",
    "linux": {
        "cgroupsPath": "",
        "resources": {
            "cpu": _values("shares quota period cpus mems"),
            "memory": _values("limit swap"),
            "pids": _values("limit"),
        },
    },
    # ... runc's state.json and crun's status, which have no field in common.
    **_values("pid cgroup-path status id init_process_pid"),
    "cgroup_paths": "texts",
    "config": {
        "labels": "pairs",
        "cgroups": _values(
            "path name parent scope_prefix memory memory_swap cpu_shares cpu_quota cpu_period cpuset_cpus cpuset_mems "
            "pids_limit"
        ),
    },
}

_RUNTIME: Final[Shape] = {**_values("runtime_root runtime_type"), "options": _values("Root SystemdCgroup")}
_CRI: Final[Shape] = {
    "containerd": {
        "default_runtime": _RUNTIME,
        "untrusted_workload_runtime": _RUNTIME,
        "runtimes": {"*": _RUNTIME},
    }
}
_LINUX: Final[Shape] = _values("runtime_root")
RUNTIME_CONFIG: Final[Shape] = {
    **_values("version root state imports"),
    "plugins": {
        **dict.fromkeys(("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri"), _CRI),
        **dict.fromkeys(("io.containerd.runtime.v1.linux", "linux"), _LINUX),
    },
    "crio": {
        **_values("root runroot storage_driver"),
        "runtime": {"runtimes": {"*": _values("runtime_root runtime_type")}},
    },
    "storage": _values("driver runroot graphroot"),
}
"""Configurations of containerd, of CRI-O, and of its storage."""

Json = Any
"""A decoded JSON document, which has no static type."""


def mask_text(text: str) -> str:
    """Free text: known forms of credentials, and values after a name that indicates one."""
    text = _LONG.sub(MASK, text)
    for form in _FORMS:
        text = form.sub(MASK, text)
    text = _QUERY.sub(f"?{MASK}", _URL.sub(rf"\1?{MASK}", text))
    parts: list[str] = []
    at = 0
    for match in _NAME.finditer(text):
        if match.start() < at or not _SECRET_WORD.search(match[1][-_LONGEST_WORD:]):
            continue
        value = _VALUE.match(text, match.end())
        if value is None:
            continue
        quote = value[0][0] if value[0][0] in "\"'" else ""
        parts += (text[at : match.end()], quote, MASK, quote)
        at = value.end()
    return "".join(parts) + text[at:]


def mask_mark(name: str, value: str) -> str:
    """The value of one label or annotation: kept, unless name or form say that it is a credential."""
    if name in _MANIFESTS or _SECRET_NAME.search(name):
        return MASK
    if name in _LABELS:
        with suppress(ValueError):
            return json.dumps(_kept(_loaded(value), "labels"))
    masked = mask_text(value)
    return MASK if _RANDOM.fullmatch(masked) and not _WORDS.fullmatch(masked) else masked


def mask_note(name: str, value: str) -> str:
    """The value of one annotation: what the agent reads as `mask_mark`, of the rest only what may be a label's value.

    Annotations hold whole documents of other programs; what a selector of the configuration names is a word.
    """
    read = name in ANNOTATIONS or name.startswith(_READ)
    return mask_mark(name, value) if read or _WORD.fullmatch(value) else MASK


def mask_json(value: Json, name: str = "") -> Json:
    """A decoded document: pods, CRI answers, bundles, runtime states, manifests."""
    if name in _ALWAYS:
        return _emptied(value)
    match value:
        case dict():
            if name in {"labels", "annotations"}:
                return _kept(value, name)
            return {key: mask_json(item, key) for key, item in value.items()}
        case list():
            return [mask_json(item, name) if not isinstance(item, str) else _item(item, name) for item in value]
        case str():
            return MASK if _SECRET_NAME.search(name) else mask_text(value)
        case _:
            return value


def _loaded(text: str) -> Json:
    """A document that can be walked. Errors: `ValueError`."""
    return decoded(json.loads, text, deepest=_DEEPEST)


def _check_yaml(text: str) -> None:
    """The library builds its nodes recursively in C, where deep ones end the process. Errors: `ValueError`."""
    text.encode()  # libyaml does not take lone surrogates
    aliases = 0
    for event in events(text, depth=_DEEPEST):
        aliases += isinstance(event, yaml.AliasEvent)
        # Each may double what is walked.
        if aliases > _MOST_ALIASES:
            raise ValueError("too many aliases")


def mask_pods_text(text: str) -> str:
    """The kubelet's list of pods: of each what the agent reads. Errors: `ValueError` for text other than JSON."""
    return json.dumps(kept_pods(_loaded(text)))


def mask_bundle_text(text: str) -> str:
    """An OCI runtime's ``config.json`` and runc's ``state.json``, as far as they are read. Errors: `ValueError`."""
    return json.dumps(_kept(_loaded(text), BUNDLE))


def mask_json_text(text: str) -> str:
    """A document of our own, by names and forms. Errors: `ValueError` for text other than JSON."""
    return json.dumps(mask_json(_loaded(text)))


def kept_pods(result: Json) -> Json:
    """A pod, or a list of them, with what the agent reads of it and nothing else."""
    return _kept(result, POD_LIST if isinstance(result, dict) and "items" in result else POD)


def _kept(value: Json, shape: Json) -> Json:
    """``value`` cut to ``shape``; what is of another kind than expected stays wrong, without its content."""
    match shape:
        case "labels" | "annotations":
            if not isinstance(value, dict):
                return None if value is None else MASK
            mask = mask_mark if shape == "labels" else mask_note
            return {key: mask(key, text) if isinstance(text, str) else MASK for key, text in value.items()}
        case "texts":
            return (
                {key: _kept(item, "") for key, item in value.items()} if isinstance(value, dict) else _kept(value, "")
            )
        case "pairs":
            return (
                [_item(entry, "labels") for entry in value if isinstance(entry, str)]
                if isinstance(value, list)
                else None
            )
        case dict():
            if not isinstance(value, dict):
                return None if value is None else MASK
            return {key: _kept(value[key], inner) for key, inner in shape.items() if key in value}
        case list():
            if not isinstance(value, list):
                return None if value is None else MASK
            return [_kept(entry, shape[0]) for entry in value]
        case _:
            if isinstance(value, str):
                return mask_text(value)
            return MASK if isinstance(value, dict | list) else value


def mask_yaml_text(text: str) -> str:
    """A YAML file of pods (a manifest). Errors: `ValueError` when it cannot be read: none of it is kept then."""
    try:
        _check_yaml(text)
        documents = list(yaml.load_all(text, Loader=yaml.CSafeLoader))
    except (yaml.YAMLError, RecursionError) as exc:
        raise ValueError("not YAML") from exc
    made: str = yaml.dump_all([kept_pods(document) for document in documents], Dumper=yaml.CSafeDumper, sort_keys=False)
    return made


def mask_own_config(text: str) -> str:
    """The agent's own configuration, without its sinks of alerts: their URLs and arguments are keys to somewhere.

    Errors: as `mask_config_text`.
    """
    return mask_config_text(text, ("alerts",))


def mask_config_text(text: str, left_out: tuple[str, ...] = ()) -> str:
    """A configuration in YAML: the same one, with other values where they may be secrets, and without comments.

    Errors: `ValueError` when it cannot be read: none of it is kept then.
    """
    # Nodes, not values: an unmasked one is written unchanged, so that it is still read the same way.
    try:
        _check_yaml(text)
        documents = list(yaml.compose_all(text, Loader=yaml.CSafeLoader))
        for document in documents:
            if isinstance(document, yaml.MappingNode):
                for number, (key, _) in enumerate(document.value):
                    if key.value in left_out:
                        document.value[number] = key, yaml.MappingNode("tag:yaml.org,2002:map", [], flow_style=True)
            _mask_node(document, "", False, set())
        made: str = yaml.serialize_all(documents, Dumper=yaml.CSafeDumper, allow_unicode=True, width=1 << 20)
    except (yaml.YAMLError, RecursionError) as exc:
        raise ValueError("not YAML") from exc
    return made


def mask_toml_text(text: str) -> str:
    """Configuration of a runtime: of it what the agent reads, where it keeps its directories. Errors: `ValueError`."""
    fields = decoded(tomllib.loads, text, deepest=_DEEPEST)
    lines: list[str] = []
    _toml(fields, RUNTIME_CONFIG, (), lines)
    return "\n".join(lines) + "\n" if lines else ""


def _toml(table: Json, shape: Json, path: tuple[str, ...], lines: list[str]) -> None:
    """Values first, then tables, as TOML has it. A ``*`` in the shape is any name."""
    inner = [(key, value, shape.get(key, shape.get("*"))) for key, value in table.items()]
    if path and inner:
        lines.append(f"[{'.'.join(map(_toml_text, path))}]")
    for key, value, kept in inner:
        if kept == "":
            lines.append(f"{_toml_text(key)} = {_toml_value(value)}")
    for key, value, kept in inner:
        if isinstance(kept, dict) and isinstance(value, dict):
            _toml(value, kept, (*path, key), lines)


def _toml_value(value: Json) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case list():
            return f"[{', '.join(_toml_text(mask_text(entry)) for entry in value if isinstance(entry, str))}]"
        case str():
            return _toml_text(mask_text(value))
        case _:
            return _toml_text(MASK)


def _toml_text(text: str) -> str:
    # Its escapes are JSON's, but for surrogate pairs and DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _mask_node(node: yaml.Node, name: str, hidden: bool, seen: set[tuple[int, bool]]) -> None:
    """``hidden``: all values below are secrets."""
    # An alias is the same node once more.
    if (id(node), hidden) in seen:
        return
    seen.add((id(node), hidden))
    if isinstance(node, yaml.ScalarNode):
        masked = mask_text(node.value)
        if hidden and not (node.style is None and node.value in _PLAIN_WORDS):
            masked = MASK
        if masked != node.value:
            node.value, node.tag, node.style = masked, _STR, None
        return
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            # The path of a program is kept; its arguments may be secrets.
            program = name in _PROGRAMS and not number and isinstance(item, yaml.ScalarNode) and item.value[:1] == "/"
            _mask_node(item, "", hidden or (name in _PROGRAMS and not program), seen)
        return
    for key, value in node.value:
        _mask_node(key, "", False, seen)
        inner = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
        if inner in _EMPTIED and not isinstance(value, yaml.ScalarNode):
            value.value, value.flow_style = [], True
            continue
        hide = hidden or inner in _HIDDEN or inner in _EMPTIED or _SECRET_NAME.search(inner) is not None
        hide = hide or (inner in _PROGRAMS and isinstance(value, yaml.ScalarNode))
        _mask_node(value, inner, hide, seen)


def mask_devices(text: str) -> str:
    """The device checkpoint without the plugins' answers (they hold environment), its checksum made right again.

    A checkpoint that was wrong before stays wrong: what the agent makes of it must not change.
    """
    try:
        result = _loaded(text)
        data = result["Data"]
        entries = data["PodDeviceEntries"] or []
        right = result["Checksum"] == checksum.devices(data["PodDeviceEntries"], data["RegisteredDevices"])
        for entry in entries:
            entry["AllocResp"] = None
        if right:
            result["Checksum"] = checksum.devices(data["PodDeviceEntries"], data["RegisteredDevices"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return mask_text(text)
    return json.dumps(result)


def mask_allocations(text: str) -> str:
    """A checkpoint of in-place resizing without the whole pods (newer kubelets add them), its checksum right again.

    A checkpoint that was wrong before stays wrong.
    """
    try:
        result = _loaded(text)
        if "data" not in result:
            return (
                text if result.keys() <= {"allocationEntries", "resizeStatusEntries", "checksum"} else mask_text(text)
            )
        right = result["checksum"] == checksum.text(result["data"])
        inner = _loaded(result["data"])
        inner.pop("podList", None)
        result["data"] = json.dumps(inner, separators=(",", ":"))
        if right:
            result["checksum"] = checksum.text(result["data"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return mask_text(text)
    return json.dumps(result)


def _emptied(value: Json) -> Json:
    """The shape of a value with nothing in it: how many variables, with their names, or how many arguments."""
    match value:
        case list():
            return [_emptied(item) for item in value]
        case dict():
            name = {"name": value["name"]} if isinstance(value.get("name"), str) else {}
            return {**name, "value": MASK} if name else {}
        case str():
            return f"{value.partition('=')[0]}={MASK}" if re.match(r"[A-Za-z_]\w*=", value) else MASK
        case _:
            return MASK


def _item(text: str, name: str) -> str:
    """One text of a list; runc keeps annotations as ``name=value``."""
    key, equals, value = text.partition("=")
    if name == "labels" and equals:
        return f"{key}={mask_mark(key, value)}"
    return MASK if _SECRET_NAME.search(name) else mask_text(text)
