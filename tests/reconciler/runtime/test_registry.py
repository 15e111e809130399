"""The registry's promises: rows are checked at import, objects are imported at their first use."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct, structs

from reconciler.runtime.lazy import import_in_thread, load, split
from reconciler.runtime.registry import Registry, section_type


class Tool(Struct, frozen=True, kw_only=True):
    name: str
    size: int = 1


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with the modules ``saw`` and ``drill``, each with a TOOL, and ``broken``, which raises."""
    directory = tmp_path / "shed"
    directory.mkdir()
    (directory / "__init__.py").touch()
    for name in ("saw", "drill"):
        text = f"from tests.reconciler.runtime.test_registry import Tool\nTOOL = Tool(name={name!r})\n"
        (directory / f"{name}.py").write_text(text)
    (directory / "broken.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "shed"
    for name in [name for name in sys.modules if name.split(".")[0] == "shed"]:
        del sys.modules[name]


def test_names_are_listed_in_order_and_nothing_is_imported(package: str) -> None:
    tools: Registry[Tool] = Registry("tool", Tool, ("saw", "shed.saw:TOOL"), ("drill", "shed.drill:TOOL"))
    assert list(tools) == ["saw", "drill"]
    assert len(tools) == 2
    assert "saw" in tools
    assert "axe" not in tools
    assert not {"shed.saw", "shed.drill"} & sys.modules.keys()


def test_a_lookup_imports_one_module_once(package: str) -> None:
    tools: Registry[Tool] = Registry("tool", Tool, ("saw", "shed.saw:TOOL"), ("drill", "shed.drill:TOOL"))
    saw = tools["saw"]
    assert saw == Tool(name="saw")
    assert "shed.drill" not in sys.modules
    assert tools["saw"] is saw
    assert [tool.name for tool in tools.values()] == ["saw", "drill"]
    with pytest.raises(KeyError):
        tools["axe"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((("a", "m:A"), ("a", "m:B")), "tool a: registered twice"),
        ((("a", "m:A"), ("b", "m:A")), "tool b: m:A is registered twice"),
        ((("no name", "m:A"),), "tool 'no name': the name must be an identifier"),
        ((("a", "m.A"),), "tool a: expected package.module:Attribute; got 'm.A'"),
        ((("a", "../m:A"),), "tool a: expected package.module:Attribute"),
    ],
)
def test_wrong_rows_are_refused_when_the_table_is_made(rows: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Registry("tool", Tool, *rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("axe", "shed.axe:TOOL"), "tool axe: shed.axe:TOOL cannot be imported"),
        (("saw", "shed.saw:HAMMER"), "tool saw: shed.saw:HAMMER cannot be imported"),
        (("broken", "shed.broken:TOOL"), "tool broken: .*no_such_module_anywhere"),
        (("saw", "shed.saw:Tool"), "tool saw: shed.saw:Tool is no Tool"),
        (("axe", "shed.saw:TOOL"), "tool axe: shed.saw:TOOL calls itself 'saw'"),
    ],
)
def test_an_object_that_does_not_fit_its_row_is_refused_at_its_first_use(
    package: str, row: tuple[str, str], message: str
) -> None:
    tools: Registry[Tool] = Registry("tool", Tool, row)
    with pytest.raises(ValueError, match=message):
        tools[row[0]]


def test_the_tables_own_check_names_the_row(package: str) -> None:
    def check(tool: Tool) -> None:
        if tool.size < 2:
            raise ValueError("too small")

    tools: Registry[Tool] = Registry("tool", Tool, ("saw", "shed.saw:TOOL"), check=check)
    with pytest.raises(ValueError, match="tool saw: too small"):
        tools["saw"]


def test_a_section_has_a_field_for_each_entry_and_the_checks_of_its_base() -> None:
    class Base(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """Two tools."""

        def __post_init__(self) -> None:
            if not any(getattr(self, name) for name in self.__struct_fields__):
                raise ValueError("no tool")

    section = section_type("Tools", [("saw", int, 1), ("drill", int | None, None)], Base, __name__)
    assert section.__struct_fields__ == ("saw", "drill")
    assert (section.__doc__, section.__module__) == ("Two tools.", __name__)
    assert section.__struct_config__.frozen
    assert section.__struct_config__.forbid_unknown_fields
    assert structs.asdict(section()) == {"saw": 1, "drill": None}
    with pytest.raises(ValueError, match="no tool"):
        section(saw=0)


def test_a_path_has_a_module_and_an_attribute() -> None:
    assert split("os.path:join") == ("os.path", "join")
    assert load("collections:OrderedDict").__name__ == "OrderedDict"  # type: ignore[attr-defined]
    for path in ("os", "os:", ":x", "os:a.b", "os path:x", ""):
        with pytest.raises(ValueError, match=r"expected package\.module:Attribute"):
            split(path)


async def test_a_module_is_imported_in_a_thread(package: str) -> None:
    await import_in_thread("shed.saw")
    assert "shed.saw" in sys.modules
