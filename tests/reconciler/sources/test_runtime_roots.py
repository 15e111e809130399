from pathlib import Path

import pytest

from reconciler.sources.runtime_roots import find_image_root, find_runtime_dirs

DEFAULT_STATES = ("/run/containerd/runc/k8s.io", "/run/docker/runtime-runc/moby", "/run/runc", "/run/crun")


def configure(root: Path, text: str, name: str = "config.toml") -> None:
    path = root / "etc/containerd" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def found(root: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    dirs = find_runtime_dirs(str(root))
    assert dirs.problems == ()
    return (
        tuple(path.removeprefix(str(root)) for path in dirs.states),
        tuple(path.removeprefix(str(root)) for path in dirs.bundles),
    )


def test_without_any_configuration_the_defaults_are_looked_at(tmp_path: Path) -> None:
    states, bundles = found(tmp_path)
    assert states == DEFAULT_STATES
    assert bundles[0] == "/run/containerd/io.containerd.runtime.v2.task/k8s.io"
    assert "/run/docker/containerd/daemon/io.containerd.runtime.v2.task/moby" in bundles


@pytest.mark.parametrize(
    "text",
    [
        'version = 3\n[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.r.options]\nRoot = "/run/other"',
        'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.r.options]\nRoot = "/run/other/"',
        '[plugins.cri.containerd.default_runtime]\nruntime_root = "/run/other"',
        '[plugins.linux]\nruntime_root = "/run/other"',
    ],
    ids=["format 3", "format 2", "format 1, runtime", "format 1, shim"],
)
def test_a_runtimes_root_option_is_followed_in_every_format(tmp_path: Path, text: str) -> None:
    configure(tmp_path, text)
    states, _ = found(tmp_path)
    assert "/run/other/k8s.io" in states
    assert set(DEFAULT_STATES) <= set(states)


def test_the_state_directory_moves_the_bundles_and_not_runcs_root(tmp_path: Path) -> None:
    configure(tmp_path, 'version = 2\nstate = "/var/run/ctd/"')
    states, bundles = found(tmp_path)
    assert states == DEFAULT_STATES
    assert "/var/run/ctd/io.containerd.runtime.v2.task/k8s.io" in bundles


def test_imported_files_count_too(tmp_path: Path) -> None:
    configure(tmp_path, 'version = 2\nimports = ["conf.d/*.toml"]')
    configure(tmp_path, 'state = "/run/x"\nimports = ["/etc/containerd/config.toml"]', "conf.d/a.toml")
    assert "/run/x/io.containerd.runtime.v2.task/k8s.io" in found(tmp_path)[1]


@pytest.mark.parametrize(
    "imports", [["a/" * 2000 + "*.toml"], ["*/" * 5000], ["x" * 5000], ["a\\u0000/*"], ["*.toml"] * 300]
)
def test_imports_that_are_no_paths_are_one_problem_and_the_rest_of_the_file_counts(
    tmp_path: Path, imports: list[str]
) -> None:
    texts = ", ".join(f'"{text}"' for text in imports)
    configure(tmp_path, f'state = "/run/x"\nimports = [{texts}]')
    dirs = find_runtime_dirs(str(tmp_path))
    assert len(dirs.problems) == 1
    assert "imports" in str(dirs.problems[0])
    assert len(str(dirs.problems[0])) < 300
    assert any("/run/x/" in path for path in dirs.bundles)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = ", "expected TOML"),
        ('state = 3\nversion = "x"', "state"),
        ('state = "run/containerd"', "an absolute path"),
        ("plugins = 3", "a table"),
        ('[plugins."io.containerd.grpc.v1.cri".containerd.runtimes]\nrunc = "x"', "a table"),
        ("\udcff", "TOML"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_told_and_the_defaults_stay(
    tmp_path: Path, text: str, message: str
) -> None:
    configure(tmp_path, "")
    (tmp_path / "etc/containerd/config.toml").write_bytes(text.encode(errors="surrogateescape"))
    dirs = find_runtime_dirs(str(tmp_path))
    assert message in str(dirs.problems[0])
    assert len(dirs.problems) == 1
    assert dirs.states[0] == f"{tmp_path}/run/containerd/runc/k8s.io"


def test_a_containers_bundle_and_state_are_found_where_they_are(tmp_path: Path) -> None:
    dirs = find_runtime_dirs(str(tmp_path))
    assert dirs.bundle("a") is None
    assert dirs.state_file("a") is None
    for path in (f"{dirs.bundles[0]}/a", f"{dirs.nested[0]}/b/userdata"):
        Path(path).mkdir(parents=True)
        assert dirs.bundle("a" if path.endswith("a") and "userdata" not in path else "b") is None
        Path(path, "config.json").touch()
    assert dirs.bundle("a") == f"{dirs.bundles[0]}/a"
    assert dirs.bundle("b") == f"{dirs.nested[0]}/b/userdata"
    Path(dirs.states[2], "a").mkdir(parents=True)
    Path(dirs.states[2], "a", "state.json").touch()
    assert dirs.state_file("a") == f"{dirs.states[2]}/a/state.json"


def test_images_lie_where_containerd_is_told_else_where_a_runtime_has_them(tmp_path: Path) -> None:
    assert find_image_root(str(tmp_path)) == "/var/lib/containerd"
    (tmp_path / "var/lib/docker").mkdir(parents=True)
    assert find_image_root(str(tmp_path)) == "/var/lib/docker"
    configure(tmp_path, 'root = "/data/containerd"')
    assert find_image_root(str(tmp_path)) == "/var/lib/docker"
    (tmp_path / "data/containerd").mkdir(parents=True)
    assert find_image_root(str(tmp_path)) == "/data/containerd"
    configure(tmp_path, "root = 5")
    assert find_image_root(str(tmp_path)) == "/var/lib/docker"
