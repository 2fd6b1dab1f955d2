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
OPTIONAL_RETRY_S: Final = 15.0
"""The time between two checks whether an optional kind exists."""
log = logging.getLogger(__name__)
Name: TypeAlias = tuple[str, str]
"""Namespace and name."""


class Source(Protocol):
    """The part of the API server that an informer needs."""

    async def list(self, kind: Kind, namespace: str) -> tuple[list[JsonObject], str]: ...

    def watch(self, kind: Kind, namespace: str, version: str) -> Any: ...


class Informer:
    """The objects of one kind, in one namespace or in all.

    Attributes:
        synced: set once the objects were listed for the first time.
        heard_s: the time of the API server's last message about this kind, by `clock`.
        trouble: the reason why the last list or watch failed; empty if it did not.
        missing: True if the kind is optional, and is not defined or may not be read; `trouble` has the
            reason.
    """

    def __init__(
        self,
        source: Source,
        kind: Kind,
        namespace: str,
        changed: Callable[[Object], None],
        clock: Callable[[], float],
        sleep: Callable[[float], Any] = asyncio.sleep,
        appeared: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the informer; it sends no request yet.

        Args:
            source: the API server.
            kind: of the objects.
            namespace: the namespace of the objects; empty: all namespaces.
            changed: is called with every object that is created, changed or deleted.
            clock: returns monotonic seconds.
            sleep: waits.
            appeared: is called when a kind that was `missing` exists.
        """
        self.kind = kind
        self.namespace = namespace
        self.synced = asyncio.Event()
        self.heard_s = clock()
        self.trouble = ""
        self.missing = False
        self._source = source
        self._changed = changed
        self._clock = clock
        self._sleep = sleep
        self._appeared = appeared
        self._objects: dict[Name, Object] = {}
        self._failures = 0
        """In a row; a list alone does not end the row, because its watch may be what fails."""
        self._seen = 0
        """The version up to which changes were taken from the API server."""

    def get(self, namespace: str, name: str) -> Object | None:
        """Return the object as it was seen last; None if it is not known."""
        return self._objects.get((namespace, name))

    def __iter__(self) -> Iterator[Object]:
        return iter(tuple(self._objects.values()))

    def put(self, made: Object) -> None:
        """Take an object that a write has returned, so that `get` is never older than the write.

        If the watch has passed that write and the object is not known, it was deleted meanwhile, and
        stays deleted.
        """
        key = _name(made)
        known = self._objects.get(key)
        newest = self._seen if known is None else _version(known)
        if _version(made) > newest:
            self._objects[key] = made

    async def run(self) -> None:
        """List and watch without end."""
        while True:
            try:
                version = await self._relist()
                while True:
                    version = await self._watch(version)
            except ApiError as error:
                pause_s = self._pause_s(error)
            await self._sleep(pause_s)

    def _pause_s(self, error: ApiError) -> float:
        """Note why a list or a watch has failed; return the seconds until the next list."""
        if self.kind.optional and error.status in (403, 404):
            self._is_missing(str(error))
            return OPTIONAL_RETRY_S
        failures, self._failures = self._failures, self._failures + 1
        if error.status == 410:
            log.info("watching %s: the version is too old, all are listed again", self.kind.plural)
            if not failures:
                return 0.0
        else:
            self.trouble = str(error)
            log.warning("watching %s: %s", self.kind.plural, error)
        pause_s: float = min(RETRY_S * 2 ** min(failures, 16), RETRY_S_MAX) * random.uniform(
            0.5, 1.0
        )
        return max(pause_s, min(error.retry_after_s, RETRY_S_MAX))

    def _is_missing(self, why: str) -> None:
        if not self.missing or why != self.trouble:
            log.warning("%s are not watched: %s", self.kind.plural, why)
        self.missing, self.trouble = True, why
        self._heard()
        self._replace([])

    def _heard(self) -> None:
        self.heard_s = self._clock()

    async def _relist(self) -> str:
        items, version = await self._source.list(self.kind, self.namespace)
        self._heard()
        if self.trouble:
            log.info("%s are watched again", self.kind.plural)
        appeared, self.missing, self.trouble = self.missing, False, ""
        self._replace(items)
        self._seen = int(version)
        if appeared:
            self._appeared()
        return version

    def _replace(self, items: list[JsonObject]) -> None:
        before = self._objects
        self._objects = {_name(item): item for item in items}
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
            self._heard()
            self._failures = 0
            self._seen = int(version)
            if event["type"] != "BOOKMARK":
                self._take(event["type"], made)
        self._heard()
        self._failures = 0
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
    """Return a version as a number. Since 1.35 Kubernetes promises that these can be compared."""
    return int(made["metadata"]["resourceVersion"])
