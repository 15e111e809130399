"""Whatever is wrong with a setting that may hold a secret: no message shows it, and neither does what is in force."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.inspect import DictType

from reconciler.cli.main import main as bypassctl
from reconciler.config import load
from reconciler.config.docs import explain
from reconciler.config.model import Config
from reconciler.daemon import main
from reconciler.settings.binder import ConfigError
from reconciler.settings.schema import FieldSchema, ListType, Schema, section_of

SECRET = "hunter2"
TEXTS = (
    f"http://u:{SECRET}@am/hooks/{SECRET}?k={SECRET}",
    f"https://h/hooks/{SECRET}",
    f"htps://h/hooks/{SECRET}",
    f"http://h/{{{SECRET}}}",
    f"Authorization: Bearer {SECRET}",
    f"Bearer {SECRET}\n{SECRET}",
    f"{SECRET}ü",
)
SHAPES: dict[str, Any] = {
    "text": lambda text: text,
    "list": lambda text: [text],
    "list of lists": lambda text: [[text]],
    "list of sections": lambda text: [{text: text}],
    "key": lambda text: {text: None},
    "key with a value": lambda text: {text: text},
    "value": lambda text: {"X-Key": text},
    "value of several": lambda text: {"X-Key": [text]},
    "section": lambda text: {"X-Key": {"X": text}},
}
TRIED = [(shape, text) for shape in SHAPES for text in (TEXTS if shape in {"text", "list"} else TEXTS[:1])]
"""What a text is matters where it is taken for one; elsewhere its place is wrong, whatever it is."""
_PROBE = "interference.probes.NAME"
BESIDE: dict[str, dict[str, Any]] = {
    "alerts.sinks.NAME.webhook": {"url": "http://h"},
    "alerts.sinks.NAME.alertmanager": {"urls": ["http://am"]},
    _PROBE: {"pods": ["x"]},
    f"{_PROBE}.http": {"url": "http://h"},
    f"{_PROBE}.prometheus": {"url": "http://h", "select": "a"},
    "apiserver": {"server": "https://h"},
}
"""What else a section needs so that its own checks are reached."""


def secrets(schema: Schema, *path: str) -> Iterator[tuple[tuple[str, ...], FieldSchema]]:
    """Every setting that is marked, with its place."""
    for name, field in schema.fields.items():
        if field.secret:
            yield (*path, name), field
        yield from secrets(field.schema, *path, name)
    if isinstance(schema.kind, DictType):
        yield from secrets(schema.item, *path, "NAME")
    elif isinstance(schema.kind, ListType):
        yield from secrets(schema.item, *path, "[]")


PLACES = [path for path, _ in secrets(section_of(Config))]


def written(path: tuple[str, ...], value: object) -> object:
    """A configuration with this at that place."""
    made = value
    for depth in range(len(path) - 1, -1, -1):
        beside = {} if path[depth] == "url_file" else BESIDE.get(".".join(path[:depth]), {})
        made = {**beside, path[depth]: made}
    return made


def test_every_setting_that_may_hold_a_secret_is_marked() -> None:
    names = {path[-1] for path in PLACES}
    wanted = {"url", "urls", "url_file", "headers", "header_files", "argv", "token_file", "server", "generator_url"}
    assert names >= wanted | {"key_file", "client_key_file", "sinks", "probes", "webhook", "alertmanager", "http"}
    assert len(PLACES) >= 30


@pytest.mark.parametrize("path", PLACES, ids=".".join)
def test_no_message_shows_it(path: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    refused = 0
    for shape, text in TRIED:
        file.write_text(json.dumps(written(path, SHAPES[shape](text)), ensure_ascii=False))
        try:
            loaded = load.load(str(file), required=True)
        except ConfigError as exc:
            message = str(exc)
            refused += 1
        else:
            message = f"{explain(loaded)} {loaded.config.alerts!r} {loaded.config.interference!r}"
        assert SECRET not in message, (shape, text)
    assert refused > len(SHAPES)
    file.write_text(json.dumps(written(path, TEXTS[0]), ensure_ascii=False))
    main.main(["check-config", "--config", str(file)])
    bypassctl(["config", "explain", "--config", str(file)])
    said = "".join(capsys.readouterr())
    assert said
    assert SECRET not in said


@pytest.mark.parametrize("unquoted", [f"&{SECRET}", f"*{SECRET}", f"!{SECRET}", f"!!{SECRET} x", f"@{SECRET}"])
def test_a_password_that_nobody_has_quoted_is_not_shown_either(unquoted: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"alerts:\n  sinks:\n    a:\n      webhook:\n        url: http://h\n        headers:\n          X: {unquoted}"
    )
    with pytest.raises(ConfigError) as caught:
        load.load(str(file))
    assert SECRET not in str(caught.value)


def test_what_is_shown_still_helps(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "alerts:\n  sinks:\n    a: {webhook: {url: htps://h/key}}\n    b: {alertmanager: {urls: http://am/key}}\n"
        "    c: {webhook: {url: http://h, headers: 'X: key'}}\n    d: {webhook: {url: http://h, token_file: eyJkey}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load.load(str(file))
    assert [str(problem).partition("config.yaml:")[2] for problem in caught.value.problems] == [
        "3:18: alerts.sinks.a.webhook: url: expected http://HOST[:PORT][/PATH] or https://…; got 12 characters",
        "4:30: alerts.sinks.b.alertmanager.urls: expected a list; got a text of 13 characters; write [ ] around it",
        "5:43: alerts.sinks.c.webhook.headers: expected keys with values; got a text of 6 characters",
        "6:46: alerts.sinks.d.webhook.token_file: expected an absolute path; got a text of 6 characters",
    ]
