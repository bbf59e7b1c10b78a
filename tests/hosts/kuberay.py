"""The fields of KubeRay's RayCluster (ray.io/v1, KubeRay 1.1 to 1.5) that are not Kubernetes' own, as a JSON schema.

A subset, written after the published Go types: pod templates are left to Kubernetes' schema.
"""

from __future__ import annotations

from typing import Any


def _object(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_START_PARAMS = {"type": "object", "additionalProperties": {"type": "string"}}
_TEMPLATE = {"type": "object", "required": ["spec"]}
_COUNT = {"type": "integer", "minimum": 0}
_HEAD = _object(
    {
        "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        "headService": {"type": "object"},
        "enableIngress": {"type": "boolean"},
        "rayStartParams": _START_PARAMS,
        "template": _TEMPLATE,
    },
    ("rayStartParams", "template"),
)
_WORKERS = _object(
    {
        "groupName": {"type": "string"},
        "replicas": _COUNT,
        "minReplicas": _COUNT,
        "maxReplicas": _COUNT,
        "numOfHosts": _COUNT,
        "rayStartParams": _START_PARAMS,
        "template": _TEMPLATE,
        "scaleStrategy": {"type": "object"},
    },
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
)
RAYCLUSTER = _object(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": _object(
            {
                "rayVersion": {"type": "string"},
                "enableInTreeAutoscaling": {"type": "boolean"},
                "autoscalerOptions": {"type": "object"},
                "headServiceAnnotations": {"type": "object"},
                "suspend": {"type": "boolean"},
                "headGroupSpec": _HEAD,
                "workerGroupSpecs": {"type": "array", "items": _WORKERS},
            },
            ("headGroupSpec",),
        ),
    },
    ("apiVersion", "kind", "metadata", "spec"),
)
