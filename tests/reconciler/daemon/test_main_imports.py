"""What an idle node does not use is not loaded: memory on every node is paid for on every node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reconciler.config.model import Config
from reconciler.detectors.config import SHIPPED_RULES
from reconciler.detectors.rule import SHIPPED
from reconciler.settings.binder import ConfigError, Text, bind

PROJECT = Path(__file__).parents[3]
IMPORTS = "from reconciler.config.model import Config\nfrom reconciler.settings.binder import Text, bind"
DAEMON = f"""
import reconciler.daemon.main, reconciler.web.server, reconciler.web.app
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


def loaded(code: str) -> set[str]:
    """The modules that a program of this text has loaded at its end."""
    program = f"{code}\nimport sys\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_with_the_default_configuration_nothing_is_loaded_that_only_some_nodes_use() -> None:
    modules = loaded(DAEMON)
    for package in OPT_IN:
        prefix = f"reconciler.{package}."
        texts = {name.removeprefix(prefix) for name in modules if name.startswith(prefix)}
        assert texts == NEEDED.get(package, set()), package
    assert not NEVER & modules


def test_who_reads_a_configuration_with_sinks_and_probes_loads_nothing_that_asks() -> None:
    text = "alerts: {sinks: {a: {webhook: {url: http://h}}}}"
    code = f'{IMPORTS}\nbind(Config, [Text("f", "{text}")])'
    assert not {"trio", "ssl", "reconciler.clients.http"} & loaded(code)


def test_the_web_part_loads_its_libraries_after_the_daemon() -> None:
    assert not {"h11", "starlette"} & loaded("import reconciler.daemon.main")


def test_detectors_are_loaded_with_the_first_rule_that_is_written() -> None:
    rule = 'bind(Config, [Text("f", "interference: {rules: {cpu: {dry_run: false}}}")])'
    assert "reconciler.detectors.run_queue" in loaded(f"{IMPORTS}\n{rule}")


def test_a_mistake_in_a_late_loaded_section_has_its_location() -> None:
    text = "interference:\n  rules:\n    cpu: {dry_run: never}\n  probes:\n    p: {pods: [a], http: {}}\n"
    with pytest.raises(ConfigError) as caught:
        bind(Config, [Text("f", text)])
    first, second = map(str, caught.value.problems)
    assert first == "f:3:20: interference.rules.cpu.dry_run: expected true or false; got 'never'"
    assert second.startswith("f:5:26: interference.probes.p.http: missing key 'url'")


def test_the_shipped_rules_are_those_that_the_configuration_names() -> None:
    assert tuple(SHIPPED) == SHIPPED_RULES
