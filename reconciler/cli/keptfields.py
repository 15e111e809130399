"""Fields of pods, bundles, runtime states and containerd's configuration that a capture keeps: those that are read.

A shape is a map of fields, a list of one shape, or a word: ``""`` a value, ``"labels"``, ``"annotations"``, ``"texts"``
a map of values, ``"pairs"`` a list of ``name=value``. In TOML ``*`` is any name. A new field of the readers is added
here; a test compares a plan from a capture with the node's own.

Source: `reconciler.sources.podspec`, `reconciler.sources.bundles`, `reconciler.sources.runtime_roots`.
"""

from typing import Any, Final

Shape = Any
"""A nested map, which has no static type."""

_RESOURCES: Final[Shape] = {"requests": "texts", "limits": "texts"}
_CONTAINER: Final[Shape] = {"name": "", "resources": _RESOURCES, "restartPolicy": ""}
_STATUS: Final[Shape] = {"name": "", "containerID": "", "allocatedResources": "texts", "resources": _RESOURCES}
POD: Final[Shape] = {
    "apiVersion": "",
    "kind": "",
    "metadata": {
        "name": "",
        "namespace": "",
        "uid": "",
        "labels": "labels",
        "annotations": "annotations",
        "ownerReferences": [{"kind": "", "name": "", "controller": ""}],
        "deletionTimestamp": "",
        "deletionGracePeriodSeconds": "",
    },
    "spec": {
        "containers": [_CONTAINER],
        "initContainers": [_CONTAINER],
        "ephemeralContainers": [_CONTAINER],
        "priorityClassName": "",
        "priority": "",
        "nodeName": "",
        "terminationGracePeriodSeconds": "",
    },
    "status": {
        "qosClass": "",
        "podIP": "",
        "podIPs": [{"ip": ""}],
        "resize": "",
        "conditions": [{"type": "", "status": "", "reason": "", "message": ""}],
        "containerStatuses": [_STATUS],
        "initContainerStatuses": [_STATUS],
        "ephemeralContainerStatuses": [_STATUS],
    },
}
POD_LIST: Final[Shape] = {"kind": "", "apiVersion": "", "items": [POD]}

BUNDLE: Final[Shape] = {
    # An OCI bundle's config.json ...
    "ociVersion": "",
    "annotations": "annotations",
    "linux": {
        "cgroupsPath": "",
        "resources": {
            "cpu": {"shares": "", "quota": "", "period": "", "cpus": "", "mems": ""},
            "memory": {"limit": "", "swap": ""},
            "pids": {"limit": ""},
        },
    },
    # ... runc's state.json and crun's status, which have no field in common.
    "pid": "",
    "cgroup-path": "",
    "status": "",
    "id": "",
    "init_process_pid": "",
    "cgroup_paths": "texts",
    "config": {
        "labels": "pairs",
        "cgroups": {
            "path": "",
            "name": "",
            "parent": "",
            "scope_prefix": "",
            "memory": "",
            "memory_swap": "",
            "cpu_shares": "",
            "cpu_quota": "",
            "cpu_period": "",
            "cpuset_cpus": "",
            "cpuset_mems": "",
            "pids_limit": "",
        },
    },
}

_RUNTIME: Final[Shape] = {"runtime_root": "", "runtime_type": "", "options": {"Root": "", "SystemdCgroup": ""}}
_CRI: Final[Shape] = {
    "containerd": {
        "default_runtime": _RUNTIME,
        "untrusted_workload_runtime": _RUNTIME,
        "runtimes": {"*": _RUNTIME},
    }
}
_LINUX: Final[Shape] = {"runtime_root": ""}
RUNTIME_CONFIG: Final[Shape] = {
    "version": "",
    "root": "",
    "state": "",
    "imports": "",
    "plugins": {
        "io.containerd.cri.v1.runtime": _CRI,
        "io.containerd.grpc.v1.cri": _CRI,
        "cri": _CRI,
        "io.containerd.runtime.v1.linux": _LINUX,
        "linux": _LINUX,
    },
    "crio": {
        "root": "",
        "runroot": "",
        "storage_driver": "",
        "runtime": {"runtimes": {"*": {"runtime_root": "", "runtime_type": ""}}},
    },
    "storage": {"driver": "", "runroot": "", "graphroot": ""},
}
"""Configurations of containerd, of CRI-O, and of its storage."""
