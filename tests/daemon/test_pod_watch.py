"""The daemon with an API server: a pod's changed label is a written value long before the kubelet's next list."""

import os
import statistics
import time
from collections.abc import Callable

from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes.api_server import FakeApiServer, in_thread
from tests.fakes.node import DirectoryNode

Make = Callable[..., Daemon]
KOORDINATOR = "koordinator.sh/qosClass"
TIMES = int(os.environ.get("BYPASSD_WATCH_TIMES", "4"))


def test_a_changed_label_is_written_between_two_lists_of_the_kubelet(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("web", qos="burstable", shares=512, labels={KOORDINATOR: "LS"})
    with in_thread(FakeApiServer) as server:
        server.change(pod.uid, labels={KOORDINATOR: "LS"})
        # The kubelet is queried only at the start: what changes later is known from the watch.
        item = daemon(
            constants={"kubelet.period_s": 3600}, apiserver={"server": f"http://127.0.0.1:{server.port}"}
        ).up()
        wait_for(lambda: item.pod(pod.uid).get("class") == "shared", told=item.tail)
        wait_for(lambda: server.watches, told=item.tail)
        requests = node.kubelet.api.requests
        latencies = []
        for _ in range(TIMES):
            for name, is_written in (("BE", True), ("LS", False)):
                began = time.monotonic()
                server.change_soon(pod.uid, labels={KOORDINATOR: name})
                wait_for(lambda is_written=is_written: bounded(node, pod.main) is is_written, told=item.tail)  # type: ignore[misc]
                latencies.append(time.monotonic() - began)
        print(f"label to written value: median {statistics.median(latencies) * 1000:.0f} ms, n={len(latencies)}")
        assert node.kubelet.api.requests == requests
        assert len(server.lists) == 1
        assert [line for line in item.problems() if "pod watch" in line] == []


def test_without_its_answers_the_kubelets_list_counts_and_the_failure_is_said(
    node: DirectoryNode, daemon: Make
) -> None:
    pod = node.add("web", qos="burstable", shares=512, labels={KOORDINATOR: "LS"})
    with in_thread(FakeApiServer) as server:
        server.refusal = 403, "pods is forbidden"
        item = daemon(apiserver={"server": f"http://127.0.0.1:{server.port}"}).up()
        problems = wait_for(lambda: [line for line in item.problems() if "pod watch" in line], told=item.tail)
        assert "403" in problems[0]
        pod.meta["labels"] = {KOORDINATOR: "BE"}
        wait_for(lambda: bounded(node, pod.main), told=item.tail)
