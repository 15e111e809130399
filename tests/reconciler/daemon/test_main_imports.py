"""What an idle node does not use is not loaded: memory on every node is paid for on every node."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from reconciler.config.model import Config
from reconciler.detectors.config import SHIPPED_RULES
from reconciler.detectors.rule import SHIPPED
from reconciler.settings.binder import ConfigError, Text, bind

PROJECT = Path(__file__).parents[3]
IMPORTS = "from reconciler.config.model import Config\nfrom reconciler.settings.binder import Text, bind"
START = "import reconciler.daemon.main"
WEB = f"""
import reconciler.web.server, reconciler.web.app
{IMPORTS}
bind(Config, [Text("config.yaml", open("deploy/config.yaml").read())])
"""
OPT_IN = ("actuators", "alerts", "detectors", "responses", "signals")
"""Packages of which a node with the default configuration needs only what is listed below."""
NEEDED = {
    "actuators": {
        "base",
        "cgroup",
        "codec",
        "file_catalog",
        "holds",
        "mode",
        "restore",
        *(f"cgroup.{name}" for name in ("apply", "compare", "conflict", "control_files", "decide", "fastpath")),
        *(f"cgroup.{name}" for name in ("foreign_rules", "inner_groups", "records", "restore", "status")),
    },
    "alerts": {"agent_alerts", "alert", "config", "incident", "service", "sinks", "sinks.base"},
    "detectors": {"config"},
    "responses": {"config", "eviction", "eviction.config", "eviction.exemptions", "means", "means.config"},
    "signals": {"cpu", "groups", "irqs", "latest", "memory", "root_groups"},
}
NEVER = {
    *("pyroute2", "psutil", "httpx2", "httpcore2", "prometheus_client", "grpc", "google.protobuf", "rich", "difflib"),
    *(
        "reconciler.interference.engine",
        "reconciler.interference.monitor",
        "reconciler.interference.status",
        "reconciler.interference.recorder",
    ),
    *(
        "reconciler.clients.kube",
        "reconciler.clients.kubeconfig",
        "reconciler.control.cache_loop",
        "reconciler.control.network_loop",
        "reconciler.control.reclaim_loop",
        "reconciler.cli",
        "reconciler.config.docs",
    ),
    "reconciler.clients.command",
    *("reconciler.placement.allocate", "reconciler.placement.pack", "reconciler.placement.hints"),
}


@cache
def loaded(*parts: str) -> tuple[set[str], ...]:
    """The modules that a program of these parts has loaded after each of them."""
    program = "import sys\n" + "".join(f"{part}\nprint(*sys.modules)\n" for part in parts)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(set(line.split()) for line in done.stdout.splitlines())


def test_with_the_default_configuration_nothing_is_loaded_that_only_some_nodes_use() -> None:
    _, modules = loaded(START, WEB)
    for package in OPT_IN:
        prefix = f"reconciler.{package}."
        texts = {name.removeprefix(prefix) for name in modules if name.startswith(prefix)}
        assert texts == NEEDED.get(package, set()), package
    assert not NEVER & modules


SINKS = f'{IMPORTS}\nbind(Config, [Text("f", "alerts: {{sinks: {{a: {{webhook: {{url: http://h}}}}}}}}")])'
RULE = 'bind(Config, [Text("f", "interference: {rules: {cpu: {dry_run: false}}}")])'


def test_who_reads_a_configuration_with_sinks_and_probes_loads_nothing_that_asks() -> None:
    with_sinks, _ = loaded(SINKS, RULE)
    assert not {"trio", "ssl", "reconciler.clients.http"} & with_sinks


def test_the_web_part_loads_its_libraries_after_the_daemon() -> None:
    before, after = loaded(START, WEB)
    assert not {"h11", "starlette"} & before
    assert after >= {"h11", "starlette"}


def test_detectors_are_loaded_with_the_first_rule_that_is_written() -> None:
    before, after = loaded(SINKS, RULE)
    assert "reconciler.detectors.run_queue" in after - before


def test_a_mistake_in_a_late_loaded_section_has_its_location() -> None:
    text = "interference:\n  rules:\n    cpu: {dry_run: never}\n  probes:\n    p: {pods: [a], http: {}}\n"
    with pytest.raises(ConfigError) as caught:
        bind(Config, [Text("f", text)])
    first, second = map(str, caught.value.problems)
    assert first == "f:3:20: interference.rules.cpu.dry_run: expected true or false; got 'never'"
    assert second.startswith("f:5:26: interference.probes.p.http: missing key 'url'")


def test_the_shipped_rules_are_those_that_the_configuration_names() -> None:
    assert tuple(SHIPPED) == SHIPPED_RULES
