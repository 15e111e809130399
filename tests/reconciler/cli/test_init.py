"""``bypassctl init``: a short configuration that is valid on every node, and overwrites nothing."""

import json
import os
from pathlib import Path

import yaml

from reconciler.cli.exits import Exit
from reconciler.config.load import load, value_at
from reconciler.config.model import Protection
from tests.fakes.livenode import LiveNode
from tests.reconciler.cli.conftest import Run

ROUTES = "Iface\tDestination\tGateway\n{name}\t00000000\t0102A8C0\n"


def settings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.strip().startswith("#")]


def test_a_node_gets_about_ten_lines_that_are_valid_and_each_is_explained(
    run: Run, live: LiveNode, tmp_path: Path
) -> None:
    live.document()
    live.put("proc/net/route", ROUTES.format(name="eth0"))
    live.put("sys/class/net/eth0/speed", "25000\n")
    (tmp_path / "root").symlink_to(live.root)
    target = tmp_path / "made.yaml"
    code, out, _ = run("init", "--root", str(live.root), "--to", str(target))
    assert (code, target.stat().st_mode & 0o777) == (Exit.OK, 0o600)
    assert str(target) in out
    text = target.read_text()
    assert 6 <= len(settings(text)) <= 12
    config = load(str(target), required=True).config
    assert config.protect is Protection.OBSERVE
    assert [rule.name for rule in config.policies.network.interfaces] == ["eth0"]
    assert value_at(config, "eviction.dry_run") is True
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line in settings(text) and line != "policies:":
            assert lines[number - 1].strip().startswith("#"), line
    assert max(map(len, lines)) <= 100


def test_nothing_is_overwritten_or_followed(run: Run, live: LiveNode, tmp_path: Path) -> None:
    there, link = tmp_path / "there.yaml", tmp_path / "link.yaml"
    there.write_text("mode: enforce\n")
    link.symlink_to(tmp_path / "elsewhere.yaml")
    for target in (there, link):
        code, out, err = run("init", "--root", str(live.root), "--to", str(target))
        assert (code, out) == (Exit.REFUSED, "")
        assert str(target) in err
    assert there.read_text() == "mode: enforce\n"
    assert not (tmp_path / "elsewhere.yaml").exists()
    # Of directories the one for more files is made.
    for name, code in (
        ("no/such", Exit.REFUSED),
        ("no/conf.d/a", Exit.REFUSED),
        ("conf.d/a", Exit.OK),
        ("conf.d/b", Exit.OK),
    ):
        assert run("init", "--root", str(live.root), "--to", str(tmp_path / name)).code == code


def test_hostile_names_of_a_node_stay_data(run: Run, live: LiveNode) -> None:
    live.document()
    name = 'e"}\x1b[31m:#'
    live.put("proc/net/route", ROUTES.format(name=name))
    live.put(f"sys/class/net/{name}/speed", "1000\n")
    code, out, _ = run("init", "--root", str(live.root))
    assert code == Exit.OK
    assert "\x1b" not in out
    assert yaml.safe_load(out)["policies"]["network"]["interfaces"] == [{"name": name}]


def test_a_directory_that_is_no_node_gets_a_valid_file_too(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, out, _ = run("init", "--root", str(tmp_path / "empty"))
    assert code == Exit.OK
    (tmp_path / "made.yaml").write_text(out)
    assert load(str(tmp_path / "made.yaml"), required=True).config.protect is Protection.OBSERVE
    assert os.listdir(tmp_path / "empty") == []


def test_a_control_planes_settings_become_a_valid_file(run: Run, tmp_path: Path) -> None:
    def config_map(colocation: object) -> dict[str, object]:
        return {"kind": "ConfigMap", "data": {"colocation-config": json.dumps(colocation)}}

    source, target = tmp_path / "slo.json", tmp_path / "config.yaml"
    source.write_text(json.dumps(config_map({"enable": True, "x\x1b[2J": "\x1b[2J\n# evil: true"})))
    ran = run("init", "--from", str(source), "--to", str(target))
    assert (ran.code, ran.err) == (0, "")
    assert "\x1b" not in target.read_text()
    assert load(str(target), required=True).config.headroom.publish == "koordinator"
    assert run("init", "--from", str(tmp_path / "none")).code != 0
    source.write_text("kind: Pod\n")
    ran = run("init", "--from", str(source))
    assert ran.code == 2
    assert str(source) in ran.err
    source.write_text(
        'kind: ConfigMap\ndata:\n  resource-threshold-config: \'{"clusterStrategy": {"enable": true}}\'\n'
    )
    assert "policies:" in run("init", "--from", str(source)).out
