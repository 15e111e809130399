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
        item.look_again()
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
