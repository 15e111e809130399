"""The targets of probes: which pods are selected, and the pods' values in URLs and arguments."""

import pytest
from msgspec.structs import replace

from reconciler.pods.selectors import LabelSelector
from reconciler.signals.probe_config import CommandProbe, HttpProbe, Probe, url_parts
from reconciler.signals.probe_targets import ProbeTarget, ProbeTargetKey, filled, selected, targets_of
from state.model import Pod
from state.pod_index import FixedTable
from tests.reconciler.nodes import node, online

URL = "http://{ip}:{annotation:prometheus.io/port}/{annotation:prometheus.io/path}?pod={name}"


def web(uid: str = "web-1", ip: str | None = "10.0.0.7", **annotations: str) -> Pod:
    given = {"prometheus.io/port": "9100", "prometheus.io/path": "/metrics"} | annotations
    return replace(online(uid), ip=ip, labels={"app": "web"}, annotations=given)


def http(url: str) -> Probe:
    return Probe(pods=("web-*",), http=HttpProbe(url=url))


def url_of(url: str, pod: Pod) -> str:
    target = ProbeTarget(key=ProbeTargetKey("p", pod.uid), title="t", probe=http(url), uids=(pod.uid,))
    return filled(target, pod).url


def argv_of(pod: Pod, *argv: str) -> tuple[str, ...]:
    probe = Probe(pods=("web-*",), command=CommandProbe(argv=("/ask", *argv)))
    return filled(ProbeTarget(key=ProbeTargetKey("p", pod.uid), title="t", probe=probe, uids=(pod.uid,)), pod).argv[1:]


def test_a_pod_is_selected_by_namespace_name_and_labels_together() -> None:
    pod = web()
    assert selected(Probe(namespaces=("n*",), command=CommandProbe(argv=("/a",))), pod)
    assert not selected(Probe(namespaces=("n*",), pods=("db",), command=CommandProbe(argv=("/a",))), pod)
    by_label = Probe(labels=LabelSelector(match_labels={"app": "web"}), command=CommandProbe(argv=("/a",)))
    assert selected(by_label, pod)
    assert not selected(by_label, replace(pod, labels={}))
    # Labels that no source has are not empty ones.
    assert not selected(by_label, replace(pod, classification=replace(pod.classification, certain=False)))
    assert not selected(Probe(pods=("*",), command=CommandProbe(argv=("/a",))), replace(pod, name=None))


def test_a_url_has_the_pods_words() -> None:
    assert url_of(URL, web()) == "http://10.0.0.7:9100/metrics?pod=web-1"
    assert url_of("https://{ip}/{uid}/{namespace}", web(ip="fd00::7")) == "https://[fd00::7]/web-1/ns"
    assert url_of("http://{ip}:{label:app}/", replace(web(), labels={"app": "80"})) == "http://10.0.0.7:80/"


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (web(ip=None), "{ip} has no value; it appears in the kubelet's pod list"),
        (web(**{"prometheus.io/port": "80@evil.example/"}), "{annotation:prometheus.io/port} is '80@evil.example/'"),
        (web(**{"prometheus.io/port": ""}), "which is not allowed there"),
        (web(**{"prometheus.io/port": "99999"}), "its values make no URL: expected http://HOST[:PORT]"),
        (web(**{"prometheus.io/port": "\u0668\u0660"}), "which is not allowed there"),
        (web(ip="10.0.0.7 "), "its values make no URL"),
        (web(**{"prometheus.io/path": "/a?b=c d"}), "which is not allowed there"),
        (web(**{"prometheus.io/path": "/\r\nHost: x"}), "which is not allowed there"),
        (replace(web(), annotations={}), "{annotation:prometheus.io/port} has no value"),
    ],
)
def test_what_cannot_stand_in_a_url_is_told(pod: Pod, words: str) -> None:
    with pytest.raises(ValueError, match=r"annotation|\{ip|make no URL") as caught:
        url_of(URL, pod)
    assert words in str(caught.value)


def test_arguments_have_the_pods_words_and_stay_arguments() -> None:
    pod = web(note="; rm -rf $(HOME) 'x'")
    assert argv_of(pod, "--pod={namespace}/{name}", "{annotation:note}", "{x}") == (
        "--pod=ns/web-1",
        "; rm -rf $(HOME) 'x'",
        "{x}",
    )
    with pytest.raises(ValueError, match="looks like an option: '--output=/etc/passwd'"):
        argv_of(web(note="--output=/etc/passwd"), "{annotation:note}")
    assert argv_of(web(note="--x"), "--note={annotation:note}") == ("--note=--x",)
    with pytest.raises(ValueError, match="not allowed there"):
        argv_of(web(note="a\0b"), "{annotation:note}")


def test_pods_are_asked_each_on_its_own_where_the_question_names_them_and_together_where_not() -> None:
    view = node(web("web-1"), web("web-2", ip=None), online("db-1"))
    both = {"each": http("http://{ip}/"), "all": http("http://svc/"), "none": replace(http("http://x/"), pods=("q",))}
    targets = targets_of(both, view)
    assert {key: target.uids for key, target in targets.targets.items()} == {
        ProbeTargetKey("each", "web-1"): ("web-1",),
        ProbeTargetKey("all", ""): ("web-1", "web-2"),
    }
    assert list(targets.problems) == [ProbeTargetKey("each", "web-2")]
    assert targets.problems[ProbeTargetKey("each", "web-2")].startswith("probe each, pod ns/web-2: {ip} has no value")


def test_a_url_is_split_where_a_placeholders_slash_does_not_count() -> None:
    assert url_parts("http://{ip}:{annotation:a/b}/x/{label:c/d}?y") == (
        "http",
        "{ip}:{annotation:a/b}",
        "/x/{label:c/d}?y",
    )
    assert url_parts("nothing") == ("", "", "")


def test_targets_are_made_again_only_when_a_pod_or_a_probe_has_changed() -> None:
    probes = {"p": http(URL)}
    view = replace(node(), pods=FixedTable({"web-1": web()}))
    first = targets_of(probes, view)
    assert targets_of(probes, replace(view, now=view.now + 1)) is first
    assert targets_of({"q": http(URL)}, view).targets.keys() == {ProbeTargetKey("q", "web-1")}
    moved = replace(view, pods=FixedTable({"web-1": web(ip="10.0.0.8")}))
    assert [target.url for target in targets_of(probes, moved).targets.values()] == [url_of(URL, web(ip="10.0.0.8"))]
