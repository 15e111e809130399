import ast
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from reconciler.policies import table
from reconciler.policies.base import AnyPolicy, Policy, PolicyConfig, check_policy, check_precedence
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


def carve(view: NodeView, pools: Pools, previous: Pools | None, config: OneConfig) -> Pools:
    return pools


def nothing(view: NodeView, plan: NodePlan, config: Struct) -> tuple[Setting, ...]:
    return ()


def policy(name: str = "one", *, precedence: int = 1, summary: str = "one thing") -> Policy[OneConfig]:
    return Policy(name=name, summary=summary, config_type=OneConfig, precedence=precedence, decide_node=carve)


def test_the_shipped_table_names_every_policy_in_the_order_of_taking() -> None:
    shipped = [
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
        "capacity",
        "numa_memory",
        "watermarks",
    ]
    assert [policy.name for policy in POLICIES if policy.name in shipped] == shipped
    assert list(PoliciesConfig.__struct_fields__) == [policy.name for policy in POLICIES]


def test_the_type_checker_is_given_the_sections_as_they_are() -> None:
    """`PoliciesConfig` is made from the table; what the type checker reads in its place must agree."""
    tree = ast.parse(Path(table.__file__).read_text())
    block = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "PoliciesConfig")
    listed = {
        item.target.id: item.annotation.id
        for item in block.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and isinstance(item.annotation, ast.Name)
    }
    types = {policy.name: policy.config_type.__name__ for policy in POLICIES}
    assert listed
    assert listed.items() <= types.items()


def test_every_field_of_every_config_is_described() -> None:
    schema = msgspec.json.schema(PoliciesConfig)["$defs"]
    silent = [
        f"{name}.{field}"
        for name, body in schema.items()
        for field, facts in body.get("properties", {}).items()
        if name != "PoliciesConfig" and "$ref" not in facts and not facts.get("description")
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (policy(summary=""), "needs a summary"),
        (Policy(name="one", summary="x", config_type=OneConfig, precedence=1), "decides nothing"),
        (
            Policy(name="one", summary="x", config_type=Plain, precedence=1, parents=nothing),
            "its config must extend PolicyConfig",
        ),
        (
            Policy(name="one", summary="x", config_type=Loose, precedence=1, parents=nothing),
            "must be frozen and forbid",
        ),
        (
            Policy(name="one", summary="x", config_type=NoDefault, precedence=1, parents=nothing),
            "needs a default for each field",
        ),
    ],
)
def test_a_half_defined_policy_is_refused(wrong: AnyPolicy, message: str) -> None:
    check_policy(policy())
    with pytest.raises(ValueError, match=message):
        check_policy(wrong)


def test_two_policies_of_one_precedence_are_refused() -> None:
    assert [item.name for item in check_precedence((policy(), policy("two", precedence=2)))] == ["one", "two"]
    with pytest.raises(ValueError, match="policy two: has the precedence of one"):
        check_precedence((policy(), policy("two")))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"reclaimed": {"budget": {"limit_percent": 0}}}', "limit_percent"),
        (b'{"reclaimed": {"budget": {"floor_milli": 9}}}', "floor_milli"),
        (b'{"reclaimed": {"form": "weights"}}', "form"),
        (b'{"reclaimed": {"fomr": "quota"}}', "fomr"),
        (b'{"reserve": {"cpus": "3-1"}}', "runs backwards"),
        (b'{"reserve": {"cpus": "0 1"}}', "regex"),
        (b'{"idle_buffer": {"buffer_milli": -5}}', "buffer_milli"),
    ],
)
def test_wrong_values_are_refused_with_their_place(text: bytes, problem: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=problem):
        msgspec.json.decode(text, type=PoliciesConfig)
