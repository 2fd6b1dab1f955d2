"""Pods that were to end, on nodes that do not answer: nobody but the operator lets them go.

Kubernetes cannot know whether a pod on a lost node still runs. It keeps the pod until the node comes back
or is deleted, and a StatefulSet makes no other pod of that name: the job would stand still. With a job log
it does not matter whether the pod runs. The log fences a coordinator that another one has replaced, and
workers obey the newest coordinator.
"""

from __future__ import annotations

from typing import Final

from .actions import Delete
from .context import Context
from .objects import FENCED

OVERDUE_MS: Final = 30_000
"""A node that has not confirmed the end of a pod so long after the pod's time to end was over is lost."""


def let_go_of_lost(context: Context) -> None:
    """Delete pods whose end is overdue without waiting for their nodes, if a job log fences them."""
    for pod in context.observed.pods:
        metadata = pod["metadata"]
        until = metadata.get("deletionTimestamp")  # with the time that the pod has to end
        fenced = metadata.get("annotations", {}).get(FENCED) == "true"
        # No grace is left once its node has confirmed the end: then somebody else's finalizer keeps it.
        confirmed = metadata.get("deletionGracePeriodSeconds") == 0
        if until is None or not fenced or confirmed or context.since_ms(until) <= OVERDUE_MS:
            continue
        node = pod.get("spec", {}).get("nodeName", "")
        message = (
            f"pod {metadata['name']} was to end by {until}, and its node {node} does not say that it has: "
            f"the pod is let go"
        )
        context.event("PodLost", message, "Warning")
        context.act(Delete("Pod", metadata["name"], metadata["uid"], force=True))
