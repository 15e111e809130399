"""The demo's node with Debian's containerd and runc, and the whole kubelet: its containers are real ones."""

import shutil

from tests.e2e.containerd import Containerd
from tests.e2e.criapi import runtime_pb2 as pb
from tests.e2e.node import Node
from tests.e2e.pods import ContainerSpec, PodSpec
from tests.e2e.programs import ProgramError, program
from tests.node.scripted import arguments

_PROGRAM = "load"
_OUT = "/out"


def missing() -> str | None:
    """What keeps this machine from running real containers, or None."""
    reason = Containerd.missing()
    if reason is None:
        try:
            for name in ("app", _PROGRAM):
                program(name)
        except ProgramError as exc:
            reason = str(exc)
    return reason


class ContainerNode(Node):
    """A `Node` whose containers run the demo's program."""

    whole_kubelet = True

    def _container_config(self, pod: PodSpec, spec: ContainerSpec, attempt: int, out: str) -> pb.ContainerConfig:
        """The demo's program instead of the image's: it lies in the directory that is mounted as /out."""
        config = super()._container_config(pod, spec, attempt, out)
        shutil.copy2(program(_PROGRAM), f"{out}/{_PROGRAM}")
        del config.args[:]
        config.command.append(f"{_OUT}/{_PROGRAM}")
        config.args.extend(arguments(spec.run, _OUT))
        return config
