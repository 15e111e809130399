"""``mode: observe`` for the agent, ``dry_run`` for a part: what does not act is listed in one place."""

import pytest

from reconciler.config.dry_run import dry_run_parts
from reconciler.config.model import Config
from reconciler.daemon.main import main
from reconciler.policies.table import POLICIES
from reconciler.settings.binder import Text, bind
from reconciler.settings.schema import section_of, settings


def parts(text: str) -> tuple[str, ...]:
    return dry_run_parts(bind(Config, [Text("f", text)]).value)


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("mode: enforce", ()),
        ("policies: {reclaimed: {dry_run: true}}", ("policies.reclaimed",)),
        ("policies: {cache: {dry_run: true}}", ()),
        ("policies: {cache: {enabled: true, dry_run: true}}", ("policies.cache",)),
        ("eviction: {enabled: true}", ("eviction",)),
        (
            "eviction: {enabled: true, dry_run: false, triggers: {node_memory: {enabled: true, dry_run: true}}}",
            ("eviction.triggers.node_memory",),
        ),
        (
            "interference: {enabled: true, rules: {cpu: {dry_run: false}, io: {enabled: false}}}",
            ("interference.rules.memory", "interference.rules.cache"),
        ),
    ],
)
def test_enabled_parts_in_dry_run_are_listed_by_their_setting(text: str, listed: tuple[str, ...]) -> None:
    assert parts(text) == listed


def test_every_policy_can_be_a_dry_run_and_is_listed_then() -> None:
    for policy in POLICIES:
        name = f"policies.{policy.name}"
        assert name in parts(f"policies: {{{policy.name}: {{enabled: true, dry_run: true}}}}")
        assert name not in parts("{}")


def test_no_setting_says_it_by_another_word() -> None:
    for path, field in settings(section_of(Config)):
        assert not {"shadow", "dry-run"} & set(field.schema.choices), path
        if "observe" in field.schema.choices:
            assert path in {"mode", "protect"}  # the preset of that name sets the mode


def test_the_option_of_an_older_version_says_what_to_write_instead(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--dry-run"])
    assert caught.value.code == 2
    assert "--dry-run is renamed; write --observe" in capsys.readouterr().err
