import resource
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from reconciler.runtime.counters import LATENCY_S, AgentCounters, CounterValues, Histogram, InterferenceCounters
from reconciler.telemetry.metrics import MetricsSnapshot, rss_bytes
from state.cache import CacheConsumption, CacheUsage, ShareLevel
from state.owners import OwnerAccount
from tests.reconciler.telemetry.complete import full
from tests.reconciler.telemetry.rendered import render

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(snapshot: MetricsSnapshot) -> Samples:
    """What Prometheus would read, by name and labels."""
    text, content_type = render(snapshot)
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_a_scrape_shows_the_snapshot() -> None:
    seen = scraped(full())
    expected: Samples = {
        ("bypassd_build_info", (("version", "0.1.0"),)): 1,
        ("bypassd_mode", (("mode", "observe"),)): 1,
        ("bypassd_mode", (("mode", "enforce"),)): 0,
        ("bypassd_paused", ()): 0,
        ("bypassd_ready", ()): 1,
        ("bypassd_store_ok", ()): 0,
        ("bypassd_watches", ()): 440,
        ("bypassd_realtime", ()): 1,
        ("bypassd_realtime_ended_total", (("bound", "budget"),)): 3,
        ("bypassd_realtime_ended_total", (("bound", "kernel_limit"),)): 2,
        ("bypassd_own_shares", (("placement", "own"),)): 50,
        ("bypassd_own_shares_raised_total", ()): 4,
        ("process_resident_memory_bytes", ()): 42,
        ("process_start_time_seconds", ()): 7,
        ("process_cpu_seconds_total", ()): 1.25,
        ("bypassd_resyncs_total", (("reason", "start"),)): 1,
        ("bypassd_pods", (("class", "reclaimed"),)): 1,
        ("bypassd_pods", (("class", "shared"),)): 0,
        ("bypassd_pool_cpus", (("pool", "shared"),)): 3,
        ("bypassd_claims_cut", ()): 2,
        ("bypassd_claims_missing_cpus", ()): 5,
        ("bypassd_budget_cpus", ()): 1.25,
        ("bypassd_used_cpus", (("by", "online"),)): 0.5,
        ("bypassd_settings", (("knob", "cpu.set"), ("state", "in_force"))): 4,
        ("bypassd_settings_refused", (("rule", "quota below a child"),)): 2,
        ("bypassd_holds", (("kind", "node"),)): 1,
        ("bypassd_holds", (("kind", "pod"),)): 2,
        ("bypassd_pods_without_series", ()): 7,
        ("bypassd_class_cpu_usage_seconds_total", (("class", "shared"),)): 90,
        ("bypassd_class_cpu_usage_seconds_total", (("class", "reclaimed"),)): 30,
        ("bypassd_class_cpu_throttled_seconds_total", (("class", "shared"),)): 4,
        ("bypassd_class_cpu_wait_seconds_total", (("class", "shared"),)): 2,
        ("bypassd_files_yielded", ()): 1,
        ("bypassd_ledger_files", ()): 9,
        ("bypassd_yields_total", ()): 1,
        ("bypassd_systemd_events_total", ()): 2,
        ("bypassd_writes_total", (("knob", "cpu.set"), ("outcome", "written"))): 2,
        ("bypassd_writes_total", (("knob", "cpu.quota"), ("outcome", "blocked"))): 1,
        ("bypassd_plan_events_total", ()): 2,
        ("bypassd_cpus_moved_total", ()): 3,
        ("bypassd_pools_changed_total", ()): 2,
        ("bypassd_cpuset_writes_total", ()): 3,
        ("bypassd_foreign_writes_total", (("writer", "kubelet"),)): 1,
        ("bypassd_container_starts_total", (("before_exec", "true"),)): 1,
        ("bypassd_container_starts_total", (("before_exec", "false"),)): 0,
        ("bypassd_container_starts_total", (("before_exec", "unknown"),)): 1,
        ("bypassd_signal_to_write_seconds_bucket", (("le", "0.00025"),)): 0,
        ("bypassd_signal_to_write_seconds_bucket", (("le", "0.0005"),)): 1,
        ("bypassd_signal_to_write_seconds_bucket", (("le", "+Inf"),)): 1,
        ("bypassd_signal_to_write_seconds_count", ()): 1,
        ("bypassd_signal_to_write_seconds_sum", ()): 0.0004,
        ("bypassd_reconcile_duration_seconds_count", ()): 1,
        ("bypassd_loop_lag_seconds_sum", ()): 0.5,
        ("bypassd_loop_lag_seconds_bucket", (("le", "0.25"),)): 1,
        ("bypassd_loop_lag_seconds_bucket", (("le", "1"),)): 2,
        ("bypassd_source_up", (("source", "cri"),)): 1,
        ("bypassd_source_up", (("source", "kubelet"),)): 0,
        ("bypassd_source_age_seconds", (("source", "cri"),)): 1.5,
        ("bypassd_component_up", (("component", "web"),)): 0,
        ("bypassd_component_failures_total", (("component", "web"),)): 2,
    }
    assert {key: seen.get(key) for key in expected} == expected
    assert ("bypassd_source_age_seconds", (("source", "kubelet"),)) not in seen
    assert ("bypassd_class_cpu_wait_seconds_total", (("class", "reclaimed"),)) not in seen


def test_a_pod_costs_ten_series_and_its_name_cannot_break_the_text() -> None:
    mine = {key: value for key, value in scraped(full()).items() if ("uid", "u1") in key[1]}
    assert len(mine) == 10
    labels = (("namespace", "prod"), ("pod", 'we"ird\n'), ("uid", "u1"))
    assert mine["bypassd_pod_quota_cpus", labels] == 1.5
    assert mine["bypassd_pod_wanted_quota_cpus", labels] == 1.25
    assert mine["bypassd_pod_cpuset_cpus", labels] == 3
    assert mine["bypassd_pod_wanted_cpuset_cpus", labels] == 2
    assert mine["bypassd_pod_cpu_usage_seconds_total", labels] == 12.5
    assert mine["bypassd_pod_cpu_throttled_seconds_total", labels] == 1.5
    assert ("bypassd_pod_cpu_wait_seconds_total", labels) not in mine
    assert mine["bypassd_pod_settings", tuple(sorted([*labels, ("state", "in_force")]))] == 4


def test_what_is_known_of_cache_and_bandwidth_is_shown_and_what_is_not_has_no_series() -> None:
    cache = CacheUsage(
        at_s=1.0,
        groups={
            "(default)": {0: CacheConsumption(occupancy_bytes=4096, total_bytes_s=2e9), 1: CacheConsumption()},
            "bypassd-be": {
                0: CacheConsumption(total_bytes_s=1e9),
                1: CacheConsumption(occupancy_bytes=0, total_bytes_s=0.0),
            },
        },
        classes={"bypassd-be": "reclaimed"},
        level=ShareLevel(cache_percent=25, mba_percent=15),
    )
    known = replace(full().pods[0], llc_bytes=512)
    seen = scraped(
        replace(full(), cache=cache, cache_age_s=2.5, pods=(known, replace(known, uid="u2", llc_bytes=None)))
    )
    values = {key: value for key, value in seen.items() if "llc" in key[0] or "memory_bandwidth" in key[0]}
    labels = (("namespace", "prod"), ("pod", 'we"ird\n'), ("uid", "u1"))
    assert values == {
        ("bypassd_llc_occupancy_bytes", (("cache", "0"), ("class", ""), ("group", "(default)"))): 4096,
        ("bypassd_llc_occupancy_bytes", (("cache", "1"), ("class", "reclaimed"), ("group", "bypassd-be"))): 0,
        ("bypassd_memory_bandwidth_bytes_per_second", (("cache", "0"), ("class", ""), ("group", "(default)"))): 2e9,
        (
            "bypassd_memory_bandwidth_bytes_per_second",
            (("cache", "0"), ("class", "reclaimed"), ("group", "bypassd-be")),
        ): 1e9,
        (
            "bypassd_memory_bandwidth_bytes_per_second",
            (("cache", "1"), ("class", "reclaimed"), ("group", "bypassd-be")),
        ): 0,
        ("bypassd_pod_llc_occupancy_bytes", labels): 512,
    }
    assert seen["bypassd_be_level_ratio", (("of", "cache"),)] == 0.25
    assert seen["bypassd_be_level_ratio", (("of", "memory_bandwidth"),)] == 0.15
    assert seen["bypassd_cache_use_age_seconds", ()] == 2.5


def test_an_empty_snapshot_is_a_scrape_too() -> None:
    seen = scraped(MetricsSnapshot(version="0", mode="enforce"))
    assert seen["bypassd_ready", ()] == 0
    assert not [
        key for key in seen if key[0].startswith(("bypassd_pod_", "bypassd_budget", "bypassd_llc", "bypassd_be"))
    ]


def test_open_metrics_is_given_to_who_asks_for_it() -> None:
    text, content_type = render(full(), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_the_values_are_a_copy() -> None:
    counters = AgentCounters()
    before = counters.values
    counters.started(0.1, before_exec=False)
    assert before == CounterValues(starts={"true": 0, "false": 0, "unknown": 0})
    assert counters.values.starts == {"true": 0, "false": 1, "unknown": 0}


@given(st.lists(st.floats(0, 2, allow_nan=False) | st.sampled_from(LATENCY_S), max_size=50))
def test_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it(values: list[float]) -> None:
    histogram = Histogram(LATENCY_S)
    for value in values:
        histogram.observe(value)
    seen = histogram.values
    assert sum(seen.counts) == len(values)
    for index, bound in enumerate(LATENCY_S):
        assert sum(seen.counts[: index + 1]) == sum(value <= bound for value in values)


def test_resident_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak / 10 < rss_bytes() <= peak * 1.1
    assert rss_bytes(str(tmp_path)) == 0


def test_what_is_watched_has_series_only_where_something_is() -> None:
    nothing = scraped(full())
    assert not [name for name, _ in nothing if "interference" in name or "response" in name or "eviction" in name]
    watched = InterferenceCounters(
        verdicts={("cpu", "interfered"): 1, ("cpu", "ok"): 11},
        steps={"squeeze": 1},
        changes={("squeeze", "applied"): 3, ("squeeze", "would-applied"): 2},
        read_s={"runqueue": 0.25},
        pass_s=0.004,
        orders={"done": 2, "open": 1},
        ended={"done": 7, "failed": 0},
        would=1,
    )
    values = scraped(replace(full(), watched=watched))
    assert values["bypassd_interference_victims", (("rule", "cpu"), ("verdict", "interfered"))] == 1
    assert values["bypassd_response_steps", (("response", "squeeze"),)] == 1
    assert values["bypassd_response_changes_total", (("response", "squeeze"), ("turn", "applied"))] == 3
    assert values["bypassd_signal_read_seconds_total", (("reader", "runqueue"),)] == 0.25
    assert values["bypassd_evictions", (("outcome", "open"),)] == 1
    assert values["bypassd_evictions_ended_total", (("outcome", "done"),)] == 7
    assert values["bypassd_evictions_ended_total", (("outcome", "failed"),)] == 0
    assert values["bypassd_evictions_wanted", ()] == 1


def test_cpu_time_by_owner_is_three_counters_each_and_a_name_cannot_break_the_text() -> None:
    accounts = {"ci": OwnerAccount(sold_s=2.5, taken_s=1.0, lost_s=0.5, fair_s=9.0), 'a"\n}': OwnerAccount()}
    samples = scraped(replace(full(), owner_cpu_s=accounts))
    name = "bypassd_be_owner_cpu_seconds_total"
    found = {labels: value for (sample, labels), value in samples.items() if sample == name}
    assert len(found) == 6
    assert [found[("kind", kind), ("owner", "ci")] for kind in ("sold", "taken_back", "lost")] == [2.5, 1.0, 0.5]
    assert not [sample for sample, _ in scraped(full()) if sample == name]
