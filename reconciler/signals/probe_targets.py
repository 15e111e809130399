"""Targets of a probe: its pods, and the requests with the pods' values filled in. Pure."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from reconciler.clients.endpoint import split_url
from reconciler.pods.selectors import any_glob
from reconciler.signals.probe_config import (
    PLACEHOLDER,
    CommandProbe,
    HttpProbe,
    Probe,
    PrometheusProbe,
    url_parts,
)
from state.evidence import host_subject
from state.model import NodeView, Pod
from state.pod_index import derived

# A value of the pod's author becomes part of a URL or an argument: it must not contain a delimiter of that part.
_URL_WORD: Final = re.compile(r"[A-Za-z0-9._~/-]{1,253}")
_PORT: Final = re.compile(r"\d{1,5}", re.ASCII)
_ARGUMENT: Final = re.compile(r"[^\x00-\x1f\x7f]{0,1024}")


class ProbeTargetKey(NamedTuple):
    """One measurement that is repeated. ``uid`` empty: of all the probe's pods together."""

    probe: str
    uid: str


class ProbeTarget(Struct, frozen=True, kw_only=True):
    """One request. ``title`` for messages.

    ``uids``: the pods that the result is of, or the subjects of host workloads.
    """

    key: ProbeTargetKey
    title: str
    probe: Probe
    uids: tuple[str, ...]
    argv: tuple[str, ...] = ()
    url: str = ""


class ProbeTargets(Struct, frozen=True, kw_only=True):
    """All targets, and why some pods have none, by target."""

    targets: Mapping[ProbeTargetKey, ProbeTarget] = {}
    problems: Mapping[ProbeTargetKey, str] = {}


def selected(probe: Probe, pod: Pod) -> bool:
    """Whether a probe selects this pod; a pod with unknown labels matches no probe with a label selector."""
    if not probe.labels.empty and not (pod.classification.certain and probe.labels.matches(pod.labels)):
        return False
    return any_glob(probe.namespaces, pod.namespace) and any_glob(probe.pods, pod.name)


def targets_of(probes: Mapping[str, Probe], view: NodeView) -> ProbeTargets:
    """The targets of these probes. Read each pass, and made only when a pod has changed."""
    return derived(view.pods, _targets, probes)


def _targets(pods_by_uid: Mapping[str, Pod], probes: Mapping[str, Probe]) -> ProbeTargets:
    targets: dict[ProbeTargetKey, ProbeTarget] = {}
    problems: dict[ProbeTargetKey, str] = {}
    for name, probe in probes.items():
        if probe.host_workloads:
            key = ProbeTargetKey(name, "")
            uids = tuple(map(host_subject, probe.host_workloads))
            targets[key] = filled(ProbeTarget(key=key, title=f"probe {name}", probe=probe, uids=uids), None)
            continue
        pods = [pod for _, pod in sorted(pods_by_uid.items()) if selected(probe, pod)]
        if not pods:
            continue
        if not probe.per_pod:
            key = ProbeTargetKey(name, "")
            uids = tuple(pod.uid for pod in pods)
            targets[key] = filled(ProbeTarget(key=key, title=f"probe {name}", probe=probe, uids=uids), None)
            continue
        for pod in pods:
            key = ProbeTargetKey(name, pod.uid)
            title = f"probe {name}, pod {pod.title}"
            try:
                targets[key] = filled(ProbeTarget(key=key, title=title, probe=probe, uids=(pod.uid,)), pod)
            except ValueError as exc:
                problems[key] = f"{title}: {exc}"
    return ProbeTargets(targets=targets, problems=problems)


def filled(target: ProbeTarget, pod: Pod | None) -> ProbeTarget:
    """The placeholders replaced by the pod's values. Errors: `ValueError` naming one without a usable value."""
    probe = target.probe
    if probe.command is not None:
        return replace(target, argv=_arguments(probe.command, pod))
    http_probe = probe.http or probe.prometheus
    assert http_probe is not None
    return replace(target, url=_url(http_probe, pod))


def _arguments(command: CommandProbe, pod: Pod | None) -> tuple[str, ...]:
    if pod is None:
        return command.argv
    parts = []
    for text in command.argv:
        word = PLACEHOLDER.sub(lambda match: _value(match, pod, _ARGUMENT), text)
        if word.startswith("-") and not text.startswith("-"):
            raise ValueError(f"{text} looks like an option: {word!r}")
        parts.append(word)
    return tuple(parts)


def _url(probe: HttpProbe | PrometheusProbe, pod: Pod | None) -> str:
    if pod is None:
        return probe.url
    scheme, host, tail = url_parts(probe.url)
    if pod.ip is not None and ":" in pod.ip:
        host = host.replace("{ip}", f"[{pod.ip}]")
    host = PLACEHOLDER.sub(lambda match: _value(match, pod, None if match[1] == "ip" else _PORT), host)
    # Paths are often written with their first slash, which the template already has.
    url = f"{scheme}://{host}{PLACEHOLDER.sub(lambda match: _value(match, pod, _URL_WORD).lstrip('/'), tail)}"
    try:
        split_url(url)
    except ValueError as exc:
        # A port of 99999, for one: the author of a pod must not end the measuring of all others.
        raise ValueError(f"its values make no URL: {exc}") from exc
    return url


def _value(match: re.Match[str], pod: Pod, allowed: re.Pattern[str] | None) -> str:
    word, table, key = match[1], match[2], match[3]
    if word is not None:
        value = {"ip": pod.ip, "name": pod.name, "namespace": pod.namespace, "uid": pod.uid}[word]
    else:
        value = (pod.labels if table == "label" else pod.annotations).get(key)
    if value is None:
        why = "; it appears in the kubelet's pod list once the pod has one" if word == "ip" else ""
        raise ValueError(f"{match[0]} has no value{why}")
    if allowed is not None and not allowed.fullmatch(value):
        raise ValueError(f"{match[0]} is {value[:60]!r}, which is not allowed there")
    return value
