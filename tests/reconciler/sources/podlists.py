"""Lists of pods as a kubelet returns them."""

import json
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures/meta"
EMPTY = b'{"kind":"PodList","apiVersion":"v1","metadata":{},"items":null}'


def pod_json(uid: str, **metadata: object) -> dict[str, object]:
    return {
        "metadata": {"uid": uid, "name": f"pod-{uid}", "namespace": "default", **metadata},
        "spec": {"containers": []},
    }


def pod_list(*pods: object) -> bytes:
    return json.dumps({"kind": "PodList", "items": pods}).encode()
