"""The levels of ``protect``: which is configured, what each adds on this node, and what the node lacks for it."""

from collections.abc import Iterator

from reconciler.cli.checks.finding import CheckResult, CheckState
from reconciler.cli.checks.offers import offers_of
from reconciler.cli.nodeview import InspectedNode
from reconciler.config.load import value_at
from reconciler.config.model import Config
from reconciler.config.presets import LEVELS, ROWS, LevelEffect, effects, rows_of


def protection(node: InspectedNode) -> Iterator[CheckResult]:
    """One line. A lack is a warning at a level that is configured; the next level's is only named."""
    if "config" in node.problems:
        return
    level = node.config.protect
    overridden = list(_overridden(node.config))
    empty = [row.listed for row in ROWS if row.listed and not value_at(node.config, row.listed)]
    found = list(effects(offers_of(node), [*overridden, *empty]))
    texts = [f"{level.value if level is not None else 'no preset'}, mode {node.config.mode.value}"]
    if overridden:
        texts.append(f"overridden: {', '.join(overridden)}")
    texts += map(_text, found)
    configured = [effect for effect in found if level in LEVELS and effect.level in LEVELS[: LEVELS.index(level) + 1]]
    if fixes := [_lacks(effect) for effect in configured if effect.lacks]:
        yield CheckResult("protect", CheckState.WARN, "; ".join(texts), "; ".join(fixes))
        return
    texts += [_lacks(effect) for effect in found if effect.lacks][:1]
    yield CheckResult("protect", CheckState.OK, "; ".join(texts))


def _overridden(config: Config) -> Iterator[str]:
    """The settings of the level that have another value."""
    for row in rows_of(config.protect):
        value = value_at(config, row.setting)
        if value != row.value:
            yield row.setting


def _text(effect: LevelEffect) -> str:
    """``cpu: idle buffer, idle class``: the level, and what it adds here."""
    waiting = [f"{name} (no {listed})" for name, listed in effect.unlisted.items()]
    return f"{effect.level.value}: {', '.join([*effect.gives, *waiting]) or 'nothing more'}"


def _lacks(effect: LevelEffect) -> str:
    """``cpu lacks idle class (this kernel has no cpu.idle)``: what of a level this node lacks, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in effect.lacks.items():
        by_reason.setdefault(reason, []).append(name)
    texts = [f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()]
    return f"{effect.level.value} lacks {', '.join(texts)}"
