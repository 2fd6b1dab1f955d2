"""The few calls of the Kubernetes API that the process kubelet makes."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Object = dict[str, Any]
RELIST_S = 0.5
WATCH_S_MAX = 300
REQUEST_S_MAX = 120


class ApiError(Exception):
    """An answer of the API server that is not a success; with the status 0 there was no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status

    @property
    def passes(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (0, 429) or self.status >= 500


@dataclass
class Api:
    """An API server and one connection pool to it."""

    server: str
    token: str
    context: ssl.SSLContext
    session: aiohttp.ClientSession = field(init=False)

    async def __aenter__(self) -> Api:
        self.session = aiohttp.ClientSession(
            self.server,
            headers={"Authorization": f"Bearer {self.token}"},
            connector=aiohttp.TCPConnector(ssl=self.context, limit=0),
            timeout=aiohttp.ClientTimeout(total=REQUEST_S_MAX),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def get(self, path: str) -> Object:
        return await self._call("GET", path)

    async def post(self, path: str, body: Object) -> Object:
        return await self._call("POST", path, body)

    async def patch(self, path: str, body: Object) -> Object:
        return await self._call("PATCH", path, body, "application/strategic-merge-patch+json")

    async def delete(self, path: str, body: Object) -> Object:
        return await self._call("DELETE", path, body)

    async def _call(
        self, method: str, path: str, body: Object | None = None, kind: str = "application/json"
    ) -> Object:
        data = None if body is None else json.dumps(body)
        try:
            async with self.session.request(
                method, path, data=data, headers={"Content-Type": kind}
            ) as answer:
                status, text = answer.status, await answer.text()
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, f"{method} {path}: {error!r}") from error
        if status >= 400:
            raise ApiError(status, text[:1000])
        found: Object = json.loads(text)
        return found

    async def until_answered(self, request: Callable[[], Awaitable[Object]]) -> None:
        """Make a request until it succeeds, or is refused for good."""
        while True:
            try:
                await request()
                return
            except ApiError as error:
                if not error.passes:
                    return
            await asyncio.sleep(RELIST_S)

    async def watch(self, path: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        """The changes since a resource version, until the server ends the watch."""
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_S_MAX)}
        limits = aiohttp.ClientTimeout(total=None, sock_read=WATCH_S_MAX + 30)
        async with self.session.get(
            path, params=query, timeout=limits, read_bufsize=2**22
        ) as answer:
            if answer.status >= 400:
                raise ApiError(answer.status, await answer.text())
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]


@dataclass
class Mirror:
    """A copy of all objects at a path, by uid, which `follow` keeps up to date."""

    api: Api
    path: str
    changed: Callable[[Object, bool], None]
    """Called with each new version of an object, and whether it is gone."""
    objects: dict[str, Object] = field(default_factory=dict)
    synced: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self) -> None:
        """List and watch for ever; a watch that ends for whatever reason begins with another list."""
        while True:
            try:
                version = self._replace(await self.api.get(self.path))
                self.synced.set()
                async for kind, found in self.api.watch(self.path, version):
                    self._put(found, gone=kind == "DELETED")
            except (ApiError, aiohttp.ClientError, OSError):
                await asyncio.sleep(RELIST_S)

    def _replace(self, listed: Object) -> str:
        items = {item["metadata"]["uid"]: item for item in listed["items"]}
        for uid in self.objects.keys() - items.keys():
            self._put(self.objects[uid], gone=True)
        for item in items.values():
            self._put(item, gone=False)
        version: str = listed["metadata"]["resourceVersion"]
        return version

    def _put(self, found: Object, gone: bool) -> None:
        uid = found["metadata"]["uid"]
        if gone:
            self.objects.pop(uid, None)
        else:
            self.objects[uid] = found
        self.changed(found, gone)
