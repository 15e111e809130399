import msgspec
import pytest
from msgspec import Struct

from reconciler.policies.base import AnyPolicy, Policy, PolicyConfig, registered
from reconciler.policies.table import POLICIES, PoliciesConfig
from state.model import NodeView, Pools, Setting
from state.plan import NodePlan


class OneConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: int = 1


class NoDefault(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: int


class Loose(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=False):
    size: int = 1


class Plain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: int = 1


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    one: OneConfig = OneConfig()


class Sections(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    two: OneConfig = OneConfig()


def carve(view: NodeView, pools: Pools, previous: Pools | None, config: OneConfig) -> Pools:
    return pools


def nothing(view: NodeView, plan: NodePlan, config: Struct) -> tuple[Setting, ...]:
    return ()


def policy(name: str = "one", *, precedence: int = 1, summary: str = "one thing") -> Policy[OneConfig]:
    return Policy(name=name, summary=summary, config_type=OneConfig, precedence=precedence, decide_node=carve)


def test_the_shipped_table_names_every_policy_in_the_order_of_taking() -> None:
    names = [one.name for one in POLICIES]
    assert names == [
        "dedicated",
        "reserve",
        "exclusive",
        "shared",
        "idle_buffer",
        "responses",
        "reclaimed",
        "batch",
        "quota_burst",
        "quota_turbo",
        "disk",
        "network",
        "pinned",
        "normalise",
        "burst",
        "idle_class",
        "group_identity",
        "qos_level",
        "be_memory",
        "memory_qos",
        "core_sched",
        "cache",
        "memory_reclaim",
        "oom_score",
        "numa_memory",
        "watermarks",
    ]


def test_every_field_of_every_config_is_described() -> None:
    schema = msgspec.json.schema(PoliciesConfig)["$defs"]
    silent = [
        f"{name}.{field}"
        for name, body in schema.items()
        for field, facts in body.get("properties", {}).items()
        if name != "PoliciesConfig" and "$ref" not in facts and not facts.get("description")
    ]
    assert silent == []


def test_a_good_table_passes_unchanged() -> None:
    assert registered(Section, (policy(),)) == (policy(),)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((policy(), policy(precedence=2)), "policy one: registered twice"),
        ((policy(), policy("two")), "policy two: has the precedence of one"),
        ((policy("no name"),), "needs a name that is an identifier"),
        ((policy(summary=""),), "and a summary"),
        ((Policy(name="one", summary="x", config_type=OneConfig, precedence=1),), "policy one: decides nothing"),
        (
            (Policy(name="one", summary="x", config_type=Plain, precedence=1, parents=nothing),),
            "policy one: its config must extend PolicyConfig",
        ),
        (
            (Policy(name="one", summary="x", config_type=Loose, precedence=1, parents=nothing),),
            "must be frozen and forbid",
        ),
        (
            (Policy(name="one", summary="x", config_type=NoDefault, precedence=1, parents=nothing),),
            "needs a default for each field",
        ),
        ((policy("other"),), "policy other: Section has no field other of its config type"),
        ((), "policy one: Section has the section, the table has no policy"),
    ],
)
def test_a_duplicate_or_half_defined_policy_fails_when_the_table_is_made(
    table: tuple[AnyPolicy, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        registered(Section, table)


def test_a_new_policy_is_one_policy_and_one_registration() -> None:
    table = registered(Sections, (policy(), policy("two", precedence=2)))
    assert [one.name for one in table] == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"reclaimed": {"budget": {"limit_percent": 0}}}', "limit_percent"),
        (b'{"reclaimed": {"budget": {"floor_milli": 9}}}', "floor_milli"),
        (b'{"reclaimed": {"form": "weights"}}', "form"),
        (b'{"reclaimed": {"fomr": "quota"}}', "fomr"),
        (b'{"reserve": {"cpus": "3-1"}}', "runs backwards"),
        (b'{"reserve": {"cpus": "0 1"}}', "regex"),
        (b'{"idle_buffer": {"interval_s": 5}}', "interval_s"),
    ],
)
def test_wrong_values_are_refused_with_their_place(text: bytes, problem: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=problem):
        msgspec.json.decode(text, type=PoliciesConfig)
