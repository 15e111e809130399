"""The operator's files as a source: what is wrong with them, in a bounded line."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from reconciler.config.model import Config
from reconciler.daemon.sources import OperatorFiles
from reconciler.pods.marks import MarkReader, ReadKeys
from reconciler.pods.metadata import Metadata
from reconciler.pods.selectors import ClassRules
from reconciler.runtime.workqueue import DirtyKeys


def test_thousands_of_mistakes_in_a_file_are_a_few_texts_and_a_number(tmp_path: Path) -> None:
    (tmp_path / "classes.yaml").write_text("overrides:\n" + "- {uid: u, class: sharred}\n" * 3000)
    (tmp_path / "manifests").mkdir()
    for number in range(30):
        (tmp_path / "manifests" / f"{number:02}.yaml").write_text("kind: Pod\nmetadata: []\n")
    place: Any = SimpleNamespace(kubelet=SimpleNamespace(static_pod_path=None, node_name="n1"), own=None)
    config = Config(operator_file=str(tmp_path / "classes.yaml"), static_manifests=str(tmp_path / "manifests"))
    files = OperatorFiles(config, place, MarkReader(ReadKeys()))
    files.rules(ClassRules())
    files.read_manifests(Metadata(DirtyKeys()), {})
    statuses = {status.name: status for status in files.statuses()}
    for name, more in (("operator's file", 2990), ("manifests", 20)):
        assert not statuses[name].ok
        assert statuses[name].detail.endswith(f"; and {more} more")
        assert len(statuses[name].detail) < 4000
