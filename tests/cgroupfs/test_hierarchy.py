from collections.abc import Sequence
from pathlib import Path

import pytest

from cgroupfs.errors import SourceError
from cgroupfs.hierarchy import FREEZER, UNIFIED, Hierarchy, HierarchyMode, covered
from tests.cgroupfs.kernelgroup import kernel_groups

GROUP = "/kubepods/burstable/pod1"


def line(
    number: int,
    point: str,
    fstype: str = "cgroup",
    options: str = "rw",
    *,
    root: str = "/",
    parent: int = 1,
    mount_options: str = "rw,nosuid,nodev,noexec,relatime",
) -> str:
    return f"{number} {parent} 0:{number} {root} {point} {mount_options} shared:9 - {fstype} {fstype} {options}"


def node(tmp_path: Path, lines: Sequence[str], offers: dict[str, str] | None = None) -> str:
    """A copied node: its mount table, and cgroup.controllers of the cgroup2 groups named."""
    table = tmp_path / "proc/self/mountinfo"
    table.parent.mkdir(parents=True)
    table.write_text("\n".join(["1 0 8:1 / / rw - ext4 /dev/sda1 rw", *lines, ""]))
    for directory, controllers in (offers or {}).items():
        group = tmp_path / directory.strip("/")
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.controllers").write_text(controllers + "\n")
    return str(tmp_path)


def one_by_one(*controllers: str) -> list[str]:
    return [line(40 + n, f"/sys/fs/cgroup/{name}", options=f"rw,{name}") for n, name in enumerate(controllers)]


CO_MOUNTED = [
    line(30, "/sys/fs/cgroup", "tmpfs"),
    line(31, "/sys/fs/cgroup/systemd", options="rw,xattr,name=systemd", parent=30),
    line(32, "/sys/fs/cgroup/cpu,cpuacct", options="rw,cpu,cpuacct", parent=30),
    line(33, "/sys/fs/cgroup/cpuset", options="rw,cpuset,clone_children", parent=30),
    line(34, "/sys/fs/cgroup/memory", options="rw,memory", parent=30),
    line(35, "/sys/fs/cgroup/net_cls,net_prio", options="rw,net_cls,net_prio", parent=30),
]


def test_controllers_mounted_one_by_one_each_have_a_directory(tmp_path: Path) -> None:
    root = node(tmp_path, one_by_one("cpu", "cpuacct", "cpuset", "memory"))
    hierarchy = Hierarchy.detect(root)
    assert hierarchy.mode is HierarchyMode.V1
    assert hierarchy.versions() == {"cpu": 1, "cpuacct": 1, "cpuset": 1, "memory": 1}
    assert hierarchy.directory("cpu", GROUP) == f"{root}/sys/fs/cgroup/cpu{GROUP}"
    assert hierarchy.directory("memory", "/") == f"{root}/sys/fs/cgroup/memory"
    assert hierarchy.trigger == "cpuset"
    assert hierarchy.trigger_directory(GROUP) == f"{root}/sys/fs/cgroup/cpuset{GROUP}"
    assert hierarchy.version(UNIFIED) is None


def test_co_mounted_controllers_share_one_directory_and_are_one_mount(tmp_path: Path) -> None:
    hierarchy = Hierarchy.detect(node(tmp_path, CO_MOUNTED))
    assert hierarchy.directory("cpu", GROUP) == hierarchy.directory("cpuacct", GROUP)
    assert hierarchy.directory("cpu", GROUP).endswith(f"/sys/fs/cgroup/cpu,cpuacct{GROUP}")
    assert len(hierarchy.mounts()) == 5
    assert hierarchy.version("name=systemd") == 1
    assert "xattr" not in hierarchy.versions()
    assert "clone_children" not in hierarchy.versions()


def test_a_hybrid_node_is_watched_in_cpuset_and_has_the_unified_tree_beside(tmp_path: Path) -> None:
    lines = [*CO_MOUNTED, line(36, "/sys/fs/cgroup/unified", "cgroup2", "rw,nsdelegate", parent=30)]
    hierarchy = Hierarchy.detect(node(tmp_path, lines, {"/sys/fs/cgroup/unified": ""}))
    assert hierarchy.mode is HierarchyMode.HYBRID
    assert hierarchy.trigger == "cpuset"
    assert hierarchy.version("cpu") == 1
    assert hierarchy.version(UNIFIED) == 2
    assert hierarchy.directory(UNIFIED, GROUP).endswith(f"/sys/fs/cgroup/unified{GROUP}")


def test_a_controller_may_be_on_either_side_of_a_hybrid_node(tmp_path: Path) -> None:
    lines = [*one_by_one("cpu", "memory"), line(50, "/sys/fs/cgroup/unified", "cgroup2")]
    hierarchy = Hierarchy.detect(node(tmp_path, lines, {"/sys/fs/cgroup/unified": "cpuset pids"}))
    assert hierarchy.mode is HierarchyMode.HYBRID
    assert hierarchy.versions() == {"cpu": 1, "memory": 1, "cpuset": 2, "pids": 2, FREEZER: 2, UNIFIED: 2}
    assert hierarchy.trigger == UNIFIED


def test_the_freezer_of_v1_is_used_where_there_is_one(tmp_path: Path) -> None:
    lines = [*one_by_one("cpu", "freezer"), line(50, "/sys/fs/cgroup/unified", "cgroup2")]
    hierarchy = Hierarchy.detect(node(tmp_path, lines, {"/sys/fs/cgroup/unified": ""}))
    assert hierarchy.version(FREEZER) == 1


def test_a_v2_node_is_watched_in_its_one_tree(tmp_path: Path) -> None:
    root = node(tmp_path, [line(30, "/sys/fs/cgroup", "cgroup2")], {"/sys/fs/cgroup": "cpuset cpu io memory pids"})
    hierarchy = Hierarchy.detect(root)
    assert hierarchy.mode is HierarchyMode.V2
    assert hierarchy.trigger == UNIFIED
    assert {hierarchy.directory(name, GROUP) for name in ("cpu", "cpuset", UNIFIED)} == {f"{root}/sys/fs/cgroup{GROUP}"}
    assert hierarchy.version("cpuacct") is None
    assert len(hierarchy.mounts()) == 1


def test_net_cls_alone_on_v1_does_not_make_a_v2_node_hybrid(tmp_path: Path) -> None:
    lines = [line(30, "/sys/fs/cgroup", "cgroup2"), line(31, "/run/net_cls", options="rw,net_cls")]
    hierarchy = Hierarchy.detect(node(tmp_path, lines, {"/sys/fs/cgroup": "cpuset cpu memory"}))
    assert hierarchy.mode is HierarchyMode.V2
    assert hierarchy.version("net_cls") == 1


def test_only_controllers_passed_down_to_a_v2_group_are_enabled_there(tmp_path: Path) -> None:
    offers = {
        "/sys/fs/cgroup": "cpuset cpu memory pids",
        "/sys/fs/cgroup/kubepods": "cpuset cpu memory",
        "/sys/fs/cgroup/kubepods/burstable": "cpu memory",
    }
    hierarchy = Hierarchy.detect(node(tmp_path, [line(30, "/sys/fs/cgroup", "cgroup2")], offers))
    assert hierarchy.enabled("cpuset", "/kubepods")
    assert not hierarchy.enabled("cpuset", "/kubepods/burstable")
    assert hierarchy.enabled("cpu", "/kubepods/burstable")
    assert hierarchy.enabled(UNIFIED, "/kubepods/burstable")
    assert not hierarchy.enabled("cpu", "/kubepods/gone")


def test_a_delegated_v2_subtree_offers_what_it_was_given(tmp_path: Path) -> None:
    hierarchy = Hierarchy.detect(
        node(tmp_path, [line(30, "/sys/fs/cgroup", "cgroup2")], {"/sys/fs/cgroup": "cpu memory pids"})
    )
    assert hierarchy.version("cpuset") is None
    with pytest.raises(SourceError, match="controller cpuset is not mounted"):
        hierarchy.directory("cpuset", "/")


def test_v1_groups_have_their_controllers_as_soon_as_they_exist(tmp_path: Path) -> None:
    hierarchy = Hierarchy.detect(node(tmp_path, one_by_one("cpu")))
    assert not hierarchy.enabled("cpu", GROUP)
    (tmp_path / f"sys/fs/cgroup/cpu{GROUP}").mkdir(parents=True)
    assert hierarchy.enabled("cpu", GROUP)


def test_octal_escapes_in_a_mount_point_are_undone(tmp_path: Path) -> None:
    point = r"/mnt/a\040b\011c\134d\043e"
    hierarchy = Hierarchy.detect(node(tmp_path, [line(30, point, options="rw,cpu")]))
    assert hierarchy.directory("cpu", "/x").endswith("/mnt/a b\tc\\d#e/x")


def test_optional_fields_may_be_missing_or_many(tmp_path: Path) -> None:
    lines = [
        "30 1 0:30 / /a rw - cgroup cgroup rw,cpu",
        "31 1 0:31 / /b rw shared:1 master:2 propagate_from:3 unbindable - cgroup cgroup rw,memory",
    ]
    hierarchy = Hierarchy.detect(node(tmp_path, lines))
    assert hierarchy.versions() == {"cpu": 1, "memory": 1}


def test_a_torn_line_does_not_stop_the_others(tmp_path: Path) -> None:
    lines = ["", "30", "30 1 0:30 / /a rw - cgroup", "30 1 0:30 / /a rw", *one_by_one("cpu"), "44 1 0:44 / /c rw - cg"]
    assert Hierarchy.detect(node(tmp_path, lines)).versions() == {"cpu": 1}


def test_of_several_mounts_the_whole_and_writable_tree_is_used(tmp_path: Path) -> None:
    lines = [
        line(30, "/bind", options="rw,cpu", root="/kubepods"),
        line(31, "/readonly", options="rw,cpu", mount_options="ro,nosuid"),
        line(32, "/good", options="rw,cpu"),
        line(33, "/later", options="rw,cpu"),
    ]
    hierarchy = Hierarchy.detect(node(tmp_path, lines))
    assert hierarchy.directory("cpu", "/").endswith("/good")
    assert hierarchy.writable("cpu")


def test_a_read_only_tree_is_used_for_reading_and_says_so(tmp_path: Path) -> None:
    lines = [line(30, "/sys/fs/cgroup/cpu", options="ro,cpu"), *one_by_one("memory")]
    hierarchy = Hierarchy.detect(node(tmp_path, lines))
    assert not hierarchy.writable("cpu")
    assert hierarchy.writable("memory")
    assert not hierarchy.writable("pids")


def test_a_mount_that_shows_a_subtree_serves_paths_inside_it_and_below_it(tmp_path: Path) -> None:
    hierarchy = Hierarchy.detect(node(tmp_path, [line(30, "/c", options="rw,cpu", root="/docker/node1")]))
    assert hierarchy.directory("cpu", "/docker/node1/kubepods") == f"{tmp_path}/c/kubepods"
    assert hierarchy.directory("cpu", "/docker/node1") == f"{tmp_path}/c"
    assert hierarchy.directory("cpu", "/docker/node12") == f"{tmp_path}/c/docker/node12"
    assert hierarchy.directory("cpu", "/kubepods") == f"{tmp_path}/c/kubepods"


def test_the_hosts_root_seen_from_a_cgroup_namespace_is_a_whole_tree(tmp_path: Path) -> None:
    lines = [
        line(30, "/own", options="rw,cpu", root="/pod1/container", mount_options="ro"),
        line(31, "/shown", options="rw,cpu", root="/../../.."),
    ]
    assert Hierarchy.detect(node(tmp_path, lines)).directory("cpu", GROUP) == f"{tmp_path}/shown{GROUP}"


def test_a_mount_that_a_later_one_hides_is_not_used(tmp_path: Path) -> None:
    lines = [
        line(30, "/sys/fs/cgroup", "tmpfs"),
        line(31, "/sys/fs/cgroup/cpu", options="rw,cpu", parent=30),
        line(32, "/elsewhere", options="rw,cpu"),
        line(33, "/sys/fs/cgroup", "tmpfs", parent=30),
    ]
    assert Hierarchy.detect(node(tmp_path, lines)).directory("cpu", "/") == f"{tmp_path}/elsewhere"


def test_a_bind_mount_of_a_removed_group_is_not_used(tmp_path: Path) -> None:
    lines = [line(30, "/a", options="rw,cpu", root="/x//deleted"), line(31, "/b", options="rw,cpu", root="/y")]
    assert Hierarchy.detect(node(tmp_path, lines)).directory("cpu", "/y") == f"{tmp_path}/b"


def test_a_live_node_under_a_prefix_is_told_from_the_agents_own_mounts(tmp_path: Path) -> None:
    root = node(
        tmp_path,
        [
            line(30, "/sys/fs/cgroup/cpu", options="rw,cpu", root="/", mount_options="ro"),
            line(31, f"{tmp_path}/sys/fs/cgroup/cpu", options="rw,cpu"),
        ],
    )
    assert Hierarchy.detect(root).directory("cpu", GROUP) == f"{tmp_path}/sys/fs/cgroup/cpu{GROUP}"


def test_what_is_mounted_over_control_files_is_found(tmp_path: Path) -> None:
    base = one_by_one("cpu", "cpuset", "memory")
    cpu, place = base[0].split(" ", 3)[2], f"/sys/fs/cgroup/cpu{GROUP}"
    same = f"60 40 {cpu} {GROUP}/cpu.shares {place}/cpu.shares ro,relatime - cgroup cgroup rw,cpu"
    other = f"61 40 {cpu} /another {place}/a rw,relatime - cgroup cgroup rw,cpu"
    lines = [
        *base,
        line(59, "/sys/fs/cgroup/cpu/kubepods/burstable/x\\040y/cpu.shares", "ext4", root="/tmp/fake"),
        line(62, "/sys/fs/cgroup/memory/kubepods", "tmpfs"),
        line(63, "/sys/fs/cgroup/memory-other", "tmpfs"),
        same,
        other,
    ]
    root = node(tmp_path, lines)
    found = covered(Hierarchy.detect(root))
    assert set(found) == {
        f"{root}/sys/fs/cgroup/cpu/kubepods/burstable/x y/cpu.shares",
        f"{root}/sys/fs/cgroup/memory/kubepods",
        f"{root}{place}/a",
    }, "not the same file once more, read-only"
    (tmp_path / "proc/self/mountinfo").unlink()
    assert covered(Hierarchy(root=root, mode=HierarchyMode.V1, controllers={})) == ()


def test_no_cgroup_mount_at_all_is_one_message_that_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"mountinfo shows neither .* cpuset, cpu, memory .* no cgroup mount exists"):
        Hierarchy.detect(node(tmp_path, [line(30, "/sys/fs/cgroup", "tmpfs")]))


def test_mounts_that_offer_nothing_needed_are_named(tmp_path: Path) -> None:
    lines = [line(30, "/u", "cgroup2"), line(31, "/s", options="rw,name=systemd")]
    with pytest.raises(SourceError, match=r"/u offers nothing; .*/s offers name=systemd"):
        Hierarchy.detect(node(tmp_path, lines, {"/u": ""}))


def test_a_missing_mount_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cannot read .*/proc/self/mountinfo: No such file"):
        Hierarchy.detect(str(tmp_path))


@pytest.mark.kernel
def test_this_machines_hierarchies_hold_the_files_of_their_controllers() -> None:
    with kernel_groups("hierarchy", "cpu", "cpuset", "memory", "pids") as (hierarchy, group):
        for controller in ("cpu", "cpuset", "memory", "pids"):
            if hierarchy.enabled(controller, group):
                assert any(
                    path.name.startswith(f"{controller}.")
                    for path in Path(hierarchy.directory(controller, group)).iterdir()
                )
            else:
                assert hierarchy.version(controller) == 2, f"a v1 group has no {controller}"
