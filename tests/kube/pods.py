"""Pods for the tests of the cluster itself."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
POD_SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def container(*command: str, **more: Any) -> Object:
    """Return a container of the existing image, with a command."""
    one = {"name": "main", "image": "headgate:test", "command": list(command)}
    return {**one, "securityContext": RESTRICTED, **more}


def pod_spec(*containers: Object, **more: Any) -> Object:
    return {
        "containers": list(containers),
        "securityContext": POD_SECURITY,
        "terminationGracePeriodSeconds": 2,
        **more,
    }


def pod(name: str, *containers: Object, **more: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": pod_spec(*containers, **more),
    }


def stateful_set(name: str, replicas: int, template: Object) -> Object:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "serviceName": name,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": template},
        },
    }


def config_map(name: str, **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def secret(name: str, **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}
