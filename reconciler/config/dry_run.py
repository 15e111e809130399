"""Parts of the agent that do not act: one function for ``status``, ``dump`` and the web interface.

``mode: observe`` is the agent as a whole; ``dry_run`` is a part of it: a policy, all evictions, one trigger of them, a
rule. Disabled parts are not listed: they plan nothing.
"""

from collections.abc import Iterator

from reconciler.actuators.mode import WriteSettings
from reconciler.config.model import AgentMode, Config, Lower


def dry_run_parts(config: Config) -> tuple[str, ...]:
    """The dotted names of the enabled parts that are configured as a dry run, in any ``mode``."""
    return tuple(_parts(config))


def write_settings(config: Config) -> WriteSettings:
    sections = ((name, getattr(config.policies, name)) for name in config.policies.__struct_fields__)
    return WriteSettings(
        enforce=config.mode is AgentMode.ENFORCE,
        dry_policies=frozenset(name for name, section in sections if section.dry_run),
        reclaim=config.memory.lower is Lower.RECLAIM,
    )


def _parts(config: Config) -> Iterator[str]:
    for name in config.policies.__struct_fields__:
        policy = getattr(config.policies, name)
        if policy.enabled and policy.dry_run:
            yield f"policies.{name}"
    if config.interference.enabled:
        from reconciler.detectors.rule import effective

        for name, rule in effective(config.interference.rules).items():
            if rule.dry_run:
                yield f"interference.rules.{name}"
    if config.eviction.enabled:
        if config.eviction.dry_run:
            yield "eviction"
        for name in config.eviction.triggers.__struct_fields__:
            trigger = getattr(config.eviction.triggers, name)
            if trigger.enabled and trigger.dry_run:
                yield f"eviction.triggers.{name}"
