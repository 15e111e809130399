"""A kubelet that fails to answer in every way: one clear message, nothing that is applied is lost, and it recovers."""

import re
from collections.abc import Callable

from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes.kubelet.api import Behaviour
from tests.fakes.node import DirectoryNode

Make = Callable[..., Daemon]
IMPATIENT = {"kubelet.timeout_s": 5.0}
KOORDINATOR = "koordinator.sh/qosClass"
WORDS: dict[Behaviour | None, str] = {
    Behaviour.UNAUTHORIZED: ": 401: ",
    Behaviour.BROKEN: "HTTP 500",
    Behaviour.HALF: "without sending complete message body",
    Behaviour.HANGING: "no answer",
    None: "refused",
}


# What a BE pod that starts raises for some seconds: each round adds one.
ALLOWANCE = re.compile(r"/(besteffort|pod[^/]+)/cpu\.(cfs_quota_us|shares)$")


def bounds(node: DirectoryNode) -> dict[str, str]:
    return {file: text for file, text in node.tree().items() if not ALLOWANCE.search(file)}


def kubelet_problems(daemon: Daemon) -> list[str]:
    return [line for line in daemon.problems() if line.startswith("kubelet:")]


def test_a_failing_kubelet_is_one_message_and_nothing_is_lost(node: DirectoryNode, daemon: Make) -> None:
    marked = node.add("marked", qos="burstable", shares=512, labels={KOORDINATOR: "BE"})
    item = daemon(constants=IMPATIENT).up()
    wait_for(lambda: bounded(node, marked.main), told=item.tail)
    for mood, word in WORDS.items():
        before = bounds(node)
        _fail(node, mood)
        said = wait_for(lambda: kubelet_problems(item), told=item.tail)
        assert len(said) == 1, (mood, said)
        assert word in said[0], mood
        number = node.kubelet.api.requests
        item.look_again(1)
        if mood is not None:
            wait_for(lambda request=number: node.kubelet.api.requests > request, told=item.tail)  # type: ignore[misc]
        assert len(item.said("kubelet", word)) == 1, f"{mood}: said once, not at every question"
        assert bounds(node) == before, mood
        assert item.pod(marked.uid)["class"] == "reclaimed", mood
        # A new pod meanwhile is bounded derived from other facts of it.
        late = node.add()
        wait_for(lambda late=late: bounded(node, late.main), told=item.tail)  # type: ignore[misc]
        if mood is None:
            node.kubelet.api.start()
        node.kubelet.api.behaviour = Behaviour.GOOD
        wait_for(lambda: kubelet_problems(item) == [], told=item.tail)
        wait_for(
            lambda late=late: item.pod(late.uid).get("meta_source", "").startswith("kubelet"),  # type: ignore[misc]
            told=item.tail,
        )


def _fail(node: DirectoryNode, mood: Behaviour | None) -> None:
    if mood is None:
        node.kubelet.api.stop()
    else:
        node.kubelet.api.behaviour = mood


def test_an_empty_list_forgets_no_pod_that_is_there(node: DirectoryNode, daemon: Make) -> None:
    marked = node.add("marked", qos="burstable", shares=512, labels={KOORDINATOR: "BE"})
    item = daemon().up()
    wait_for(lambda: bounded(node, marked.main), told=item.tail)
    before = node.tree()
    node.kubelet.api.behaviour = Behaviour.EMPTY
    number = node.kubelet.api.requests
    wait_for(lambda: node.kubelet.api.requests >= number + 2, told=item.tail)
    details = {row["name"]: row["detail"] for row in item.state("sources")["sources"]}
    wait_for(
        lambda: "an empty list" in {row["name"]: row["detail"] for row in item.state("sources")["sources"]}["kubelet"],
        told=lambda: str(details),
    )
    assert node.tree() == before
    assert item.pod(marked.uid)["class"] == "reclaimed"


def test_a_start_without_a_kubelet_is_ready_all_the_same(node: DirectoryNode, daemon: Make) -> None:
    be = node.add("be")
    node.kubelet.api.behaviour = Behaviour.HANGING
    item = daemon(constants=IMPATIENT).up()
    wait_for(lambda: bounded(node, be.main), told=item.tail)
    wait_for(lambda: kubelet_problems(item), told=item.tail)
    assert item.pod(be.uid)["title"] == "default/be", "the bundle knows the name"


def test_one_bad_pod_in_the_list_does_not_stop_the_others(node: DirectoryNode, daemon: Make) -> None:
    bad = node.add("bad", qos="burstable", shares=512, labels={KOORDINATOR: "BE"})
    good = node.add("good", qos="burstable", shares=512, labels={KOORDINATOR: "BE"})
    bad.meta["labels"] = ["not", "a", "mapping"]
    item = daemon().up()
    wait_for(lambda: bounded(node, good.main), told=item.tail)
    # Never read: by its QoS, and marked so.
    assert (item.pod(bad.uid)["class"], item.pod(bad.uid)["class_certain"]) == ("shared", False)
    said = [line for line in item.problems() if line.startswith("default/bad: ")]
    assert len(said) == 1
