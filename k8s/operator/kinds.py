"""The kinds of objects that the operator reads and writes, and their paths in the API server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from ..objects import JOB


@final
@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object.

    Attributes:
        name: the field `kind` of an object.
        api_version: the field `apiVersion` of an object.
        plural: the name in paths of the API server.
        selector: the label selector of the objects that the operator watches; empty: all of them.
        optional: the definition of the kind may be missing, or the operator may have no right to it.
        applied: True if the operator changes such objects by server-side apply. It then makes them by
            apply, too, because a field of an object that was made by POST could not be removed.
    """

    name: str
    api_version: str
    plural: str
    selector: str = JOB
    optional: bool = False
    applied: bool = False

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of one object or of the collection, in a namespace or in the whole cluster."""
        root = "/api/" if "/" not in self.api_version else "/apis/"
        parts = [root.strip("/"), self.api_version]
        parts += ["namespaces", namespace] if namespace else []
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/" + "/".join(parts)


STREAM_JOB: Final = Kind("StreamJob", "headgate.io/v1alpha1", "streamjobs", selector="")
STREAM_SNAPSHOT: Final = Kind(
    "StreamSnapshot", "headgate.io/v1alpha1", "streamsnapshots", selector=""
)
POD: Final = Kind("Pod", "v1", "pods")
SECRET: Final = Kind("Secret", "v1", "secrets")
EVENT: Final = Kind("Event", "events.k8s.io/v1", "events")
LEASE: Final = Kind("Lease", "coordination.k8s.io/v1", "leases")
CHILDREN: Final = (
    Kind("StatefulSet", "apps/v1", "statefulsets"),
    Kind("Deployment", "apps/v1", "deployments"),
    Kind("ConfigMap", "v1", "configmaps"),
    Kind("Service", "v1", "services", applied=True),
    Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies", applied=True),
    Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets", applied=True),
    Kind("Job", "batch/v1", "jobs"),
    Kind("RayCluster", "ray.io/v1", "rayclusters", optional=True),
)
"""Objects that a job consists of, beside its pods and its Secret."""
WATCHED: Final = (STREAM_JOB, STREAM_SNAPSHOT, POD, *CHILDREN)
"""Secrets are not among them: the operator asks for one by its name."""
KINDS: Final = {kind.name: kind for kind in (*WATCHED, SECRET, EVENT, LEASE)}
