"""Election of the one operator that acts, by a Lease of the API server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

from .api import ApiError, JsonObject
from .kinds import LEASE, Kind

LEASE_S: Final = 15
"""Others take over a lease that was not renewed for this time, in seconds."""
RENEW_DEADLINE_S: Final = 10.0
"""A leader that could not renew the lease for this time stops; it must be less than `LEASE_S`."""
RETRY_S: Final = 2.0
ANSWER_S: Final = 5.0
"""The API server must answer within this time, or it counts as a failure."""
log = logging.getLogger(__name__)


class Store(Protocol):
    """The part of the API server that an election needs."""

    async def get(self, kind: Kind, namespace: str, name: str) -> JsonObject | None: ...
    async def create(self, made: JsonObject, kind: Kind) -> JsonObject: ...
    async def update(self, changed: JsonObject, kind: Kind) -> JsonObject: ...


class LeaseElection:
    """One candidate.

    Clocks of different machines are never compared. A lease has expired if this candidate has seen no
    change of it for `LEASE_S` by its own clock.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float],
        now: Callable[[], str],
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._seen: tuple[Any, float] = (None, clock())
        self._renewed_s = clock()

    async def acquire(self) -> None:
        """Return once this candidate leads."""
        while not await self._try():
            await self._sleep(RETRY_S)
        log.info("%s leads", self._identity)

    async def hold(self) -> None:
        """Renew the lease; return once it may be lost. After that the operator must not act."""
        while self._left_s() > 0:
            await self._sleep(min(RETRY_S, self._left_s()))
            if not await self._try(self._left_s()) and self._is_taken():
                break
        log.error("%s no longer leads", self._identity)

    def _left_s(self) -> float:
        """Return how long this candidate may still lead if it cannot renew the lease."""
        return max(0.0, self._renewed_s + RENEW_DEADLINE_S - self._clock())

    async def release(self) -> None:
        """Release the lease, so that the next leader need not wait for its end."""
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await self._store.get(LEASE, self._namespace, self._name)
                if found is not None and found["spec"].get("holderIdentity") == self._identity:
                    spec = found["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._store.update(found | {"spec": spec}, LEASE)
        except (ApiError, TimeoutError) as error:
            log.warning("the lease was not released: %s", _text(error))

    async def _try(self, at_most_s: float = ANSWER_S) -> bool:
        """Take or renew the lease; return False if another has it, or the API server does not answer."""
        began = self._clock()
        try:
            async with asyncio.timeout(min(at_most_s, ANSWER_S)):
                found = await self._store.get(LEASE, self._namespace, self._name)
                if found is None:
                    await self._store.create(self._lease(None), LEASE)
                elif self._is_free(found):
                    await self._store.update(self._lease(found), LEASE)
                else:
                    return False
        except (ApiError, TimeoutError) as error:
            log.warning("the lease was not renewed: %s", _text(error))
            return False
        self._renewed_s, self._seen = began, (None, began)
        return True

    def _is_free(self, found: JsonObject) -> bool:
        spec = found["spec"]
        if spec != self._seen[0]:
            self._seen = (spec, self._clock())
        holder = spec.get("holderIdentity")
        if holder in (None, "", self._identity):
            return True
        return self._clock() - self._seen[1] >= float(spec.get("leaseDurationSeconds", LEASE_S))

    def _is_taken(self) -> bool:
        spec = self._seen[0]
        return spec is not None and spec.get("holderIdentity") not in (None, "", self._identity)

    def _lease(self, found: JsonObject | None) -> JsonObject:
        spec = {} if found is None else dict(found["spec"])
        if spec.get("holderIdentity") != self._identity:
            spec["leaseTransitions"] = int(spec.get("leaseTransitions", 0)) + (found is not None)
            spec["acquireTime"] = self._now()
        spec |= {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_S,
            "renewTime": self._now(),
        }
        if found is not None:
            return found | {"spec": spec}
        metadata = {"namespace": self._namespace, "name": self._name}
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.name,
            "metadata": metadata,
            "spec": spec,
        }


def _text(error: Exception) -> str:
    return str(error) or "the API server does not answer"
