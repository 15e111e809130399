"""Runs the pod of deploy/kubernetes as a kubelet does: its manifest becomes messages of the runtime interface.

Nothing of the pod is written here a second time. Only the sources of its mounts differ: the node of the test has its
directories below one of its own (`host`), and what a kubelet makes of projected volumes is made here.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.e2e.containerd import NAMESPACE
from tests.e2e.criapi import runtime_pb2 as pb
from tests.e2e.node import Node, Running, RunningPod
from tests.e2e.pods import PERIOD_US, ContainerSpec, PodSpec, new_uid, shares_of

KUBERNETES: Final = Path(__file__).parents[2] / "deploy/kubernetes"
_PROPAGATION: Final = {
    "None": pb.PROPAGATION_PRIVATE,
    "HostToContainer": pb.PROPAGATION_HOST_TO_CONTAINER,
    "Bidirectional": pb.PROPAGATION_BIDIRECTIONAL,
}
_APPARMOR: Final = "container.apparmor.security.beta.kubernetes.io/"


def manifest() -> dict[str, Any]:
    result: dict[str, Any] = yaml.safe_load((KUBERNETES / "base/daemonset.yaml").read_text())
    return result


def config_maps(overlay: str) -> dict[str, dict[str, str]]:
    """Key to text, of each ConfigMap that kustomize makes for ``base`` and an overlay above it."""
    maps: dict[str, dict[str, str]] = {}
    for folder in dict.fromkeys((KUBERNETES / "base", KUBERNETES / overlay)):
        for item in yaml.safe_load((folder / "kustomization.yaml").read_text())["configMapGenerator"]:
            maps[item["name"]] = {name: (folder / name).read_text() for name in item["files"]}
    return maps


def machine_capabilities() -> frozenset[int]:
    """Numbers of the capabilities that this machine's root has; a container gets no others."""
    (text,) = re.findall(r"^CapPrm:\t(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return frozenset(number for number in range(64) if int(text, 16) >> number & 1)


CAPABILITIES: Final = {
    "DAC_OVERRIDE": 1,
    "DAC_READ_SEARCH": 2,
    "KILL": 5,
    "NET_ADMIN": 12,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYS_NICE": 23,
    "SYS_RESOURCE": 24,
}
"""Source: capabilities(7), linux/capability.h."""


def milli(text: str) -> int:
    """A CPU quantity as the manifest has it."""
    return int(text.removesuffix("m")) if text.endswith("m") else int(text) * 1000


def mebibytes(text: str) -> int:
    """Bytes of a memory quantity as the manifest has it."""
    return int(text.removesuffix("Mi")) << 20


class DaemonSetPod:
    """One pod of the DaemonSet. ``host``: path of the node to its place here. ``directory``: for volumes."""

    def __init__(self, node: Node, archive: str, directory: Path, host: Mapping[str, str], *, overlay: str) -> None:
        self.node = node
        self.directory = directory
        self.template = manifest()["spec"]["template"]
        (self.container,) = self.template["spec"]["containers"]
        self._archive = archive
        self._host = host
        self._overlay = overlay
        resources = self.container["resources"]
        spec = ContainerSpec(
            name=self.container["name"],
            cpu_request=milli(resources["requests"]["cpu"]),
            memory_request=mebibytes(resources["requests"]["memory"]),
            memory_limit=mebibytes(resources["limits"]["memory"]),
        )
        self.spec = PodSpec(
            name=f"{manifest()['metadata']['name']}-x",
            namespace=manifest()["metadata"]["namespace"],
            uid=new_uid(),
            labels=self.template["metadata"]["labels"],
            containers=(spec,),
        )
        self.running: Running | None = None

    @property
    def capabilities(self) -> list[str]:
        """The manifest's, without those that this machine's root lacks."""
        names = self.container["securityContext"]["capabilities"]["add"]
        return [name for name in names if CAPABILITIES[name] in machine_capabilities()]

    def start(self) -> Running:
        """Import the image, make the pod's groups, sandbox and container, and start it."""
        self._import()
        node, spec = self.node, self.spec
        node.kubelet.admit(spec)
        sandbox_config = node._sandbox_config(spec)
        sandbox_config.linux.security_context.namespace_options.CopyFrom(self._namespaces())
        os.makedirs(sandbox_config.log_directory, exist_ok=True)
        sandbox = node.cri.run_sandbox(sandbox_config)
        node.pods[spec.uid] = RunningPod(spec=spec, sandbox=sandbox, containers={})
        container = node.cri.create_container(sandbox, self._config(), sandbox_config)
        node.cri.start_container(container)
        self.running = Running(node=node, pod=spec, spec=spec.containers[0], id=container)
        node.pods[spec.uid] = RunningPod(spec=spec, sandbox=sandbox, containers={spec.containers[0].name: self.running})
        return self.running

    def ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One call of containerd's client."""
        command = ["ctr", "--address", self.node.containerd.socket, "--namespace", NAMESPACE, *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    def exec(self, *command: str) -> subprocess.CompletedProcess[str]:
        """As ``kubectl exec`` does."""
        assert self.running is not None
        return self.ctr("tasks", "exec", "--exec-id", f"e{os.urandom(4).hex()}", self.running.id, *command)

    def log(self) -> str:
        """The end of the container's log."""
        path = Path(f"{self.node._sandbox_config(self.spec).log_directory}/{self._log_path()}")
        return "".join(path.read_text(errors="replace").splitlines(keepends=True)[-30:]) if path.exists() else "no log"

    def _log_path(self) -> str:
        return f"{self.container['name']}_0.log"

    def _import(self) -> None:
        done = self.ctr("images", "import", "--snapshotter", "overlayfs", self._archive)
        assert done.returncode == 0, done.stderr
        assert self.node.cri.has_image(self.container["image"]), done.stdout

    def _namespaces(self) -> pb.NamespaceOption:
        spec = self.template["spec"]
        return pb.NamespaceOption(
            network=pb.NODE if spec.get("hostNetwork") else pb.POD,
            pid=pb.NODE if spec.get("hostPID") else pb.CONTAINER,
            ipc=pb.NODE if spec.get("hostIPC") else pb.POD,
        )

    def _config(self) -> pb.ContainerConfig:
        name = self.container["name"]
        labels = {
            "io.kubernetes.pod.name": self.spec.name,
            "io.kubernetes.pod.namespace": self.spec.namespace,
            "io.kubernetes.pod.uid": self.spec.uid,
            "io.kubernetes.container.name": name,
        }
        return pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=name),
            image=pb.ImageSpec(image=self.container["image"]),
            command=self.container.get("command", []),
            args=self.container.get("args", []),
            envs=[pb.KeyValue(key=item["name"], value=_value(item)) for item in self.container.get("env", [])],
            mounts=[self._mount(item) for item in self.container["volumeMounts"]],
            labels=labels,
            log_path=self._log_path(),
            linux=pb.LinuxContainerConfig(
                resources=pb.LinuxContainerResources(
                    cpu_shares=shares_of(self.spec.containers[0].cpu_request),
                    cpu_period=PERIOD_US,
                    memory_limit_in_bytes=self.spec.containers[0].memory_limit,
                    oom_score_adj=1000,
                ),
                security_context=self._security(),
            ),
        )

    def _security(self) -> pb.LinuxContainerSecurityContext:
        context = self.container["securityContext"]
        profile = self.template["metadata"]["annotations"][f"{_APPARMOR}{self.container['name']}"]
        return pb.LinuxContainerSecurityContext(
            capabilities=pb.Capability(
                add_capabilities=self.capabilities, drop_capabilities=context["capabilities"]["drop"]
            ),
            privileged=context["privileged"],
            namespace_options=self._namespaces(),
            selinux_options=pb.SELinuxOption(type=context["seLinuxOptions"]["type"]),
            run_as_user=pb.Int64Value(value=context["runAsUser"]),
            run_as_group=pb.Int64Value(value=context["runAsGroup"]),
            readonly_rootfs=context["readOnlyRootFilesystem"],
            no_new_privs=not context["allowPrivilegeEscalation"],
            apparmor_profile=profile,
            seccomp=pb.SecurityProfile(
                profile_type=pb.SecurityProfile.ProfileType.Value(context["seccompProfile"]["type"])
            ),
        )

    def _mount(self, item: Mapping[str, Any]) -> pb.Mount:
        (volume,) = (volume for volume in self.template["spec"]["volumes"] if volume["name"] == item["name"])
        return pb.Mount(
            container_path=item["mountPath"],
            host_path=self._source(volume),
            readonly=item.get("readOnly", False),
            propagation=_PROPAGATION[item.get("mountPropagation", "None")],
        )

    def _source(self, volume: Mapping[str, Any]) -> str:
        if "hostPath" in volume:
            path = self._host[volume["hostPath"]["path"]]
            if volume["hostPath"]["type"] == "DirectoryOrCreate":
                os.makedirs(path, exist_ok=True)
            assert os.path.isdir(path)
            return path
        place = self.directory / "volumes" / str(volume["name"])
        place.mkdir(parents=True)
        for source in volume.get("projected", {}).get("sources", ()):
            self._project(place, source["configMap"])
        return str(place)

    def _project(self, place: Path, source: Mapping[str, Any]) -> None:
        """A kubelet's atomic writer: the files are below a dated directory, and links lead there."""
        data = config_maps(self._overlay)[source["name"]]
        files = {item["path"]: data[item["key"]] for item in source.get("items", ())} or data
        (place / "..2026").mkdir(exist_ok=True)
        if not (place / "..data").is_symlink():
            (place / "..data").symlink_to("..2026")
        for name, text in files.items():
            (place / "..2026" / name).parent.mkdir(exist_ok=True)
            (place / "..2026" / name).write_text(text)
            top = name.partition("/")[0]
            if not (place / top).is_symlink():
                (place / top).symlink_to(f"..data/{top}")


def _value(item: dict[str, Any]) -> str:
    """Of a variable; the only field that the kubelet fills in here is the node's name."""
    if "value" in item:
        return str(item["value"])
    assert item["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    return "node1"
