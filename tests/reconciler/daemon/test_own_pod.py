"""bypassd in a pod of the node that it manages: no rule and no mark makes it manage itself."""

from pathlib import Path

import pytest

from cgroupfs.hierarchy import Hierarchy, HierarchyMode
from cgroupfs.naming import Driver, Layout, QosClass
from reconciler.config.environment import own_group
from reconciler.config.model import Config
from reconciler.daemon.sources import OperatorFiles
from reconciler.pods.classify import classification_input, classify
from reconciler.pods.selectors import ClassOverride, ClassRules
from reconciler.sources.kubelet_config import KubeletConfig
from reconciler.sources.node import NodeEnvironment
from reconciler.sources.runtime_roots import RuntimeDirs
from state.model import PodClass, PodMeta
from state.topology_sysfs import read_topology
from tests.fakes.marks import MARKS

OWN = "a0000000-0000-4000-8000-000000000001"
ID = "c" * 64


@pytest.mark.parametrize(
    ("driver", "table", "qos"),
    [
        (Driver.CGROUPFS, f"5:cpu:/\n4:memory:/kubepods/burstable/pod{OWN}/{ID}\n0::/\n", QosClass.BURSTABLE),
        (Driver.CGROUPFS, f"0::/kubepods/besteffort/pod{OWN}/{ID}\n", QosClass.BESTEFFORT),
        (
            Driver.SYSTEMD,
            f"0::/kubepods.slice/kubepods-pod{OWN.replace('-', '_')}.slice/cri-containerd-{ID}.scope\n",
            QosClass.GUARANTEED,
        ),
    ],
)
def test_its_own_pod_is_known_by_its_group(tmp_path: Path, driver: Driver, table: str, qos: QosClass) -> None:
    (tmp_path / "cgroup").write_text(table)
    group = own_group(Layout(driver), str(tmp_path / "cgroup"))
    assert group is not None
    assert (group.pod_uid, group.qos) == (OWN, qos)


@pytest.mark.parametrize("table", ["0::/system.slice/bypassd.service\n", "0::/kubepods\n", "0::/../..\n", "", "broken"])
def test_outside_of_pods_it_has_none(tmp_path: Path, table: str) -> None:
    (tmp_path / "cgroup").write_text(table)
    assert own_group(Layout(Driver.CGROUPFS), str(tmp_path / "cgroup")) is None
    assert own_group(Layout(Driver.CGROUPFS), str(tmp_path / "none")) is None


def test_rules_and_marks_that_match_its_own_pod_do_not_count(tmp_path: Path) -> None:
    layout = Layout(Driver.CGROUPFS)
    (tmp_path / "cgroup").write_text(f"0::/kubepods/besteffort/pod{OWN}/{ID}\n")
    (tmp_path / "classes.yaml").write_text("overrides:\n- {class: reclaimed, pod: '*/*'}\n")
    place = NodeEnvironment(
        root="/",
        hierarchy=Hierarchy(root="/", mode=HierarchyMode.V2, controllers={}),
        layout=layout,
        topology=read_topology(),
        kubelet=KubeletConfig(),
        runtime=RuntimeDirs(states=(), bundles=()),
        own=own_group(layout, str(tmp_path / "cgroup")),
    )
    configured = ClassRules(overrides=(ClassOverride(uid=OWN, pod_class=PodClass.RECLAIMED),))
    marks = {"koordinator.sh/qosClass": "BE"}

    def class_of(uid: str, operator_file: str | None) -> PodClass:
        files = OperatorFiles(Config(operator_file=operator_file, classes=configured), place, MARKS)
        meta = PodMeta(
            uid=uid, namespace="kube-system", name="bypassd-x", labels=marks, annotations={}, source="kubelet"
        )
        facts = classification_input(uid, QosClass.BESTEFFORT, meta)
        return classify(facts, files.rules(configured)).pod_class

    for operator_file in (None, str(tmp_path / "classes.yaml")):
        assert class_of(OWN, operator_file) is PodClass.SYSTEM
        assert class_of(OWN.replace("1", "2"), operator_file) is PodClass.RECLAIMED
