"""What the demo needs of a node: the embedded one with real groups, or the one on the fake kernel."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from tests.e2e.pods import ContainerSpec, PodSpec


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


class Groups(Protocol):
    """The kubelet's names of groups."""

    def group(self, *parts: str) -> str: ...

    def pod_group(self, pod: PodSpec) -> str: ...


P = TypeVar("P", bound=PodLike)


class Stage(Protocol[P]):
    """The node that the demo plays on."""

    directory: str
    failures: list[str]
    """What broke on the node itself: it ends the demo."""
    refused: list[str]
    """The kubelet's updates that the runtime refused."""
    updates: int
    pods: dict[str, P]

    @property
    def groups(self) -> Groups: ...

    def run_pod(self, pod: PodSpec) -> P: ...

    def remove_pod(self, pod: P) -> None: ...

    def out_directory(self, pod: PodSpec, container: str) -> str: ...
