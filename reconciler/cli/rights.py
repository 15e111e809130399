"""The rights that bypassd needs in a cluster, one ClusterRole for each use, each rule with its request and reason.

``python -m reconciler.cli.rights`` (in the project's directory) writes the DaemonSet's file; a test compares it.
"""

from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

ACCOUNT: Final = "bypassd"


class RightsUse(StrEnum):
    """A feature that needs rights."""

    PODS = "pods"
    KUBELET = "kubelet"
    EVICTION = "eviction"
    EVENTS = "events"
    TAINT = "taint"
    CONDITION = "condition"
    RENEWAL = "renewal"
    NODE = "headroom-node"
    KOORDINATOR = "headroom-koordinator"
    KATALYST = "headroom-katalyst"
    SETTINGS_KOORDINATOR = "settings-koordinator"
    SETTINGS_KATALYST = "settings-katalyst"


_GROUPS: Final = {
    "events": ("", "events.k8s.io"),
    "nodemetrics": ("slo.koordinator.sh",),
    "nodeslos": ("slo.koordinator.sh",),
    "customnoderesources": ("node.katalyst.kubewharf.io",),
    "customnodeconfigs": ("config.katalyst.kubewharf.io",),
    "adminqosconfigurations": ("config.katalyst.kubewharf.io",),
}
"""API groups by resource; the others are of the core."""
_OF_A_NODE: Final = frozenset({"nodes", "nodemetrics", "nodeslos", "customnoderesources", "customnodeconfigs"})
"""Resources with an object for each node, of its name."""


class AccessRight(NamedTuple):
    """One rule. ``access``: its verbs and its resource, with the subresource after a slash."""

    use: RightsUse
    access: str
    reason: str

    @property
    def verbs(self) -> list[str]:
        return self.access.rpartition(" ")[0].split(", ")

    @property
    def resource(self) -> str:
        return self.access.rpartition(" ")[2]

    @property
    def groups(self) -> tuple[str, ...]:
        return _GROUPS.get(self.resource.partition("/")[0], ("",))

    @property
    def own_node(self) -> bool:
        """Whether only this node's object is meant; a name cannot restrict the verb create."""
        return self.verbs != ["create"] and self.resource.removesuffix("/status") in _OF_A_NODE

    def names(self, node: str) -> tuple[str, ...]:
        """The only objects; empty: all. ``node``: the only node; empty: all."""
        if self.use is RightsUse.RENEWAL:
            return (ACCOUNT,)
        return (node,) if node and self.own_node else ()


_RIGHTS: Final[Mapping[RightsUse, Mapping[str, str]]] = {
    RightsUse.PODS: {
        "list, watch pods": "GET /api/v1/pods with fieldSelector spec.nodeName: labels and annotations of this node's "
        "pods as they change. RBAC cannot restrict it to one node.",
    },
    RightsUse.KUBELET: {
        "get nodes/pods": "GET /pods on the kubelet's port 10250 where the kubelet authorizes it by itself (1.33 and "
        "later).",
        "get nodes/proxy": "The same for older kubelets. This right is not read-only: kubelets accept it for commands "
        "in any container, over WebSocket. The use pods replaces it; static pods and admitted resizes are then "
        "known from other sources.",
    },
    RightsUse.EVICTION: {
        "create pods/eviction": "POST .../pods/NAME/eviction with the pod's uid, for eviction.enabled with api in "
        "eviction.means.order.",
    },
    RightsUse.EVENTS: {
        "create, patch events": "POST and PATCH .../events, for an alert sink of the kind kubernetes.",
    },
    RightsUse.TAINT: {
        "get, patch nodes": "GET and PATCH of this node's object, for a taint while it is closed to new BE pods "
        "(closing.mark). This right is not limited to taints: labels and unschedulable are parts of the same "
        "object. One service account for all nodes has it for all of them; a kubelet's own credentials may not "
        "change taints.",
    },
    RightsUse.CONDITION: {
        "get nodes": "GET of this node's object, for closing.mark: condition.",
        "patch nodes/status": "PATCH of its status. Broad: labels and annotations can be changed with it, too. With "
        "the kubelet's credentials (apiserver.identity: kubelet) no role is needed; the API server allows it for "
        "this node alone.",
    },
    RightsUse.RENEWAL: {
        "create serviceaccounts/token": "POST .../serviceaccounts/bypassd/token: bypassd renews the token in its own "
        "kubeconfig, of this service account alone. Optional: every holder of a token with this right can renew it, "
        "too. The DaemonSet does not need it: the kubelet renews its token.",
    },
    RightsUse.NODE: {
        "get nodes": "GET /api/v1/nodes/NAME of this node, for headroom.publish: node. RBAC cannot restrict the "
        "DaemonSet's rights to one node; those of a service account for each node it can, by resourceNames.",
        "patch nodes/status": "PATCH of its status. Broad: conditions, addresses, labels and annotations can be "
        "changed with it, too; of a DaemonSet those of every node.",
    },
    RightsUse.KOORDINATOR: {
        "get nodes": "GET of this node, for headroom.publish: koordinator: what the manager has computed last.",
        "get nodemetrics": "GET of the NodeMetric of this node: its intervals, and whether a koordlet writes it.",
        "patch nodemetrics/status": "PATCH of its status, as koordlet does.",
    },
    RightsUse.KATALYST: {
        "get nodes": "GET of this node, for headroom.publish: katalyst: whether it is this machine's.",
        "get customnoderesources": "GET of the CustomNodeResource of this node: what is there, and whether a Katalyst "
        "agent writes it.",
        "create customnoderesources": "POST of it where no Katalyst agent has made it. RBAC cannot restrict create by "
        "name.",
        "patch customnoderesources/status": "PATCH of its status.",
    },
    RightsUse.SETTINGS_KOORDINATOR: {
        "get nodes": "GET of this node, for apiserver.node_settings: koordinator: its annotations.",
        "get nodeslos": "GET of the NodeSLO of this node.",
    },
    RightsUse.SETTINGS_KATALYST: {
        "get customnodeconfigs": "GET of the CustomNodeConfig of this node, for apiserver.node_settings: katalyst.",
        "get adminqosconfigurations": "GET of the AdminQoSConfiguration that it names, in any namespace: Katalyst's "
        "controller chooses the name.",
    },
}
"""By use: verbs and resource of each rule, with its request and reason."""
RIGHTS: Final = tuple(
    AccessRight(use, access, reason) for use, rules in _RIGHTS.items() for access, reason in rules.items()
)


DAEMON_SET_FILE: Final = "deploy/kubernetes/base/rbac.yaml"
_DAEMON_SET: Final = """\
# Written by `make docs`; do not edit. Rights of the daemon, one ClusterRole for each use, each rule with the request
# that needs it. Only reading pods is bound. Bind another one when the configuration enables its feature, for example:
#   kubectl create clusterrolebinding bypassd-eviction --clusterrole=bypassd-eviction \\
#     --serviceaccount=kube-system:bypassd
# Requests that every authenticated client may make (system:discovery, system:basic-user) need no rule: GET /version,
# /api/v1 and /apis, and SelfSubjectAccessReview by `bypassctl doctor`.
"""


def daemon_set_file() -> str:
    """The roles of every use, and the binding of those that the DaemonSet's configuration needs."""
    documents = []
    for use in RightsUse:
        if use is RightsUse.RENEWAL:
            continue  # the kubelet renews a pod's token
        documents.append("\n".join(_role(use)))
        if use is RightsUse.PODS:
            documents.append("\n".join(_binding(use, "kube-system")))
    return _DAEMON_SET + "---\n".join(f"{document}\n" for document in documents)


def manifest(uses: Collection[RightsUse], namespace: str, node: str = "") -> str:
    """The YAML to apply: the service account, and for each use a ClusterRole with its binding.

    ``node``: the only node whose object may be used; empty: all.
    """
    account = f"apiVersion: v1\nkind: ServiceAccount\nmetadata:\n  name: {ACCOUNT}\n  namespace: {namespace}"
    documents = [account]
    for use in RightsUse:
        if use in uses:
            documents += ["\n".join(_role(use, node)), "\n".join(_binding(use, namespace, node))]
    return "---\n".join(f"{document}\n" for document in documents)


def _name(use: RightsUse, node: str) -> str:
    """Of a role and its binding: one for each node where its rules name the node."""
    own = any(right.own_node for right in RIGHTS if right.use is use)
    return f"{ACCOUNT}-{use}-{node}" if node and own else f"{ACCOUNT}-{use}"


def _role(use: RightsUse, node: str = "") -> Iterator[str]:
    yield from ("apiVersion: rbac.authorization.k8s.io/v1", "kind: ClusterRole")
    yield from ("metadata:", f"  name: {_name(use, node)}", "rules:")
    for right in RIGHTS:
        if right.use is use:
            yield f"# {right.reason}"
            groups = ", ".join(group or '""' for group in right.groups)
            yield f"- apiGroups: [{groups}]"
            yield f"  resources: [{right.resource}]"
            if names := right.names(node):
                yield f"  resourceNames: [{', '.join(names)}]"
            yield f"  verbs: [{', '.join(right.verbs)}]"


def _binding(use: RightsUse, namespace: str, node: str = "") -> Iterator[str]:
    # Of a service account's tokens, those in its own namespace.
    kind = "RoleBinding" if use is RightsUse.RENEWAL else "ClusterRoleBinding"
    yield from ("apiVersion: rbac.authorization.k8s.io/v1", f"kind: {kind}")
    yield from ("metadata:", f"  name: {_name(use, node)}")
    if use is RightsUse.RENEWAL:
        yield f"  namespace: {namespace}"
    yield from ("roleRef:", "  apiGroup: rbac.authorization.k8s.io", "  kind: ClusterRole")
    yield f"  name: {_name(use, node)}"
    yield from ("subjects:", "- kind: ServiceAccount", f"  name: {ACCOUNT}", f"  namespace: {namespace}")


def main() -> None:
    """Write the DaemonSet's file below the current directory."""
    with open(DAEMON_SET_FILE, "w", encoding="utf-8") as file:
        file.write(daemon_set_file())


if __name__ == "__main__":
    main()
