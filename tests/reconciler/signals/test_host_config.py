"""The section `host_workloads`: what is accepted, and one clear message for each entry that is not."""

from pathlib import Path

import pytest

from cgroupfs.cpuset import CpuSet
from reconciler.config.load import load
from reconciler.settings.binder import ConfigError
from reconciler.signals.host_config import HostKind, HostWorkloadConfig, check_entries, parse_match
from reconciler.signals.probe_targets import targets_of
from state.hosts import CountsAs
from state.model import NodeView
from state.topology import Topology


@pytest.mark.parametrize(
    ("text", "kind", "pattern"),
    [
        ("unit:postgresql", HostKind.UNIT, "postgresql.service"),
        ("unit:postgresql@*.service", HostKind.UNIT, "postgresql@*.service"),
        ("unit:user-1000.slice", HostKind.UNIT, "user-1000.slice"),
        ("cgroup:/batch/job-*/x[0-9]", HostKind.CGROUP, "/batch/job-*/x[0-9]"),
        ("docker:web-*", HostKind.DOCKER, "web-*"),
        ("docker:com.docker.compose.service=web-*", HostKind.DOCKER, "com.docker.compose.service=web-*"),
        ("user:ci", HostKind.USER, "ci"),
        ("user:1000", HostKind.USER, "1000"),
    ],
)
def test_what_an_entry_may_name(text: str, kind: HostKind, pattern: str) -> None:
    assert parse_match(text) == (kind, pattern)


@pytest.mark.parametrize(
    "text",
    [
        *("", "unit", "unit:", "unit:a/b", "unit:a b", "unit:" + "a" * 300, "socket:x", "unit:a\x0bb"),
        *("cgroup:/", "cgroup:relative", "cgroup:/a/../b", "cgroup:/a//b", "cgroup:/a/", "cgroup:/./a"),
        *("cgroup:" + "/a" * 17, "docker:", "docker:a/b", "docker:=b", "docker:a="),
        *("user:", "user:a b", "user:-1", "user:root:x", "user:٣"),
    ],
)
def test_anything_else_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected .*; got "):
        parse_match(text)


def test_each_bad_entry_is_a_message_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "host_workloads:\n"
        "  good: {match: 'unit:sshd', counts_as: victim}\n"
        "  path: {match: 'cgroup:/a/../b', counts_as: be}\n"
        "  kind: {match: 'usr:ci', counts_as: be}\n"
        "  role: {match: 'user:ci', counts_as: vict}\n"
        "  both: {match: 'usr:me', counts_as: vict}\n"
    )
    with pytest.raises(ConfigError) as refused:
        load(str(file))
    message = str(refused.value)
    assert all(f"host_workloads.{name}" in message for name in ("path", "kind", "role"))
    assert "good" not in message
    assert message.count("did you mean 'victim'") == 2
    assert message.count("expected unit:, cgroup:, docker: or user:") == 2, "beside the other mistake of the entry, too"


def test_at_most_64_entries_with_names_that_a_metric_can_show() -> None:
    entry = HostWorkloadConfig(match="unit:sshd", counts_as=CountsAs.VICTIM)
    check_entries({f"e{number}": entry for number in range(64)})
    with pytest.raises(ValueError, match="65 entries; expected at most 64"):
        check_entries({f"e{number}": entry for number in range(65)})
    with pytest.raises(ValueError, match="is not a name"):
        check_entries({"a\nb": entry})


PROBE = "{{command: {{argv: {argv}}}, {of}}}"


@pytest.mark.parametrize(
    ("argv", "of", "message"),
    [
        ("[/bin/ping-db]", "host_workloads: [db]", None),
        ("[/bin/ping-db]", "host_workloads: [other]", "host_workloads has no 'other'"),
        ("[/bin/ping-db]", "host_workloads: [db], pods: [a]", "a probe needs namespaces, pods or labels; or host"),
        ("[/bin/ping-db, '{ip}']", "host_workloads: [db]", "placeholders are for values of pods"),
    ],
)
def test_a_probe_may_measure_a_host_workload(tmp_path: Path, argv: str, of: str, message: str | None) -> None:
    file = tmp_path / "config.yaml"
    probe = PROBE.format(argv=argv, of=of)
    hosts = "host_workloads: {db: {match: 'unit:db', counts_as: victim}}"
    file.write_text(f"{hosts}\ninterference: {{probes: {{ping: {probe}}}}}\n")
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            load(str(file))
        return
    probes = load(str(file)).config.interference.probes
    online = Topology(online=CpuSet([0]))
    view = NodeView(topology=online, versions={}, kubepods="/k", besteffort="/k/b", burstable="/k/c")
    (target,) = targets_of(probes, view).targets.values()
    assert (target.uids, target.argv) == (("host:db",), ("/bin/ping-db",))
