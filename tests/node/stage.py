"""What the demo needs of a node: the one with real processes, or the one on the fake kernel."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from tests.e2e.pods import ContainerSpec, PodSpec
from tests.fakes.kubelet.cgroups import KubeletNames
from tests.fakes.kubelet.fake import FakeKubelet


class ContainerLike(Protocol):
    """One running container. ``group`` is its group path."""

    @property
    def id(self) -> str: ...

    @property
    def group(self) -> str: ...

    @property
    def spec(self) -> ContainerSpec: ...


class PodLike(Protocol):
    """One running pod; containers by name."""

    @property
    def spec(self) -> PodSpec: ...

    @property
    def containers(self) -> Mapping[str, ContainerLike]: ...


P = TypeVar("P", bound=PodLike)


class Stage(Protocol[P]):
    """The node that the demo plays on."""

    directory: str
    kubelet: FakeKubelet
    """Its ``failures`` end the demo."""
    pods: dict[str, P]

    @property
    def cgroups(self) -> KubeletNames: ...

    def run_pod(self, pod: PodSpec) -> P: ...

    def remove_pod(self, pod: P) -> None: ...

    def out_directory(self, pod: PodSpec, container: str) -> str: ...
