"""The libraries that are imported at less cost: the program imports them so, and nothing of them is missing then."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[3]
COMPARED = """
import sys
if sys.argv[1] == "lean":
    from reconciler.cli.lean import install
    install(); install()
import json, re, msgspec, msgspec.inspect, yaml
from typing import Annotated
from reconciler.config.model import Config
assert isinstance(re.compile("a"), re.Pattern)
early = "typing_extensions" in sys.modules
import typing_extensions
text = "a: 2001-12-14t21:59:43.10-05:00\\nb: 0x1F\\nc: on\\nd: ~\\ne: [1.5, .inf, 12:30:45]\\nf: 2002-12-14\\n"
values = [
    str(yaml.load(text, Loader=loader))
    for loader in (yaml.SafeLoader, yaml.CSafeLoader, yaml.FullLoader)
]
try:
    yaml.safe_load("a: \x01")
except yaml.YAMLError as exc:
    values.append(str(exc))
values.append(yaml.safe_dump({"a": "on", "b": "1e3", "c": "2002-12-14", "d": None, "e": 1.5}))
values.append(str(yaml.resolver.Resolver.yaml_implicit_resolvers["y"][0][1].pattern))
values.append(re.sub(" at 0x[0-9a-f]+", "", str(msgspec.inspect.type_info(Config))))
values.append(json.dumps(msgspec.json.schema(Annotated[str, msgspec.Meta(pattern="a+")])))
finders = sum(type(finder).__module__ == "reconciler.cli.lean" for finder in sys.meta_path)
print(json.dumps({"early": early, "finders": finders, "values": values}))
"""


def ran(how: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", COMPARED, how], capture_output=True, text=True, check=True, cwd=PROJECT, timeout=60
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_libraries_do_the_same_without_what_is_not_imported() -> None:
    lean, usual = ran("lean"), ran("usual")
    assert lean["values"] == usual["values"]
    assert len(lean["values"]) == 8
    assert (lean["early"], lean["finders"]) == (False, 1)
    assert (usual["early"], usual["finders"]) == (True, 0)


def test_the_program_imports_them_so(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("mode: observe\n")
    command = [sys.executable, "-X", "importtime", "-m", "reconciler.cli", "config", "show", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROJECT, timeout=60)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"msgspec", "yaml"} <= modules
    # "typing_extensions" is listed: its import fails.
    assert not {"inspect", "ast", "dis"} & modules
