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


def _files(config: Config, marks: MarkReader) -> OperatorFiles:
    place: Any = SimpleNamespace(kubelet=SimpleNamespace(static_pod_path=None, node_name="n1"), own=None)
    return OperatorFiles(config, place, marks)


def test_a_reload_without_the_manifests_directory_drops_what_was_read_there(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text("kind: Pod\nmetadata: {name: web, uid: u1, labels: {app: web}}\n")
    files, metadata = _files(Config(static_manifests=str(tmp_path)), MarkReader(ReadKeys())), Metadata(DirtyKeys())
    assert files.read_manifests(metadata, {})
    assert [meta.labels for meta in metadata.manifests.values()] == [{"app": "web"}]
    files.open(Config())
    assert files.read_manifests(metadata, {})
    assert metadata.manifests == {}
    assert not files.read_manifests(metadata, {})


def test_keys_that_a_reload_names_are_read_of_unchanged_manifests(tmp_path: Path) -> None:
    many = "".join(f"    a{number}: x\n" for number in range(500))
    text = f"kind: Pod\nmetadata:\n  name: web\n  uid: u1\n  labels:\n    tier: gold\n{many}"
    (tmp_path / "pod.yaml").write_text(text)
    marks, metadata = MarkReader(ReadKeys()), Metadata(DirtyKeys())
    files = _files(Config(static_manifests=str(tmp_path)), marks)
    files.read_manifests(metadata, {})
    assert metadata.manifests["u1"].labels == {}
    assert marks.use(ReadKeys(labels=frozenset({"tier"})))
    assert files.read_manifests(metadata, {})
    assert metadata.manifests["u1"].labels == {"tier": "gold"}


def test_thousands_of_mistakes_in_a_file_are_a_few_texts_and_a_number(tmp_path: Path) -> None:
    (tmp_path / "classes.yaml").write_text("overrides:\n" + "- {uid: u, class: sharred}\n" * 3000)
    (tmp_path / "manifests").mkdir()
    for number in range(30):
        (tmp_path / "manifests" / f"{number:02}.yaml").write_text("kind: Pod\nmetadata: []\n")
    config = Config(operator_file=str(tmp_path / "classes.yaml"), static_manifests=str(tmp_path / "manifests"))
    files = _files(config, MarkReader(ReadKeys()))
    files.rules(ClassRules())
    files.read_manifests(Metadata(DirtyKeys()), {})
    statuses = {status.name: status for status in files.statuses()}
    for name, more in (("operator's file", 2990), ("manifests", 20)):
        assert not statuses[name].ok
        assert statuses[name].detail.endswith(f"; and {more} more")
        assert len(statuses[name].detail) < 4000
