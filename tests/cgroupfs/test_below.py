"""The walk over groups that others have made: parents first, bounded, one listing at a time."""

from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.steps import groups_below

Tree = dict[str, "Tree"]
TREES: st.SearchStrategy["Tree"] = st.recursive(
    st.just({}), lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4), max_leaves=30
)


def paths_of(tree: Tree, above: str = "/t") -> set[str]:
    return {path for name, inner in tree.items() for path in (f"{above}/{name}", *paths_of(inner, f"{above}/{name}"))}


def at(tree: Tree, path: str) -> Tree:
    for name in path.split("/")[2:]:
        tree = tree[name]
    return tree


@given(TREES, st.integers(0, 40))
def test_each_group_is_there_once_after_the_one_that_it_is_in_and_no_more_than_allowed(tree: Tree, most: int) -> None:
    listings = 0

    def names(path: str, left: int) -> list[str]:
        nonlocal listings
        listings += 1
        assert 0 < left <= most
        return list(at(tree, path))[:left]

    found: list[str] = []
    for path in groups_below(names, "/t", most):
        found.append(path)
        assert listings <= len(found), "one listing a step"
        above = path.rpartition("/")[0]
        assert above == "/t" or above in found
    assert len(found) == len(set(found)) == min(most, len(paths_of(tree)))
    assert set(found) <= paths_of(tree)


def test_a_group_that_has_gone_has_none() -> None:
    def names(path: str, _: int) -> list[str]:
        if path == "/t/gone":
            raise FileNotFoundError(path)
        return {"/t": ["gone", "b"], "/t/b": ["c"]}.get(path, [])

    assert list(groups_below(names, "/t", 9)) == ["/t/gone", "/t/b", "/t/b/c"]
