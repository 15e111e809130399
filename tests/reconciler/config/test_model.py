import os
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from reconciler.config.docs import CLASSES_EXAMPLE, EXAMPLE, example, explain, markdown, ranged, shown
from reconciler.config.load import Loaded, changed, load, reload, value_at
from reconciler.config.model import (
    AgentMode,
    Config,
    EndpointSection,
    HttpSection,
    KubeletSection,
    NodeSection,
)
from reconciler.settings.binder import ConfigError, Text, bind
from reconciler.settings.schema import section_of, settings
from state.model import PodClass

PROJECT = Path(__file__).parents[3]


def place(directory: Path, **texts: str) -> str:
    """Write ``main`` as config.yaml and every other text as conf.d/<name>.yaml; the path of the main file."""
    (directory / "conf.d").mkdir(exist_ok=True)
    for name, text in texts.items():
        path = directory / "config.yaml" if name == "main" else directory / "conf.d" / f"{name}.yaml"
        path.write_text(text)
    return str(directory / "config.yaml")


def refused(path: str, *, required: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, required=required)
    directory = os.path.dirname(path)
    return [str(problem).replace(f"{directory}/", "") for problem in caught.value.problems]


def test_the_installed_default_observes_and_listens_on_loopback_only() -> None:
    config = Config()
    assert config.mode is AgentMode.OBSERVE
    assert (config.http.address, config.http.port) == ("127.0.0.1", 9470)


def test_without_files_the_defaults_hold(tmp_path: Path) -> None:
    assert load(str(tmp_path / "config.yaml")) == Loaded(path=str(tmp_path / "config.yaml"))


def test_a_file_that_was_asked_for_and_is_missing_is_a_problem(tmp_path: Path) -> None:
    assert refused(str(tmp_path / "config.yaml"), required=True) == ["config.yaml: no such file"]


def test_parts_of_conf_d_win_in_name_order_and_dot_files_are_left_out(tmp_path: Path) -> None:
    path = place(
        tmp_path,
        main="mode: enforce\nnode: {resync_s: 10s}\nkubelet: {endpoint: off, http_port: 80}\n",
        b="node: {resync_s: 1m}\n",
        a="node: {resync_s: 20s, sample_s: 2}\n",
    )
    (tmp_path / "conf.d" / ".b.yaml").write_text("mode: [")
    (tmp_path / "conf.d" / "c.yaml~").write_text("mode: [")
    loaded = load(path)
    assert loaded.config == Config(
        mode=AgentMode.ENFORCE,
        node=NodeSection(resync_s=60.0, sample_s=2.0),
        kubelet=KubeletSection(endpoint=EndpointSection.OFF, http_port=80),
    )
    assert [os.path.basename(file) for file in loaded.files] == ["config.yaml", "a.yaml", "b.yaml"]
    assert str(loaded.origins["node.resync_s"]) == f"{tmp_path}/conf.d/b.yaml:1:18"


def test_all_problems_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    path = place(
        tmp_path,
        main="""\
mode: enforse
kubelet:
  endpiont: off
  client_cert_file: /etc/cert.pem
policies:
  idle_buffer: {buffer_milli: 010}
  reserve: {cpus: 3-1}
""",
        a="""\
http:
  address: 0.0.0.0
  port: 70000
classes:
  overrides:
  - {class: shared, pod: x}
  - {class: recliamed, uid: x}
runtime: {sockets: [run/x.sock]}
static_manifests: here
""",
    )
    (tmp_path / "conf.d" / "b.yaml").write_bytes(b"mode: observe\nlog: {level: \xff}\n")
    (tmp_path / "conf.d" / "c.yaml").mkdir()
    assert refused(path) == [
        "conf.d/b.yaml:2:14: not UTF-8 text",
        "conf.d/c.yaml: cannot be read: EISDIR",
        "config.yaml:1:7: mode: expected one of observe, enforce; got 'enforse'; did you mean 'enforce'?",
        "config.yaml:3:3: kubelet.endpiont: unknown key 'endpiont'; did you mean 'endpoint'?",
        "config.yaml:3:3: kubelet: client_cert_file and client_key_file must both be set; one is missing",
        "config.yaml:6:31: policies.idle_buffer.buffer_milli: expected an amount of CPU such as 500m or 2cpu; "  # noqa: ISC004
        "got '010', whose leading zero reads as octal to some: leave it out",
        "config.yaml:7:12: policies.reserve: cpus: '3-1' is not a CPU list: '3-1' runs backwards; "  # noqa: ISC004
        "expected a CPU list below 8192",
        "conf.d/a.yaml:3:9: http.port: out of bounds: expected from 1 to 65535; got '70000'",
        "conf.d/a.yaml:6:5: classes.overrides[0]: pod 'x' must be namespace/name, each of which may have * and ?",
        "conf.d/a.yaml:7:13: classes.overrides[1].class: expected one of system, dedicated, shared, reclaimed; "  # noqa: ISC004
        "got 'recliamed'; did you mean 'reclaimed'?",
        "conf.d/a.yaml:8:10: runtime: sockets and runc_roots are absolute paths; got 'run/x.sock'",
        "conf.d/a.yaml:9:19: static_manifests: expected an absolute path; got 'here'",
    ]


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.7"])
def test_an_address_that_others_can_reach_needs_to_be_allowed(tmp_path: Path, address: str) -> None:
    path = place(tmp_path, main=f"http:\n  address: '{address}'\n")
    assert refused(path) == [
        f"config.yaml:2:3: http: address {address} is not loopback; allow_remote: true allows that"
    ]
    allowed = place(tmp_path, a="http: {allow_remote: true}\n")
    assert load(allowed).config.http.address == address


NODE_CPU_ALONE = "eviction: {enabled: true, triggers: {node_cpu: {enabled: yes}, reclaimed_resource: {enabled: no}}}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "eviction: {enabled: true}\ninterference: {sample_s: 200ms}",
            "eviction.triggers.reclaimed_resource needs 60 s of samples, and 120 of 0.2 s (interference.sample_s) are",
        ),
        (
            NODE_CPU_ALONE + "interference: {sample_s: 200ms}",
            "eviction.triggers.node_cpu needs 30 s of samples",
        ),
        ("eviction: {triggers: {node_cpu: {enabled: true}}}\ninterference: {sample_s: 200ms}", None),
        ("eviction: {enabled: true}\ninterference: {sample_s: 500ms}", None),
    ],
)
def test_a_window_that_is_longer_than_what_is_kept_is_refused(tmp_path: Path, text: str, problem: str | None) -> None:
    path = place(tmp_path, main=text)
    if problem is None:
        load(path)
        return
    (line,) = refused(path)
    assert problem in line


def test_a_host_name_is_no_address(tmp_path: Path) -> None:
    path = place(tmp_path, main="http: {address: localhost}\n")
    assert refused(path) == [
        "config.yaml:1:7: http: address: expected an IP address such as 127.0.0.1; got 'localhost'"
    ]


def test_an_override_knows_where_it_was_written(tmp_path: Path) -> None:
    path = place(tmp_path, main="classes:\n  overrides:\n  - {class: shared, pod: a/b}\n  - {class: system, uid: u}\n")
    overrides = load(path).config.classes.overrides
    assert [override.origin for override in overrides] == [f"{path}:3:5", f"{path}:4:5"]
    assert [override.pod_class for override in overrides] == [PodClass.SHARED, PodClass.SYSTEM]


def test_a_reload_takes_what_can_change_and_names_what_needs_a_restart(tmp_path: Path) -> None:
    path = place(tmp_path, main="mode: observe\nhttp: {port: 9470}\nstore: {path: /a}\n")
    old = load(path)
    place(tmp_path, main="mode: enforce\nhttp: {port: 9999, pod_metrics: false}\nstore: {path: /b}\n")
    new, restart = reload(old)
    assert restart == ("store.path", "http.port")
    assert new.config == replace(old.config, mode=AgentMode.ENFORCE, http=replace(old.config.http, pod_metrics=False))
    assert changed(old.config, new.config) == ("mode", "http.pod_metrics")


def test_a_bad_reload_raises_and_leaves_the_old_value_alone(tmp_path: Path) -> None:
    path = place(tmp_path, main="mode: enforce\n")
    old = load(path)
    place(tmp_path, main="mode: 3\n")
    with pytest.raises(ConfigError, match=r"config\.yaml:1:7: mode: expected one of observe, enforce; got '3'"):
        reload(old)
    assert old.config.mode is AgentMode.ENFORCE


def test_a_main_file_that_vanished_is_no_wish_for_the_defaults(tmp_path: Path) -> None:
    old = load(place(tmp_path, main="mode: enforce\n"))
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="no such file"):
        reload(old)


def test_the_example_file_and_the_documentation_are_what_the_code_generates() -> None:
    regenerate = "run: python -m reconciler.config.docs"
    assert (PROJECT / "deploy/config.yaml").read_text() == example(), regenerate
    assert (PROJECT / "docs/config.md").read_text() == markdown(), regenerate


def test_the_documentation_has_each_setting_with_its_default_and_bounds() -> None:
    sections: dict[str, str] = {}
    states: dict[str, str] = {}
    for part in markdown().split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        quoted = re.fullmatch(r"`([^`]+)`(?: (on|off))?", heading)
        title = quoted[1] if quoted else heading
        states[title] = (quoted and quoted[2]) or ""
        _, _, same = text.partition("\nThe same in ")
        sections |= dict.fromkeys([title, *re.findall(r"`([^`]+)`", same)], text)
    seen = 0
    for path, field in settings(section_of(Config)):
        if field.schema.struct is None:
            section, _, name = path.rpartition(".")
            text = sections[section or "Top level"]
            if alike := re.search(r"^As `(.+?)`, with (.*)\.$", text, re.MULTILINE):
                assert f"`{name}: {shown(field.default, field)}`" in alike[2]
                text = re.sub(
                    rf"(?m)^- `{name}: .*?`", f"- `{name}: {shown(field.default, field)}`", sections[alike[1]]
                )
            rows = re.findall(rf"^- `{name}[:`].*$", text, re.MULTILINE)
            if not any(row.endswith(field.description) for row in rows):
                if (states[section] or "- `enabled: " in text) and name in {"enabled", "dry_run"}:
                    assert field.default is (states[section] == "on" if name == "enabled" else False)
                else:
                    assert re.search(rf"^- (?:`.*`, )*`{name}[:`]", text, re.MULTILINE), path
                rows = re.findall(rf"^- `{name}[:`].*$", sections["Settings of many sections"], re.MULTILINE)
            default = "`" if field.required else f": {shown(field.default, field)}`"
            start, end = f"- `{name}{default}", field.description
            (row,) = [row for row in rows if row.startswith(start) and row.endswith(end)]
            assert ("` ↻" in row) is field.restart
            assert ranged(field.schema.bounds) in row
            assert all(choice in row for choice in field.schema.choices)
            seen += 1
    assert seen > 250


def test_the_example_is_short_and_each_setting_has_one_line_of_text() -> None:
    lines = example().splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 120
    given = [line for line in lines if re.match(r" *# [a-z0-9_]+: \S+.*  # \S", line)]
    assert len(given) == len(EXAMPLE) > 25


def test_the_example_as_it_is_installed_changes_nothing() -> None:
    assert bind(Config, [Text("example", example())]).value == Config()


def test_the_example_with_every_setting_uncommented_is_the_default_too() -> None:
    text = re.sub(r"^( *)# ([a-z0-9_]+: \S.*)$", _uncommented, example(), flags=re.MULTILINE)
    bound = bind(Config, [Text("example", text)])
    assert bound.value == Config()
    restart = {path for path, field in settings(section_of(Config)) if field.restart}
    marked = {match[1] for match in re.finditer(r"# ([a-z0-9_]+): .* ↻$", example(), re.MULTILINE)}
    assert marked == {path.rpartition(".")[2] for path in set(EXAMPLE) & restart}
    assert {path for path in bound.origins if not path.endswith("]")} == set(EXAMPLE)


def test_the_samples_in_the_example_can_be_used() -> None:
    sample = re.sub(
        r"^# ?((?:classes|alerts):|  +.*)$", r"\1", example().partition("\n# Classes")[2], flags=re.MULTILINE
    )
    config = bind(Config, [Text("sample", "#" + sample)]).value
    assert [selector.pod_class for selector in config.classes.selectors] == [PodClass.RECLAIMED]
    assert list(config.alerts.sinks) == ["team"]


_NAMES = frozenset(path.rpartition(".")[2] for path, _ in settings(section_of(Config)))


def _uncommented(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}" if match[2].partition(":")[0] in _NAMES else match[0]


def test_the_example_of_classes_can_be_used() -> None:
    rules = bind(Config, [Text("example", CLASSES_EXAMPLE)]).value.classes
    assert [override.pod_class for override in rules.overrides] == [PodClass.SHARED]
    assert [selector.pod_class for selector in rules.selectors] == [PodClass.RECLAIMED, PodClass.SYSTEM]


def test_every_setting_with_a_number_or_a_switch_is_described() -> None:
    bare = [
        path
        for path, field in settings(section_of(Config))
        if not field.description and field.schema.struct is None and not path.startswith("classes.")
    ]
    assert bare == []


def test_explain_shows_value_source_and_words(tmp_path: Path) -> None:
    path = place(tmp_path, main="node:\n  sample_s: 500ms\nwrites: {foreign: {rounds: 7}}\n")
    loaded = load(path)
    text = explain(loaded)
    message = (
        "interval of the CPU usage readings; twice as long while BE work sleeps, five times while it has all that it"
        " may use"
    )
    assert f"node.sample_s = 500ms   [{path}:2:13]\n  {message}\n" in text
    assert explain(loaded, "http.port") == (
        "http.port = 9470   [default]\n  TCP port to listen on\n  a whole number from 1 to 65535\n"
        "  a change needs a restart\n"
    )
    assert explain(loaded, "writes.foreign").splitlines()[0] == f"writes.foreign.rounds = 7   [{path}:3:28]"
    with pytest.raises(KeyError):
        explain(loaded, "writ")


def test_a_dotted_name_finds_its_value() -> None:
    config = Config(http=HttpSection(port=9471))
    assert value_at(config, "http.port") == 9471
    for wrong in ("http.por", "http.port.x", "", "mode.name"):
        with pytest.raises(AttributeError):
            value_at(config, wrong)


def test_values_are_shown_as_they_can_be_written() -> None:
    assert [shown(value) for value in (None, True, 3, "", "a b", "/x", ("a", "b c"), {"k": "v"})] == [
        "null", "true", "3", '""', '"a b"', "/x", '[a, "b c"]', "{k: v}",
    ]  # fmt: skip


def test_the_sections_check_themselves_without_a_file_too() -> None:
    with pytest.raises(ValueError, match="not loopback"):
        HttpSection(address="0.0.0.0")
    with pytest.raises(ValueError, match="must both be set"):
        KubeletSection(client_key_file="/k")
