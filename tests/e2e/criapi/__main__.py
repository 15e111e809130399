"""Regenerate the messages beside this file: ``python -m tests.e2e.criapi``."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

# The plug-in is a script of the same environment, which need not be on PATH.
PLUGIN = Path(sys.executable).with_name("protoc-gen-mypy")

sys.exit(
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"--plugin=protoc-gen-mypy={PLUGIN}"),
            *(f"--python_out={ROOT}", f"--mypy_out=quiet:{ROOT}", str(HERE / "runtime.proto")),
        ],
        check=False,
    ).returncode
)
