"""What an idle node does not use is not loaded: memory on every node is paid for on every node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reconciler.binder import ConfigError, Text, bind
from reconciler.config import Config
from reconciler.detectors.rule import SHIPPED
from reconciler.interference import SHIPPED_RULES

PROJECT = Path(__file__).parents[2]
DAEMON = """
import reconciler.daemon, reconciler.web.server, reconciler.web.app
from reconciler.binder import Text, bind
from reconciler.config import Config
bind(Config, [Text("config.yaml", open("deploy/config.yaml").read())])
"""
OPT_IN = ("actuators", "alerts", "detectors", "responses", "signals")
"""Packages of which a node with the default configuration needs only what is listed below."""
NEEDED = {
    "actuators": {
        "cgroup",
        "compare",
        "judge",
        "ondemand",
        "given",
        "others",
        "putback",
        "readings",
        "resets",
        "side",
        "spec",
    }
    | {"standing", "values", "work", "cookies"},
    "alerts": {"alert", "config", "plainwords", "telling"},
    "responses": {"config", "eviction", "eviction.config", "eviction.spared", "means", "means.config"},
    "signals": {"cpu", "groups", "irqs", "load", "memory", "numa_memory", "perf_config", "uses"},
}
NEVER = {
    *("pyroute2", "psutil", "httpx2", "httpcore2", "prometheus_client", "grpc", "google.protobuf", "rich", "difflib"),
    *("reconciler.brain", "reconciler.observer", "reconciler.observed", "reconciler.recorder", "reconciler.podfacts"),
    *("reconciler.kubeapi", "reconciler.kubeconfig", "reconciler.networklaw", "reconciler.cli", "reconciler.configdoc"),
    *("reconciler.program", "reconciler.launch"),
    *("reconciler.placement.take", "reconciler.placement.pack", "reconciler.placement.hints"),
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
        found = {name.removeprefix(prefix) for name in modules if name.startswith(prefix)}
        assert found == NEEDED.get(package, set()), package
    assert not NEVER & modules


def test_who_reads_a_configuration_with_sinks_and_probes_loads_nothing_that_asks() -> None:
    text = "alerts: {sinks: {a: {webhook: {url: http://h}}}}"
    code = f'from reconciler import binder, config\nbinder.bind(config.Config, [binder.Text("f", "{text}")])'
    assert not {"trio", "ssl", "reconciler.httpclient"} & loaded(code)


def test_detectors_are_loaded_with_the_first_rule_that_is_written() -> None:
    rule = 'bind(Config, [Text("f", "interference: {rules: {cpu: {mode: enforce}}}")])'
    assert "reconciler.detectors.run_queue" in loaded(f"{DAEMON}\n{rule}")


def test_a_mistake_in_what_is_loaded_late_is_told_with_its_place() -> None:
    text = "interference:\n  rules:\n    cpu: {mode: never}\n  probes:\n    p: {pods: [a], http: {}}\n"
    with pytest.raises(ConfigError) as caught:
        bind(Config, [Text("f", text)])
    first, second = map(str, caught.value.problems)
    assert first == "f:3:17: interference.rules.cpu.mode: expected one of off, shadow, enforce; got 'never'"
    assert second.startswith("f:5:26: interference.probes.p.http: missing key 'url'")


def test_the_shipped_rules_are_those_that_the_configuration_names() -> None:
    assert tuple(SHIPPED) == SHIPPED_RULES
