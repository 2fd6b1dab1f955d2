"""Executes the actions that `reconcile` decides on, one after the other, through the API server."""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from .. import actions as act
from ..actions import Coordinators, Object
from .api import FIELD_MANAGER, Api, ApiError, JsonObject
from .kinds import EVENT, KINDS

FINALIZER_MANAGER: Final = f"{FIELD_MANAGER}-finalizer"
"""Finalizers are applied under a name of their own, so that no other apply takes them away."""
TOKEN_BYTES: Final = 32
EVENT_MESSAGE_MAX: Final = 1024
"""The API server refuses a longer note."""
REFUSALS: Final = frozenset((400, 403, 404, 413, 422))
"""The API server refuses an object until the cause is corrected."""
TOLD_MAX: Final = 4096
"""The number of resources whose last refusal is remembered, so that it is published once."""
log = logging.getLogger(__name__)


class Executor:
    """Executes actions about one resource after the other. `written` gets the results of writes."""

    def __init__(
        self,
        api: Api,
        coordinators: Coordinators,
        written: Callable[[Object], None],
        instance: str,
        now: Callable[[], str],
    ) -> None:
        self._api = api
        self._coordinators = coordinators
        self._written = written
        self._instance = instance
        self._now = now
        self._told: OrderedDict[str, str] = OrderedDict()
        """The last refusal that was published about a resource, by its uid."""

    async def execute(self, resource: Object, actions: Sequence[act.Action]) -> int | None:
        """Execute actions until one fails; returns the milliseconds to the next reconciliation, if given.

        Raises:
            ApiError: the API server refused an action, or did not answer.
            HeadgateError: the job's coordinator refused a call, or did not answer.
        """
        version = str(resource["metadata"]["resourceVersion"])
        after_ms: int | None = None
        for action in actions:
            match action:
                case act.Requeue(pause_ms):
                    after_ms = pause_ms
                case act.EmitEvent():
                    await self._emit(resource, action)
                case act.CallJob():
                    metadata = resource["metadata"]
                    job = _job_of(resource)
                    await self._coordinators.call(metadata["namespace"], job, action)
                case act.SetStatus(status):
                    version = await self._set_status(resource, version, status)
                case act.AddFinalizer(name):
                    version = await self._finalize(resource, version, [name])
                case act.RemoveFinalizer():
                    version = await self._finalize(resource, version, [])
                case act.Create(made, token_key):
                    await self._create(resource, made, token_key)
                case _:
                    await self._change(resource["metadata"]["namespace"], action)
        return after_ms

    async def _set_status(self, resource: Object, version: str, status: Any) -> str:
        """Write the status by a merge patch, which is refused if the resource has another version.

        Server-side apply does not work here, because it makes an object null that loses its last field.
        """
        change = _difference(resource.get("status", {}), msgspec.to_builtins(status))
        patch = {"metadata": {"resourceVersion": version}, "status": change}
        kind, metadata = KINDS[resource["kind"]], resource["metadata"]
        where = (metadata["namespace"], metadata["name"])
        return self._version(await self._api.merge(kind, *where, patch, subresource="status"))

    async def _finalize(self, resource: Object, version: str, names: list[str]) -> str:
        body = _identity(resource, version)
        body["metadata"]["finalizers"] = names
        kind = KINDS[resource["kind"]]
        return self._version(await self._api.apply(body, kind, manager=FINALIZER_MANAGER))

    def _version(self, made: JsonObject) -> str:
        self._written(made)
        return str(made["metadata"]["resourceVersion"])

    async def _change(self, namespace: str, action: act.Action) -> None:
        """Change an object of the job."""
        match action:
            case act.Replace(made, version):
                metadata = {**made["metadata"], "resourceVersion": version}
                body = {**made, "metadata": metadata}
                self._written(await self._api.apply(body, KINDS[made["kind"]]))
            case act.Scale(kind, name, spec, version):
                patch = {"metadata": {"resourceVersion": version}, "spec": spec}
                self._written(await self._api.merge(KINDS[kind], namespace, name, patch))
            case act.Delete(kind, name, uid, force):
                await self._api.delete(KINDS[kind], namespace, name, uid, force=force)
            case _:
                raise AssertionError(f"there is no such action: {action}")

    async def _create(self, resource: Object, made: Object, token_key: str) -> None:
        if token_key:
            made = {**made, "stringData": {token_key: secrets.token_hex(TOKEN_BYTES)}}
        try:
            self._written(await self._api.create(made, KINDS[made["kind"]]))
        except ApiError as error:
            if error.status in REFUSALS:
                name = f"{made['kind']} {made['metadata']['name']}"
                await self._tell(resource, f"{name} cannot be made: {error.answer or error}")
            if error.status != 409:
                raise

    async def _tell(self, resource: Object, refusal: str) -> None:
        """Publish once why an object is refused, such as by an admission webhook or a quota."""
        uid = str(resource["metadata"]["uid"])
        if self._told.get(uid) == refusal:
            return
        self._told[uid] = refusal
        if len(self._told) > TOLD_MAX:
            self._told.popitem(last=False)
        await self._emit(resource, act.EmitEvent("Warning", "Refused", refusal))

    async def _emit(self, resource: Object, event: act.EmitEvent) -> None:
        """Publish an event. A lost event does not matter, because the status says the same."""
        metadata = resource["metadata"]
        name = f"{metadata['name'][:200]}.{secrets.token_hex(8)}"
        body = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {"namespace": metadata["namespace"], "name": name},
            "eventTime": self._now(),
            "reportingController": "headgate.io/operator",
            "reportingInstance": self._instance[:128],
            "action": "Reconcile",
            "reason": event.reason,
            "type": event.type,
            "note": event.message[:EVENT_MESSAGE_MAX],
            "regarding": {
                "apiVersion": resource["apiVersion"],
                "kind": resource["kind"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        }
        try:
            await self._api.create(body, EVENT)
        except ApiError as error:
            log.warning("event %s of %s was not written: %s", event.reason, metadata["name"], error)


def _identity(resource: Object, version: str) -> JsonObject:
    """Return uid and version, with which an apply changes only this object, and only if it is unchanged."""
    metadata = {name: resource["metadata"][name] for name in ("namespace", "name", "uid")}
    return {
        "apiVersion": resource["apiVersion"],
        "kind": resource["kind"],
        "metadata": metadata | {"resourceVersion": version},
    }


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> JsonObject:
    """Return the merge patch from one mapping to another."""
    patch: JsonObject = {name: None for name in before if name not in after}
    for name, value in after.items():
        known = before.get(name)
        if isinstance(value, dict) and isinstance(known, dict):
            inside = _difference(known, value)
            if inside:
                patch[name] = inside
        elif name not in before or known != value:
            patch[name] = value
    return patch


def _job_of(resource: Mapping[str, Any]) -> str:
    """Return the name of the StreamJob that a resource belongs to."""
    if resource["kind"] == "StreamJob":
        return str(resource["metadata"]["name"])
    return str(resource["spec"]["jobRef"]["name"])
