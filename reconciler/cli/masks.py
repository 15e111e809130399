"""What a capture must not carry: environment, arguments, tokens, keys, passwords. Pure: text in, masked text out.

Names are kept (labels, annotations, paths of secret files), so that a plan made from the capture is the node's own;
values go wherever a name or a form says that they may be a credential. When in doubt, masked.
"""

import json
import re
from typing import Any, Final

import yaml

from cgroupfs.bounded import decoded
from state import checksum

MASK: Final = "MASKED"
"""A plain word in every format that a masked file may have."""
_SECRET_NAME: Final = re.compile(
    r"(?i)(?:pass(?:word|wd|phrase)?|secret|token|credentials?|auth(?:orization)?|bearer|cookie"
    r"|(?:api|private|access|secret)[-_.]?key(?:[-_.]?id)?|connection[-_.]?string)$"
)
# Whole values that are nobody's business, whatever is in them.
_ALWAYS: Final = frozenset({"env", "Env", "args", "command", "httpHeaders", "staticPodURLHeader", "stringData", "exec"})
_MANIFESTS: Final = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})
_FORMS: Final = (
    re.compile(r"eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"),
    re.compile(r"-----BEGIN[^-]*PRIVATE KEY-----.*?(?:-----END[^-]*-----|\Z)", re.DOTALL),
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    re.compile(r"\b(?:gh[pousr]_|glpat-|xox[abprs]-)[\w-]{10,}"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]{8,}"),
)
# A word begins where none is before it: tried at each of its characters, a long one would take its length squared.
_PAIR: Final = re.compile(
    r"(?i)((?<![\w.-])[\w.-]*(?:password|passwd|passphrase|secret|token|api[-_]?key|private[-_]?key|credential)s?[\"']?\s*[=:]\s*)"
    r"(?![/{\[]|[\"']/|true\b|false\b|null\b)(\"[^\"]*\"|'[^']*'|[^\s,;&]+)"
)
_LONG: Final = re.compile(r"[\w-]{1025,}")
"""No name, no number and no digest is so long: a key, or made to keep the forms above busy."""
_DEEPEST: Final = 64
_MOST_ALIASES: Final = 8
_ALERTS: Final = re.compile(r"[\"']?alerts[\"']?\s*:")
_RANDOM: Final = re.compile(r"(?=[^ ]*[a-z])(?=[^ ]*[A-Z])(?=[^ ]*\d)[A-Za-z0-9+/_=-]{32,}")
_LINE: Final = re.compile(
    r"(?im)^([ \t]*[\"']?[\w.-]*(?:password|passwd|secret|token|credential|auth|private_?key)[\"']?\s*[:=][ \t]*)"
    r"(?![ \t]*$)(.+)$"
)

Json = Any
"""A decoded JSON document, which has no static type."""


def mask_text(text: str) -> str:
    """Free text: known forms of credentials, and values after a name that says so."""
    text = _LONG.sub(MASK, text)
    for form in _FORMS:
        text = form.sub(MASK, text)
    return _PAIR.sub(_masked_pair, text)


def mask_mark(name: str, value: str) -> str:
    """The value of one label or annotation: kept, unless name or form say that it is a credential."""
    if name in _MANIFESTS or _SECRET_NAME.search(name):
        return MASK
    masked = mask_text(value)
    return MASK if _RANDOM.fullmatch(masked) and "-" not in masked else masked


def mask_json(value: Json, name: str = "") -> Json:
    """A decoded document: pods, CRI answers, bundles, runtime states, manifests."""
    if name in _ALWAYS:
        return _emptied(value)
    match value:
        case dict():
            if name in {"labels", "annotations"}:
                return {key: mask_mark(key, text) if isinstance(text, str) else text for key, text in value.items()}
            return {key: mask_json(item, key) for key, item in value.items()}
        case list():
            return [mask_json(item, name) if not isinstance(item, str) else _item(item, name) for item in value]
        case str():
            if _SECRET_NAME.search(name) and not value.startswith("/"):
                return MASK
            return mask_text(value)
        case _:
            return value


def _loaded(text: str) -> Json:
    """A document that can be walked. Errors: `ValueError`."""
    return decoded(json.loads, text, deepest=_DEEPEST)


def _check_yaml(text: str) -> None:
    """The library builds its nodes recursively in C, where deep ones end the process. Errors: `ValueError`."""
    text.encode()
    depth = aliases = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        # Each may double what is walked.
        if depth > _DEEPEST or aliases > _MOST_ALIASES:
            raise ValueError("nested too deeply, or with too many aliases")


def mask_json_text(text: str) -> str:
    """The same for a file; one that is no JSON is masked as text."""
    try:
        return json.dumps(mask_json(_loaded(text)))
    except ValueError:
        return mask_config_text(text)


def mask_yaml_text(text: str) -> str:
    """A YAML file of documents (a manifest). Errors: `ValueError` when it cannot be read: none of it is kept then."""
    try:
        _check_yaml(text)
        documents = list(yaml.load_all(text, Loader=yaml.CSafeLoader))
    except (yaml.YAMLError, RecursionError) as exc:
        raise ValueError("no YAML") from exc
    made: str = yaml.dump_all([mask_json(one) for one in documents], Dumper=yaml.CSafeDumper, sort_keys=False)
    return made


def mask_config_text(text: str) -> str:
    """A configuration file (YAML, TOML) line by line, so that it stays as it was written; paths of files are kept."""
    lines: list[str] = []
    deeper: int | None = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if deeper is not None and (not line.strip() or indent > deeper or line.lstrip().startswith("- ")):
            continue
        deeper = None
        key = line.strip().partition(":")[0].strip("\"' ")
        if key in _ALWAYS and line.rstrip().endswith(":"):
            deeper = indent
            lines.append(f"{line.rstrip()} {{}}")
            continue
        lines.append(_LINE.sub(_kept_path, line))
    return mask_text("\n".join(lines) + ("\n" if text.endswith("\n") else ""))


def mask_own_config(text: str) -> str:
    """The agent's own configuration, without its sinks of alerts: their URLs and arguments are keys to somewhere.

    Errors: `ValueError` when they are written so that they cannot be told from the rest: none of it is kept then.
    """
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if inside and (not line.strip() or line[0] in " \t#-"):
            continue
        inside = _ALERTS.match(line) is not None
        lines.append("alerts: {}" if inside else line)
    masked = mask_config_text("\n".join(lines) + ("\n" if text.endswith("\n") else ""))
    if "alerts" in text:
        try:
            _check_yaml(masked)
            left = yaml.load(masked, Loader=yaml.CSafeLoader)
        except (yaml.YAMLError, RecursionError) as exc:
            raise ValueError("no YAML") from exc
        if isinstance(left, dict) and left.get("alerts"):
            raise ValueError("the sinks of alerts do not stand in lines of their own")
    return masked


def mask_devices(text: str) -> str:
    """The device checkpoint without the plugins' answers (they hold environment), its checksum made right again.

    A checkpoint that was wrong before stays wrong: what the agent makes of it must not change.
    """
    try:
        found = _loaded(text)
        data = found["Data"]
        entries = data["PodDeviceEntries"] or []
        version = 1 if any(isinstance(entry.get("DeviceIDs"), list) for entry in entries) else 2
        right = found["Checksum"] == checksum.devices(data["PodDeviceEntries"], data["RegisteredDevices"], version)
        for entry in entries:
            entry["AllocResp"] = None
        if right:
            found["Checksum"] = checksum.devices(data["PodDeviceEntries"], data["RegisteredDevices"], version)
    except (ValueError, LookupError, TypeError, AttributeError):
        return mask_text(text)
    return json.dumps(found)


def mask_allocations(text: str) -> str:
    """A checkpoint of in-place resizing without the whole pods (newer kubelets add them), its checksum right again.

    A checkpoint that was wrong before stays wrong.
    """
    try:
        found = _loaded(text)
        if "data" not in found:
            return text if found.keys() <= {"allocationEntries", "resizeStatusEntries", "checksum"} else mask_text(text)
        right = found["checksum"] == checksum.text(found["data"])
        inner = _loaded(found["data"])
        inner.pop("podList", None)
        found["data"] = json.dumps(inner, separators=(",", ":"))
        if right:
            found["checksum"] = checksum.text(found["data"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return mask_text(text)
    return json.dumps(found)


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
    return MASK if _SECRET_NAME.search(name) and not text.startswith("/") else mask_text(text)


def _masked_pair(match: re.Match[str]) -> str:
    quote = match[2][0] if match[2][0] in "\"'" else ""
    return f"{match[1]}{quote}{MASK}{quote}"


def _kept_path(match: re.Match[str]) -> str:
    value = match[2].strip().strip("\"'")
    plain = value.startswith("/") or value in {"true", "false", "null", "{}", "[]", "{", "["} or not value
    return match[0] if plain else f'{match[1]}"{MASK}"'
