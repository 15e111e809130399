"""CRI-O's configuration: its own files, the drop-ins in their order, the storage's, and what is none of these."""

import os
from pathlib import Path

import pytest

from reconciler.sources.runtime_roots import find_image_root, find_runtime_dirs

CID = "a" * 64


def put(root: Path, name: str, text: str) -> None:
    path = root / "etc" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def nested(root: Path) -> list[str]:
    return [path.removeprefix(str(root)) for path in find_runtime_dirs(str(root)).nested]


def test_without_a_configuration_there_are_the_defaults(tmp_path: Path) -> None:
    assert nested(tmp_path) == ["/run/containers/storage/overlay-containers"]
    assert find_runtime_dirs(str(tmp_path)).problems == ()


def test_the_drop_in_of_the_last_name_counts_and_runtimes_add_up(tmp_path: Path) -> None:
    put(tmp_path, "containers/storage.conf", '[storage]\ndriver = "overlay"\nrunroot = "/run/s"\ngraphroot = "/g"\n')
    put(
        tmp_path,
        "crio/crio.conf",
        '[crio]\nroot = "/data/crio"\n[crio.runtime.runtimes.runc]\nruntime_root = "/run/runc-crio"\n',
    )
    put(tmp_path, "crio/crio.conf.d/10-a.conf", '[crio]\nrunroot = "/run/a"\nstorage_driver = "vfs"\n')
    put(
        tmp_path,
        "crio/crio.conf.d/20-b.conf",
        '[crio]\nrunroot = "/run/b/"\n[crio.runtime.runtimes.crun]\nruntime_root = "/run/crun-crio"\n'
        '[crio.runtime.runtimes.kata]\nruntime_type = "vm"\nruntime_root = "/run/vc-crio"\n',
    )
    os.makedirs(tmp_path / "etc/crio/crio.conf.d/30-dir")
    dirs = find_runtime_dirs(str(tmp_path))
    assert dirs.problems == ()
    assert nested(tmp_path)[0] == "/run/b/vfs-containers"
    assert nested(tmp_path)[-1] == "/run/containers/storage/overlay-containers"
    states = [path.removeprefix(str(tmp_path)) for path in dirs.states]
    assert states[-2:] == ["/run/runc-crio", "/run/crun-crio"]
    assert "/run/vc-crio/sbs" in [path.removeprefix(str(tmp_path)) for path in dirs.kata]
    (tmp_path / "data/crio").mkdir(parents=True)
    assert find_image_root(str(tmp_path)) == "/data/crio"


def test_a_container_of_a_moved_storage_is_found(tmp_path: Path) -> None:
    put(tmp_path, "crio/crio.conf.d/01.conf", '[crio]\nrunroot = "/mnt/run"\nstorage_driver = "btrfs"\n')
    bundle = tmp_path / "mnt/run/btrfs-containers" / CID / "userdata"
    bundle.mkdir(parents=True)
    (bundle / "config.json").write_text("{}")
    assert find_runtime_dirs(str(tmp_path)).bundle(CID) == str(bundle)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[crio", "crio.conf"),
        ('[crio]\nrunroot = "run"\n', "an absolute path"),
        ("[crio]\nrunroot = 7\n", "an absolute path"),
        ('[crio]\nstorage_driver = "../x"\n', "the name of a storage driver"),
        ("crio = 1\n", "a table"),
        ("[crio.runtime]\nruntimes = []\n", "a table"),
        ('[crio.runtime.runtimes.x]\nruntime_root = ["/a"]\n', "an absolute path"),
    ],
)
def test_what_cannot_be_used_is_one_problem_and_the_rest_counts(tmp_path: Path, text: str, message: str) -> None:
    put(tmp_path, "crio/crio.conf", text)
    put(tmp_path, "crio/crio.conf.d/a.conf", '[crio]\nrunroot = "/run/a"\n')
    dirs = find_runtime_dirs(str(tmp_path))
    assert len(dirs.problems) == 1
    assert message in str(dirs.problems[0])
    assert "/run/a/overlay-containers" in nested(tmp_path)


def test_a_bounded_number_of_drop_ins_is_read(tmp_path: Path) -> None:
    for number in range(300):
        put(tmp_path, f"crio/crio.conf.d/{number:03}.conf", f'[crio]\nrunroot = "/run/{number:03}"\n')
    dirs = find_runtime_dirs(str(tmp_path))
    assert nested(tmp_path)[0] == "/run/255/overlay-containers"
    assert "at most 256" in str(dirs.problems[0])
