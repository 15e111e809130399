"""Settings of earlier versions: a configuration that still has one is read without it, and a warning says what applies.

The table says what replaced each, or why nothing did.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, final

from reconciler.settings.nodes import ConfigProblem, Node, Scalar, Sequence, SourceLocation
from reconciler.settings.nodes import Mapping as Section
from reconciler.settings.schema import nested

_CONDITIONS: Final = (
    "write the comparisons as `threshold` detectors: those of one group must all agree (and), one group is enough (or)"
)
_SWITCHES: Final = "write enabled: false for off, dry_run: true for shadow, dry_run: false for enforce"
# The numbers of laws that no two nodes need to differ: constants next to the settings of the same class, each with its
# reason. A section a line.
FIXED: Final[Mapping[str, str]] = dict(
    line.split(": ", 1)
    for line in """\
kubelet: timeout_s 3s, period_s 10s
runtime: timeout_s 2s
apiserver: timeout_s 10s
alerts: queue 1000, source_down_s 1m
policies.exclusive: remember 256
policies.shared.size: grow_step_cpus 10, grow_step_percent 50%, grow_interval_s 1s, shrink_step_cpus 2, \
shrink_step_percent 10%, shrink_interval_s 30s, headroom_milli 1cpu, minimum_cpus 2
policies.shared.provision.estimate: margin_percent 25%, half_life_s 5m, ramp_up_s 30s, stale_after_s 15s, \
fallback_milli 1cpu
policies.shared.provision.pid.cpu_sched_wait: up 0.5, down 0.09, above 0.05, below 0.2
policies.shared.provision.pid.cpi: up 1, down 0.4, above 0, below 0.02, stale_after_s 130s
policies.shared.provision.pid: up_milli 10cpu, down_milli 2cpu, settle_s 5s, stale_after_s 15s
policies.shared.isolation: over_percent 150%, over_milli 2cpu, minimum_milli 1cpu, pods_percent 50%, samples 3, \
sample_s 5s, release_s 2m
policies.idle_buffer: interval_s 100ms, grow_after_s 1s, grow_milli 1cpu
policies.reclaimed.budget.harm: clear_factor 4, quiet_percent 50%, interval_s 100ms, calm_interval_s 500ms, \
pods_per_round 64, processes_per_round 512, cut_percent 25%, clear_cut_percent 50%, settle_s 250ms, blame_s 2s, \
backoff_s 1m, compare_s 10s, compare_after_s 1m, wait_milli 5m, wait_us 100us, raise_percent 10%, calm_s 1s
policies.reclaimed.budget: grain_percent 2%, grow_interval_s 2s, stale_after_s 3s, unknown_hold_s 30s, floor_milli \
100m, grow_percent 10%, arrival_s 5s
policies.reclaimed.start: seconds 5, exec_s 100ms, share_percent 10%, burst_s 30s, late_s 5s, command_s 300ms
policies.quota_burst: unused_s 1m
policies.quota_turbo: interval_s 100ms, grow_percent 1%, swing_percent 10%, swing_window_s 1m, window_looks 60, \
ceiling_percent 200%
policies.group_identity: online 2, reclaimed -1
policies.be_memory: clear_percent 200%, shrink_percent 10%, grow_percent 1%, grow_after_s 1m, interval_s 5s
policies.cache: dwell_s 30s, sweep_s 2s
policies.memory_reclaim: rest_s 1m, swap_percent 80%, most_bytes 256Mi, least_bytes 64Mi, interval_s 6s, \
pressure_percent 0.1%, probe_percent 1%, leave_bytes 100Mi
policies.capacity: window_s 5m, file capacity.json, notice_s 2s
policies.node_daemons: need_percent 200%, floor_shares 50, window_s 1m, hold_s 10s
policies.network: interval_s 1s
policies.idle_class: sweep_s 10s
policies.core_sched: sweep_s 5s
policies.oom_score: sweep_s 10s
headroom: stale_after_s 3s, unknown_hold_s 4m, report_s 30s, min_step_milli 300m, max_step_milli 4cpu
headroom.memory: growth_percent 10%, min_step_bytes 300Mi, max_step_bytes 5Gi
owners: most 32, fair_hours 4
interference.perf: window_s 10s, period_s 1m, descriptors 2048
interference.responses: better_percent 10%, min_score 0.2, effect_s 10s, remember_s 1h, recover_s 30s, recover_percent \
25%, evict_effect_s 90s
interference.promotion: verdicts 20, actions 5, rest_days 7, undo_percent 30%
interference.record: file_s 1h
interference: settle_s 30s
interference.responses.freeze: rest_s 5m
closing: reopen_s 2m, longest_s 4h
eviction: fresh_s 15s, owned_percent 25%, least_percent 1%, credit_s 1m, interval_s 5s
eviction.triggers.cpu_satisfaction: grace_s the pod's own, cooldown_s 20s, window_s 1m, use_percent 90%, upper_percent \
80%
eviction.triggers.suppression: grace_s the pod's own, cooldown_s 1m, for_s 5m
eviction.triggers.pool_load: grace_s the pod's own, cooldown_s 5m, soft_ratio 1, samples 10, sample_s 10s, met_percent \
80%
eviction.triggers.numa_cpu: grace_s the pod's own, cooldown_s 1m, samples 4, sample_s 15s, met_percent 70%
eviction.triggers.node_cpu: grace_s the pod's own, cooldown_s 20s, window_s 30s
eviction.triggers.node_memory: grace_s the pod's own, cooldown_s 4s
eviction.triggers.numa_memory: grace_s 10s, cooldown_s 10s, urgent_bytes 1Gi, inactive_file_bytes 4Gi, \
droppable_percent 10%, fallback_percent 0.1%, margin_bytes 256Mi
eviction.triggers.memory_pressure: grace_s 10s, cooldown_s 35s, droppable_percent 10%, pod_percent 1%, pods 3, \
mean_percent 4%, node_percent 15%, reclaimed_s 15s, all_s 45s
eviction.triggers.rss_overuse: grace_s the pod's own, cooldown_s 1m, for_s 30s
eviction.triggers.disk: grace_s the pod's own, cooldown_s 1m, margin_percent 2%, smallest_bytes 10Gi, for_s 10s
eviction.triggers.reclaimed_resource: grace_s 1m, cooldown_s 1m, lower_percent 100%, for_s 1m
eviction.triggers.interference: grace_s the pod's own, cooldown_s 1m
eviction.means: kill_s 30s, at_once 2, default_grace_s 30s, margin_s 15s
eviction.means.api: refused_s 2m, failing_s 30s, first_wait_s 2s, longest_wait_s 30s
eviction.means.restarts: watch_s 15s, times 3
eviction.triggers.disk.nodefs: inodes_percent 7%
eviction.triggers.disk.imagefs: inodes_percent 7%
eviction.spared: young_s 1m
eviction.limits: quiet_s 1m, closed_s 30s, per_pass 3, retry_s 2m, again_s 5m
eviction.means.notice: file notice.json
writes.foreign: systemd_per_minute 60, window_s 2m, backoff_s 1s, backoff_max_s 30s, retry_yielded_s 1h
writes: verify_s 2s, slow_timeout_s 30s
store: history 10000
http: max_connections 32
interference.rules.*.when.pressure: falling_fraction 0.85
interference.rules.*.when.run_queue: floor_percent 1%, severe_percent 20%, throttled_percent 0%, relearn_s 30m
interference.rules.*.when.cpi: half_life_s 1d, relearn_s 6h, stale_s 130s
interference.rules.*.when.memory_events: pods_hits 20, kill_s 1m
interference.rules.*.when.ewma: relearn_s 1m
""".strip().split("\n")
)
_GONE: Final = ("policies.shared.provision.estimate", "interference.perf", "eviction.means.restarts")
"""Sections that had nothing but such numbers."""
REMOVED: Final[Mapping[str, str]] = {
    "alerts.sinks.*.kubernetes.node_namespace": "always default: the API takes Events on a node in no other one",
    "interference.rules.*.mode": _SWITCHES,
    "interference.rules.*.when.expression": _CONDITIONS,
    "interference.responses.squeeze": "the sizes of steps and what a pod keeps are fixed",
    "interference.responses.partition": "always to 50, 25 and 10 % of BE's share",
    "policies.exclusive.placement.combinations": "always 16",
    "policies.exclusive.prefer_cpu": "always true",
    "policies.shared.size.whole_cores": "always true",
    "policies.reclaimed.placement.combinations": "always 16",
    "policies.shared.provision.pid.cpu_usage_ratio": "its gains are fixed; provision.target_percent is the target",
    "policies.memory_qos.system": "pods of the system have the defaults of online pods",
    "policies.cache.system": "pods of the system have the whole cache",
    "policies.cache.levels": "low, middle, high: always 20, 30, 50 % of the cache and 10, 30, 50 % of the bandwidth",
    "policies.cache.law": "its thresholds and steps are fixed",
    "policies.reclaimed.pod_weight": "always written",
    "policies.batch.pod_quota": "as policies.batch.quota",
    "policies.quota_burst.only_asked": "with enabled: false and pods: true only pods that ask for it take part",
    "policies.dedicated.infer": "always, without a usable checkpoint",
    "policies.reserve.from_kubelet": "always with the kubelet's reservedSystemCPUs",
    **{section: f"always {FIXED[section]}" for section in _GONE},
    **{
        f"{section}.{key}": f"always {value}"
        for section, keys in FIXED.items()
        if section not in _GONE
        for key, _, value in (item.partition(" ") for item in keys.split(", "))
    },
}
"""Dotted keys (``*`` for a name, without the indexes of lists), and what to write instead, or what applies."""
_SECTIONS: Final = nested(REMOVED)
_RULE: Final = 3
"""Names in the path of a rule, ``interference.rules.NAME``: it is off without a key of it that is in the table."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@final
class RemovedKeys:
    """Takes the keys of `REMOVED` out of files, and adds each to ``found``. ``table``: such keys in their sections."""

    def __init__(self, found: list[ConfigProblem], table: Mapping[str, Any] = _SECTIONS) -> None:
        self._table = table
        self._found = found

    def prune(self, tree: Node) -> Node:
        return self._pruned(tree, (), self._table)

    def _pruned(self, node: Node, path: tuple[str, ...], table: Mapping[str, Any]) -> Node:
        """``table``: that of this section; a text in it is what applies instead of the key."""
        if isinstance(node, Scalar):
            return node
        if isinstance(node, Sequence):
            return Sequence(node.at, tuple(self._pruned(item, path, table) for item in node.items))
        before = len(self._found)
        items = {}
        for key, value in node.items.items():
            below = table.get(key, table.get("*"))
            if isinstance(below, str):
                # Never an error: a node must start after an upgrade.
                self._note(node.places[key], (*path, key), below)
            else:
                items[key] = value if below is None else self._pruned(value, (*path, key), below)
        # A rule with one condition less could respond more often.
        if len(path) == _RULE and path[:2] == ("interference", "rules") and len(self._found) > before:
            return Section(node.at, {"enabled": Scalar(node.at, "false", quoted=False)}, {"enabled": node.at})
        return Section(node.at, items, node.places)

    def _note(self, at: SourceLocation, path: tuple[str, ...], text: str) -> None:
        # A name may be a misplaced secret.
        shown = ".".join(name if _PLAIN.fullmatch(name) else "*" for name in path)
        effect = "the rule is off" if path[:2] == ("interference", "rules") else "ignored"
        self._found.append(ConfigProblem(at, shown, f"no longer a setting, {effect}; {text}"))
