"""A copy of the objects of one kind, kept up to date by list and watch."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeAlias

from ..actions import Object
from .api import ApiError, JsonObject
from .kinds import Kind

RETRY_S: Final = 1.0
RETRY_S_MAX: Final = 30.0
OPTIONAL_RETRY_S: Final = 60.0
"""Time between two looks whether an optional kind has come to exist."""
log = logging.getLogger(__name__)
Name: TypeAlias = tuple[str, str]
"""Namespace and name."""


class Source(Protocol):
    """What an informer needs of the API server."""

    async def list(self, kind: Kind, namespace: str) -> tuple[list[JsonObject], str]: ...

    def watch(self, kind: Kind, namespace: str, version: str) -> Any: ...


class Informer:
    """The objects of one kind, in one namespace or in all.

    Attributes:
        synced: set once the objects were listed for the first time.
        heard_s: when the API server last said something about this kind, by `clock`.
    """

    def __init__(
        self,
        source: Source,
        kind: Kind,
        namespace: str,
        changed: Callable[[Object], None],
        clock: Callable[[], float],
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        """Nothing is asked yet; `changed` is called with every object that comes, changes or goes."""
        self.kind = kind
        self.namespace = namespace
        self.synced = asyncio.Event()
        self.heard_s = clock()
        self._source = source
        self._changed = changed
        self._clock = clock
        self._sleep = sleep
        self._objects: dict[Name, Object] = {}
        self._seen = 0
        """The version up to which changes were taken from the API server."""

    def get(self, namespace: str, name: str) -> Object | None:
        """The object, as far as is known."""
        return self._objects.get((namespace, name))

    def __iter__(self) -> Iterator[Object]:
        return iter(tuple(self._objects.values()))

    def put(self, made: Object) -> None:
        """Take an object that a write has returned, so that the next look is not older than the write.

        One that is not known although the watch is past that write was deleted meanwhile, and stays so.
        """
        key = _name(made)
        known = self._objects.get(key)
        newest = self._seen if known is None else _version(known)
        if _version(made) > newest:
            self._objects[key] = made

    async def run(self) -> None:
        """List and watch, for ever."""
        pause_s = RETRY_S
        while True:
            try:
                version = await self._relist()
                pause_s = RETRY_S
                while True:
                    version = await self._watch(version)
            except ApiError as error:
                if error.status == 410:
                    continue  # the version is too old: list again
                if self.kind.optional and error.status in (403, 404):
                    self._replace([])
                    await self._sleep(OPTIONAL_RETRY_S)
                    continue
                log.warning("watching %s: %s", self.kind.plural, error)
            await self._sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def _relist(self) -> str:
        items, version = await self._source.list(self.kind, self.namespace)
        self._replace(items)
        self._seen = int(version)
        return version

    def _replace(self, items: list[JsonObject]) -> None:
        before = self._objects
        self._objects = {_name(item): item for item in items}
        self.heard_s = self._clock()
        self.synced.set()
        for key, gone in before.items():
            if key not in self._objects:
                self._changed(gone)
        for item in items:
            known = before.get(_name(item))
            if known is None or _version(known) != _version(item):
                self._changed(item)

    async def _watch(self, version: str) -> str:
        async for event in self._source.watch(self.kind, self.namespace, version):
            made = event["object"]
            version = str(made["metadata"]["resourceVersion"])
            self.heard_s = self._clock()
            self._seen = int(version)
            if event["type"] != "BOOKMARK":
                self._take(event["type"], made)
        self.heard_s = self._clock()
        return version

    def _take(self, type_: str, made: Object) -> None:
        key = _name(made)
        known = self._objects.get(key)
        if known is not None and _version(known) > _version(made):
            return  # older than a write of our own, whose event is still to come
        if known is not None and _version(known) == _version(made) and type_ != "DELETED":
            return  # a write of our own, which is known
        if type_ == "DELETED":
            self._objects.pop(key, None)
        else:
            self._objects[key] = made
        self._changed(made)


def _name(made: Object) -> Name:
    metadata = made["metadata"]
    return metadata["namespace"], metadata["name"]


def _version(made: Object) -> int:
    """Versions of one kind can be compared as numbers; Kubernetes promises it since 1.35."""
    return int(made["metadata"]["resourceVersion"])
