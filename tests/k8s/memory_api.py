"""An API server in memory, which answers at once: what `k8s/operator` asks of `Api`."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headgate.k8s.operator.api import ApiError
from headgate.k8s.operator.kinds import KINDS, Kind

Object = dict[str, Any]


@dataclass
class MemoryApi:
    """Objects of all kinds, and every change of them in order.

    Attributes:
        missing: names of kinds that are not defined.
        refuses: raised instead of an answer to the next writes, first one first.
        calls: what was asked, as verb, kind and name.
    """

    objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    refuses: list[ApiError] = field(default_factory=list)
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    _events: list[tuple[str, Object]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _uids: Any = field(default_factory=lambda: itertools.count(1))

    def made(self, verb: str, kind: str) -> list[str]:
        """The names of objects of a kind that were asked for with this verb, in order."""
        return [name for done, of, name in self.calls if (done, of) == (verb, kind)]

    # -- what a user does ---------------------------------------------------------------------------

    def put(self, made: Mapping[str, Any], **metadata: Any) -> Object:
        """Store a new version of an object."""
        stored: Object = copy.deepcopy(dict(made))
        stored["metadata"] |= metadata
        key = (stored["kind"], stored["metadata"]["namespace"], stored["metadata"]["name"])
        known = self.objects.get(key)
        stored["metadata"].setdefault(
            "uid", known["metadata"]["uid"] if known else f"uid{next(self._uids)}"
        )
        self._store("MODIFIED" if known else "ADDED", key, stored)
        return copy.deepcopy(stored)

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object; one with finalizers stays, marked."""
        key = (kind, namespace, name)
        found = copy.deepcopy(self.objects[key])
        found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        if found["metadata"].get("finalizers"):
            self._store("MODIFIED", key, found)
        else:
            self._store("DELETED", key, found)

    def _store(self, type_: str, key: tuple[str, str, str], stored: Object) -> None:
        stored["metadata"]["resourceVersion"] = str(len(self._events) + 1)
        if type_ == "DELETED":
            self.objects.pop(key, None)
        else:
            self.objects[key] = stored
        self._events.append((type_, copy.deepcopy(stored)))
        news, self._news = self._news, asyncio.Event()
        news.set()

    # -- what the operator asks ---------------------------------------------------------------------

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return copy.deepcopy(self.objects.get((kind.name, namespace, name)))

    async def events(self, namespace: str, uid: str, reason: str) -> list[Object]:
        found = [each for key, each in self.objects.items() if key[:2] == ("Event", namespace)]
        return [
            copy.deepcopy(each)
            for each in found
            if (each.get("regarding", {}).get("uid"), each["reason"]) == (uid, reason)
        ]

    async def list(self, kind: Kind, namespace: str) -> tuple[list[Object], str]:
        self.calls.append(("list", kind.name, namespace))
        self._check(kind)
        found = [copy.deepcopy(each) for key, each in self.objects.items() if key[0] == kind.name]
        return found, str(len(self._events))

    async def watch(self, kind: Kind, namespace: str, version: str) -> AsyncIterator[Object]:
        self._check(kind)
        at = int(version)
        while True:
            if at == len(self._events):
                await self._news.wait()
            for type_, changed in self._events[at:]:
                at += 1
                if changed["kind"] == kind.name:
                    yield {"type": type_, "object": copy.deepcopy(changed)}

    async def create(self, made: Mapping[str, Any], kind: Kind) -> Object:
        metadata = made["metadata"]
        self._wrote("create", kind, metadata["name"])
        if (kind.name, metadata["namespace"], metadata["name"]) in self.objects:
            raise ApiError(409, "AlreadyExists")
        return self.put(made)

    async def update(self, changed: Mapping[str, Any], kind: Kind) -> Object:
        self._wrote("update", kind, changed["metadata"]["name"])
        self._found(kind, changed["metadata"]["namespace"], changed)
        return self.put(changed)

    async def apply(self, made: Mapping[str, Any], kind: Kind, *, manager: str = "") -> Object:
        metadata = made["metadata"]
        self._wrote("apply", kind, metadata["name"])
        return self._merged(kind, metadata["namespace"], metadata["name"], made)

    async def merge(
        self, kind: Kind, namespace: str, name: str, patch: Object, *, subresource: str = ""
    ) -> Object:
        self._wrote(f"merge {subresource}".strip(), kind, name)
        return self._merged(kind, namespace, name, patch)

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, *, force: bool = False
    ) -> None:
        self._wrote("delete", kind, name)
        if (kind.name, namespace, name) in self.objects:
            self.remove(kind.name, namespace, name)

    def _wrote(self, verb: str, kind: Kind, name: str) -> None:
        self.calls.append((verb, kind.name, name))
        if kind.name != "Event":
            self._check(kind)
            if self.refuses:
                raise self.refuses.pop(0)

    def _check(self, kind: Kind) -> None:
        assert KINDS[kind.name] == kind
        if kind.name in self.missing:
            raise ApiError(404, "the server could not find the requested resource")

    def _found(self, kind: Kind, namespace: str, seen: Mapping[str, Any], name: str = "") -> Object:
        metadata = seen["metadata"]
        found = self.objects.get((kind.name, namespace, name or metadata["name"]))
        if found is None:
            raise ApiError(404, "NotFound")
        for field_ in ("resourceVersion", "uid"):
            if metadata.get(field_, found["metadata"][field_]) != found["metadata"][field_]:
                raise ApiError(409, "Conflict")
        return copy.deepcopy(found)

    def _merged(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Object:
        found = self._found(kind, namespace, patch, name)
        after = _merge(found, patch)
        if after == found:
            return found
        key = (kind.name, namespace, name)
        metadata = after["metadata"]
        gone = "deletionTimestamp" in metadata and not metadata.get("finalizers")
        self._store("DELETED" if gone else "MODIFIED", key, after)
        return copy.deepcopy(after)


def _merge(before: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping) or not isinstance(before, Mapping):
        return copy.deepcopy(patch)
    after = dict(before)
    for name, value in patch.items():
        if value is None:
            after.pop(name, None)
        else:
            after[name] = _merge(before.get(name, {}), value)
    return after
