"""The reasons why pods do not run, in the words of Kubernetes, so that users need not search for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from .spec import CONTAINER

_WAITING: Final = frozenset(("PodInitializing", "ContainerCreating"))
"""Reasons of a container that only needs more time."""
NOT_CREATED: Final = "FailedCreate"
"""The reason of events and conditions that say that a pod was refused."""
REFUSED: Final = 2
"""The exit code of a head that would end in the same way each time it is started."""


def troubles(pods: Iterable[Mapping[str, Any]]) -> str:
    """Return the trouble of the first pod that has one, with the pod's name; empty if there is none."""
    for pod in sorted(pods, key=lambda each: str(each["metadata"]["name"])):
        found = trouble(pod)
        if found:
            return f"pod {pod['metadata']['name']}: {found}"
    return ""


def refused_pods(makers: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> str:
    """Return why the API server refuses pods of these objects, such as a quota; empty if it does not.

    Args:
        makers: StatefulSets and Deployments.
        events: events about StatefulSets, whose status does not have the reason; see `wants_pods`.
    """
    # The head comes first, because workers are useless without it. It belongs to a StatefulSet.
    for maker in sorted(makers, key=lambda each: str(each["kind"]), reverse=True):
        found = _refusal_in_status(maker) or _newest_refusal(maker, events)
        if found:
            return f"{maker['kind']} {maker['metadata']['name']}: {found}"
    return ""


def wants_pods(maker: Mapping[str, Any]) -> bool:
    """Return True for a StatefulSet that has fewer pods than it should have."""
    wanted = maker.get("spec", {}).get("replicas", 1)
    return bool(
        maker["kind"] == "StatefulSet" and wanted > maker.get("status", {}).get("replicas", 0)
    )


def _refusal_in_status(maker: Mapping[str, Any]) -> str:
    for condition in maker.get("status", {}).get("conditions", ()):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return _words(condition.get("reason", NOT_CREATED), condition.get("message", ""))
    return ""


def _newest_refusal(maker: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> str:
    if not wants_pods(maker):
        return ""
    uid = maker["metadata"].get("uid")
    about = [each for each in events if each.get("regarding", {}).get("uid") == uid]
    newest = max(about, key=_last_seen, default=None)
    return "" if newest is None else _words(NOT_CREATED, newest.get("note", ""))


def _last_seen(event: Mapping[str, Any]) -> str:
    """Return the time of an event as text that sorts; a controller writes one of these fields."""
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("eventTime"),
        event.get("deprecatedLastTimestamp"),
    )
    return max(str(each or "") for each in times)


def trouble(pod: Mapping[str, Any]) -> str:
    """Return why this pod does not run or is not ready; empty if no reason is known."""
    status = pod.get("status", {})
    for container in (
        *status.get("initContainerStatuses", ()),
        *status.get("containerStatuses", ()),
    ):
        found = _container(container)
        if found:
            return found
    for condition in status.get("conditions", ()):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _words(condition.get("reason", "Unschedulable"), condition.get("message", ""))
    if status.get("phase") == "Failed":
        return _words(status.get("reason", "Failed"), status.get("message", ""))
    return ""


def refusal(pod: Mapping[str, Any]) -> str:
    """Return the last message of our container if it ended with the exit code `REFUSED`; else empty.

    It would end in the same way again. The code may have another meaning in the user's containers.
    """
    statuses = pod.get("status", {}).get("containerStatuses", ())
    for container in (each for each in statuses if each.get("name") == CONTAINER):
        for state in ("state", "lastState"):
            ended = container.get(state, {}).get("terminated", {})
            if ended.get("exitCode") == REFUSED:
                said = str(ended.get("message", "")).strip()
                return said or f"the head ended with exit code {REFUSED}; its log says why"
    return ""


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Return True if the pod's readiness probe succeeds."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def _container(container: Mapping[str, Any]) -> str:
    """Return a container's waiting reason, with the way it ended the last time if it did."""
    state, last = container.get("state", {}), container.get("lastState", {}).get("terminated", {})
    waiting = state.get("waiting", {})
    ended = state.get("terminated", {})
    if ended and ended.get("exitCode"):
        return _ending(ended)
    if not waiting or waiting.get("reason", "") in _WAITING:
        return ""
    said = _words(waiting.get("reason", ""), waiting.get("message", ""))
    return f"{said}; before that: {_ending(last)}" if last.get("exitCode") else said


def _ending(terminated: Mapping[str, Any]) -> str:
    code = f"exit code {terminated.get('exitCode')}"
    return _words(f"{terminated.get('reason', 'Error')}, {code}", terminated.get("message", ""))


def _words(reason: str, message: str) -> str:
    return f"{reason}: {message.strip()}" if message.strip() else reason
