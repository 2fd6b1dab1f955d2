"""Pods that should have ended, on nodes that do not answer. Only the operator deletes them.

Kubernetes cannot know whether a pod on a lost node still runs. It keeps the pod until the node comes back
or is deleted, and a StatefulSet makes no other pod of that name: the job would stand still. With a job
log it does not matter whether the pod still runs: the log fences a coordinator that another one has
replaced, and workers obey the newest one.
"""

from __future__ import annotations

from typing import Final

from .actions import Delete
from .context import Context
from .objects import FENCED

OVERDUE_MS: Final = 30_000
"""The time after the end of a pod's grace period at which a node that has not confirmed the end is lost."""


def let_go_of_lost(context: Context) -> None:
    """Delete pods whose end is overdue without waiting for their nodes, if a job log fences them."""
    for pod in context.observed.pods:
        metadata = pod["metadata"]
        until = metadata.get("deletionTimestamp")  # this includes the grace period of the pod
        fenced = metadata.get("annotations", {}).get(FENCED) == "true"
        # The grace period is 0 once the node has confirmed the end. Then a finalizer of others keeps
        # the pod.
        confirmed = metadata.get("deletionGracePeriodSeconds") == 0
        if until is None or not fenced or confirmed or context.since_ms(until) <= OVERDUE_MS:
            continue
        node = pod.get("spec", {}).get("nodeName", "")
        message = (
            f"pod {metadata['name']} should have ended by {until}, and its node {node} does not "
            f"confirm that it has: the pod is deleted"
        )
        context.event("PodLost", message, "Warning")
        context.act(Delete("Pod", metadata["name"], metadata["uid"], force=True))
