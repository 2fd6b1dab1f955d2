"""The fixed ports of a job's pods: containers, Services and NetworkPolicies are made from this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Port:
    """One port, or a range of them.

    Attributes:
        name: the name in a Service, of at most 15 characters.
        number: the port, or the first of the range.
        last: the last of the range; 0: there is only one.
        meaning: the process that listens, and its clients.
    """

    name: str
    number: int
    meaning: str
    last: int = 0

    def policy(self) -> dict[str, Any]:
        """The port as an entry of a NetworkPolicy."""
        entry: dict[str, Any] = {"protocol": "TCP", "port": self.number}
        return entry | {"endPort": self.last} if self.last else entry


REST: Final = Port("rest", 8081, "the REST API, /healthz and /readyz")
METRICS: Final = Port("metrics", 9464, "Prometheus metrics")
CONTROL: Final = Port("control", 6070, "workers talk to the coordinator")
EXCHANGE: Final = Port("exchange", 6071, "workers send records to each other")
RAY_GCS: Final = Port("ray-gcs", 6379, "Ray's control store, on the head")
RAY_NODE: Final = Port("ray-node", 6380, "Ray's node manager")
RAY_OBJECTS: Final = Port("ray-objects", 6381, "Ray's object manager")
RAY_AGENTS: Final = Port("ray-agents", 6382, "agents of a node of Ray, for Ray itself", 6385)
RAY_WORKERS: Final = Port("ray-workers", 10100, "Ray's worker processes", 10199)

ALL: Final = (
    REST,
    METRICS,
    CONTROL,
    EXCHANGE,
    RAY_GCS,
    RAY_NODE,
    RAY_OBJECTS,
    RAY_AGENTS,
    RAY_WORKERS,
)
OF_A_GUEST: Final = (CONTROL, RAY_NODE, RAY_OBJECTS, RAY_WORKERS)
"""The ports of a coordinator's pod to which the nodes of an external Ray cluster connect."""
NAMED: Final = tuple(port for port in ALL if not port.last)
"""Those that containers and Services list; a range has no name there."""
