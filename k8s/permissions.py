"""The rights of the operator; `python -m headgate.k8s.permissions` writes them into the chart.

This table is their only source. It has the rights that the operator's requests need, and no others: no
`*`, and no listing or watching of Secrets, each of which the operator gets by its name. It lists and
watches most other objects, and never gets a single one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

LOOK: Final = ("list", "watch")
FILE: Final = Path("helm") / "headgate" / "files" / "permissions.yaml"
_COMMENT: Final = "# generated: python -m headgate.k8s.permissions\n"


@dataclass(frozen=True, slots=True)
class Permission:
    """Verbs on resources of one API group."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]

    def rule(self) -> dict[str, Any]:
        """The permission as a rule of a Role."""
        return {
            "apiGroups": [self.group],
            "resources": list(self.resources),
            "verbs": list(self.verbs),
        }


JOBS: Final = (
    Permission("headgate.io", ("streamjobs",), (*LOOK, "patch")),
    Permission("headgate.io", ("streamsnapshots",), (*LOOK, "create", "patch", "delete")),
    Permission("headgate.io", ("streamjobs/status", "streamsnapshots/status"), ("patch",)),
    # Owners that block their deletion need it where the API server checks owner references.
    Permission("headgate.io", ("streamjobs/finalizers", "streamsnapshots/finalizers"), ("update",)),
    Permission("apps", ("statefulsets",), ("get", *LOOK, "create", "patch", "delete")),
    Permission("apps", ("deployments",), (*LOOK, "create", "patch", "delete")),
    Permission("", ("configmaps",), (*LOOK, "create", "delete")),
    Permission("", ("services",), (*LOOK, "create", "patch")),
    Permission("", ("secrets",), ("get", "create")),
    Permission("", ("pods",), (*LOOK, "delete")),
    Permission("networking.k8s.io", ("networkpolicies",), (*LOOK, "create", "patch")),
    Permission("policy", ("poddisruptionbudgets",), (*LOOK, "create", "patch")),
    Permission("batch", ("jobs",), (*LOOK, "create")),
    Permission("events.k8s.io", ("events",), ("list", "create")),
)  # fmt: skip
"""In every namespace that is watched."""
KUBERAY: Final = (Permission("ray.io", ("rayclusters",), (*LOOK, "create", "patch", "delete")),)
"""The same, for jobs with `ray.mode: KubeRay`."""
LEASE: Final = (Permission("coordination.k8s.io", ("leases",), ("get", "update")),)
"""In the operator's own namespace, and on the Lease of the chart's release only."""
LEASE_CREATION: Final = (Permission("coordination.k8s.io", ("leases",), ("create",)),)
"""In the operator's own namespace. A right to create cannot be bound to a name."""


def rendered() -> str:
    """Return the file of the chart, from which its roles are made."""
    parts = {"jobs": JOBS, "kubeRay": KUBERAY, "lease": LEASE, "leaseCreation": LEASE_CREATION}
    rules = {name: [each.rule() for each in table] for name, table in parts.items()}
    return _COMMENT + yaml.safe_dump(rules, sort_keys=False, default_flow_style=None)


if __name__ == "__main__":
    FILE.write_text(rendered(), encoding="utf-8")
