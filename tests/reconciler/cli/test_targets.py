"""The pod that a target names: every form that other tools print, ambiguous ones, and unknown ones."""

import copy
from pathlib import Path
from typing import Any

import pytest

from reconciler.cli.exits import CliError, Exit
from reconciler.cli.targets import find_pod
from tests.fakes.livenode import BATCH, WEB, container_id, group


def found(document: dict[str, Any], wanted: str, namespace: str | None = None, root: str = "/nowhere") -> str:
    return str(find_pod(document, wanted, namespace, root=root)["uid"])


def refusal(document: dict[str, Any], wanted: str, namespace: str | None = None, root: str = "/nowhere") -> CliError:
    with pytest.raises(CliError) as raised:
        found(document, wanted, namespace, root)
    return raised.value


@pytest.mark.parametrize(
    "wanted",
    [
        *("ci/batch-7", "batch-7", "bat", "ci/bat", "pod/batch-7", "pods/batch-7", "po/bat"),
        *(BATCH, BATCH[:4], BATCH[:8]),
        *(container_id(BATCH), container_id(BATCH)[:6], container_id(BATCH)[:12]),
        *(f"containerd://{container_id(BATCH)}", f"docker://{container_id(BATCH)[:12]}"),
        *(group(BATCH), f"{group(BATCH)}/{container_id(BATCH)}", f"/sys/fs/cgroup/cpu{group(BATCH)}"),
        f"/sys/fs/cgroup/cpuset{group(BATCH)}/{container_id(BATCH)}/cgroup.procs",
    ],
)
def test_one_pod_by_each_of_its_names(document: dict[str, Any], wanted: str) -> None:
    assert found(document, wanted) == BATCH


def test_a_process_is_its_pods(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "proc/4242").mkdir(parents=True)
    lines = f"4:cpuset:{group(WEB)}/{container_id(WEB)}\n1:name=systemd:/x\n0::/\n"
    (tmp_path / "proc/4242/cgroup").write_text(lines)
    assert found(document, "4242", root=str(tmp_path)) == WEB
    assert refusal(document, "4243", root=str(tmp_path)).code == Exit.NOT_FOUND


@pytest.mark.parametrize("path", ["/system.slice/sshd.service", f"/{'ab' * 16}", f"/kubepods/pod{'e' * 32}"])
def test_a_process_of_no_pod_is_named_with_its_cgroup(document: dict[str, Any], tmp_path: Path, path: str) -> None:
    (tmp_path / "proc/4242").mkdir(parents=True)
    (tmp_path / "proc/4242/cgroup").write_text(f"4:cpuset:/\n1:name=systemd:{path}\n0::/\n")
    refused = refusal(document, "4242", root=str(tmp_path))
    assert refused.code == Exit.NOT_FOUND
    assert str(refused) == f"process 4242 is of no known pod: its cgroup is {path}"


def test_a_pod_of_another_namespace_is_named(document: dict[str, Any]) -> None:
    refused = refusal(document, "web-0", "ci")
    assert "no pod 'web-0' in namespace 'ci' on this node; nearest: shop/web-0" in str(refused)


def test_the_uid_in_a_systemd_path_has_underscores(document: dict[str, Any]) -> None:
    path = f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{BATCH.replace('-', '_')}.slice"
    assert found(document, path) == BATCH


def test_an_ambiguous_target_lists_the_pods_and_has_an_exit_code_of_its_own(document: dict[str, Any]) -> None:
    refused = refusal(document, "shop/")
    assert refused.code == Exit.AMBIGUOUS
    assert len(refused.lines) == 3
    assert {"shop/web-0", "shop/db-0"} == {str(line).split()[0] for line in refused.lines[1:]}


def test_a_pod_with_anothers_uid_as_its_name_does_not_hide_it(document: dict[str, Any]) -> None:
    """Names are their authors' choice; scripts use uids."""
    document["pods"].append({**document["pods"][0], "uid": "e" * 32, "title": f"evil/{BATCH}", "name": BATCH})
    assert found(document, BATCH) == BATCH
    assert found(document, f"evil/{BATCH}") == "e" * 32


def test_a_namespace_decides_between_equal_names(document: dict[str, Any]) -> None:
    twin = {**copy.deepcopy(document["pods"][0]), "uid": "e" * 32, "namespace": "test", "title": "test/batch-7"}
    twin |= {"name": "batch-7", "containers": [], "group": f"/kubepods/pod{'e' * 32}"}
    document["pods"].append(twin)
    with pytest.raises(CliError):
        found(document, "batch-7")
    assert found(document, "batch-7", "ci") == BATCH
    assert found(document, "bat", "test") == "e" * 32


def test_an_exact_name_comes_before_a_longer_one(document: dict[str, Any]) -> None:
    document["pods"].append({**document["pods"][0], "uid": "e" * 32, "title": "ci/batch-70", "name": "batch-70"})
    assert found(document, "ci/batch-7") == next(pod["uid"] for pod in document["pods"] if pod["title"] == "ci/batch-7")


@pytest.mark.parametrize(
    ("wanted", "near"), [("bacth-7", "ci/batch-7"), ("web-1", "shop/web-0"), ("atch", "ci/batch-7")]
)
def test_an_unknown_pod_has_the_nearest_names(document: dict[str, Any], wanted: str, near: str) -> None:
    refused = refusal(document, wanted)
    assert refused.code == Exit.NOT_FOUND
    assert near in str(refused)


@pytest.mark.parametrize(
    "wanted", ["", "\x1b[2J", "x" * 100_000, "/", "//", "pod/", "containerd://", "0" * 5000, "../.."]
)
def test_no_text_is_a_pod_by_accident(document: dict[str, Any], wanted: str) -> None:
    refused = refusal(document, wanted)
    assert refused.code in {Exit.NOT_FOUND, Exit.AMBIGUOUS}
    assert "\x1b" not in str(refused)


GONE = "dddddddd-4444-4444-8444-444444444444"
EARLIER = "eeeeeeee-5555-4555-8555-555555555555"


def test_a_removed_pod_is_found_by_its_name_where_that_is_wanted(document: dict[str, Any]) -> None:
    rows = [{"pod_uid": GONE, "pod": "ci/train-0"}, {"pod_uid": EARLIER, "pod": "ci/train-0"}]
    document["history"] = [*rows, *document["history"]]
    document["eviction"] = {"ended": [{"uid": "f" * 32, "title": "ci/index-1"}]}
    for wanted in ("ci/train-0", "train-0", "train", "pod/train-0", GONE):
        pod = find_pod(document, wanted, removed=True)
        assert (pod["uid"], pod["title"], pod["gone"]) == (GONE, "ci/train-0", True)
    assert find_pod(document, "train", "ci", removed=True)["uid"] == GONE
    assert find_pod(document, EARLIER, removed=True)["uid"] == EARLIER
    assert find_pod(document, "index-1", removed=True)["title"] == "ci/index-1"
    # Orders are for pods of the node, and of a removed one for its uid.
    with pytest.raises(CliError):
        find_pod(document, "train-0")
    assert find_pod(document, GONE)["uid"] == GONE


def test_a_pod_of_the_node_comes_before_a_removed_one_but_an_exact_name_before_a_start(
    document: dict[str, Any],
) -> None:
    names = ("ci/batch-7", "ci/batch", "ci/batch-70")
    document["history"] = [{"pod_uid": f"{number}" * 32, "pod": name} for number, name in enumerate(names)]
    for wanted, uid in (("batch-7", BATCH), ("batch-", BATCH), ("batch", "1" * 32), ("batch-70", "2" * 32)):
        assert find_pod(document, wanted, removed=True)["uid"] == uid
