"""What the operator needs to do in the API server: its actions and its views, and nothing else.

The chart grants at least this. There is no `*`, and Secrets can neither be listed nor watched: the operator
asks for one by its name, and makes it if it is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

VIEW: Final = ("get", "list", "watch")


@dataclass(frozen=True, slots=True)
class Permission:
    """Verbs on resources of one API group."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]


PERMISSIONS: Final = (
    Permission("headgate.io", ("streamjobs",), (*VIEW, "patch")),
    Permission("headgate.io", ("streamsnapshots",), (*VIEW, "create", "patch", "delete")),
    Permission("headgate.io", ("streamjobs/status", "streamsnapshots/status"), ("get", "patch")),
    # Owners that block their deletion need it where the API server checks owner references.
    Permission("headgate.io", ("streamjobs/finalizers", "streamsnapshots/finalizers"), ("update",)),
    Permission("apps", ("statefulsets", "deployments"), (*VIEW, "create", "patch", "delete")),
    Permission("", ("configmaps",), (*VIEW, "create", "delete")),
    Permission("", ("services",), (*VIEW, "create", "patch")),
    Permission("", ("secrets",), ("get", "create")),
    Permission("", ("pods",), VIEW),
    Permission("networking.k8s.io", ("networkpolicies",), (*VIEW, "create", "patch")),
    Permission("policy", ("poddisruptionbudgets",), (*VIEW, "create", "patch")),
    Permission("batch", ("jobs",), (*VIEW, "create")),
    Permission("ray.io", ("rayclusters",), (*VIEW, "create", "delete")),
    Permission("events.k8s.io", ("events",), ("create", "patch")),
    Permission("coordination.k8s.io", ("leases",), ("get", "create", "update")),
)  # fmt: skip
"""In every namespace that is watched; the Lease only in the operator's own."""
