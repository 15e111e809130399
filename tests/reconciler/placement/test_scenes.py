"""Whole scenes: what fits gets what it requests, whatever preceded. `make search` plays ten thousand of them."""

import os

import pytest

from tests.reconciler.placement.scenes import Scene, play

WHOLE = "BYPASSD_SEARCH" in os.environ
SCENES = 10_000 if WHOLE else 100
PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_what_fits_is_neither_cut_nor_moved_off_its_node(part: int) -> None:
    each = SCENES // PARTS
    found = {seed: faults for seed in range(part * each, (part + 1) * each) if (faults := play(seed))}
    assert found == {}


@pytest.mark.parametrize("nodes", range(1, 13))
def test_on_machines_of_one_to_twelve_nodes(nodes: int) -> None:
    each = 100 if WHOLE else 2
    found = {seed: faults for seed in range(each) if (faults := play(seed, nodes=nodes))}
    assert found == {}


@pytest.mark.parametrize("part", range(PARTS))
def test_on_machines_with_many_nodes_of_one_container(part: int) -> None:
    each = SCENES // PARTS // 5
    found = {seed: faults for seed in range(part * each, (part + 1) * each) if (faults := play(seed, alone=True))}
    assert found == {}


@pytest.mark.parametrize("seed", [12257, 14108, 14982, 16874])
def test_a_fit_that_no_choice_one_by_one_finds(seed: int) -> None:
    """Arrivals with a container that has a node of its own: only some nodes for all of them together fit."""
    assert play(seed, events=1) == {}


KINDS = {
    "overlap", "separate", "expand True", "expand False", "isolated", "static True",
    "static False", "isolated True", "offline True", "gone", "->",
    "reserved True", "interrupt True", "dedicated any unbound False", "dedicated any decided False",
    "dedicated any bound False", "dedicated cores unbound False", "dedicated exclusive bound False",
    "shared any decided False", "shared any bound True", "shared any unbound True", "shared any unbound False",
    "reclaimed any unbound False",
}  # fmt: skip


def test_the_scenes_contain_every_kind_of_claim_and_event() -> None:
    """A generator that no longer makes something would prove nothing about it."""
    seen: set[str] = set()
    for seed in range(60):
        if seen >= KINDS:
            break
        scene = Scene(seed)
        seen |= {str(scene.config.shared.mode), f"static {scene.static}", f"expand {scene.config.shared.expand}"}
        seen |= {f"isolated {bool(scene.topology.isolated)}", f"offline {bool(scene.topology.offline)}"}
        for text in scene.events(6):
            pools = scene.settle()
            seen |= {word for word in ("gone", "->") if word in text}
            seen |= {"isolated" for uid in scene.pods if scene.isolated(uid)}
            seen |= {f"reserved {bool(pools.reserved)}", f"interrupt {bool(pools.interrupt)}"}
        for item in scene.pods.values():
            kind = "exclusive" if item.wish.numa_exclusive else "cores" if item.wish.full_cores else "any"
            bound = "decided" if item.wish.nodes else "bound" if item.wish.numa_binding else "unbound"
            seen.add(f"{item.pod_class} {kind} {bound} {bool(item.wish.pool)}")
    assert seen >= KINDS
