"""Checks of requests, and the operations that they begin. Without I/O.

A request shows the token, and is for a name that is ours. Each operation has an id of the client's choice,
and begins once.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ...errors import JobNotReady
from .answers import OperationAnswer, OperationStatus, Problem, RequestProblem


def check_token(authorization: str | None, token: str) -> None:
    """Compare in a time that does not depend on where the two differ.

    Raises:
        RequestProblem: the header does not show the token (401).
    """
    if not shows(authorization, token):
        raise RequestProblem(
            401, "the job's token is missing or wrong\n  send it as `Authorization: Bearer TOKEN`"
        )


def shows(authorization: str | None, token: str) -> bool:
    """Return True if the header shows the token, in a time that does not depend on where they differ."""
    scheme, _, shown = (authorization or "").partition(" ")
    same = hmac.compare_digest(shown.strip().encode(errors="replace"), token.encode())
    return same and scheme.lower() == "bearer"


def check_names(host: str | None, origin: str | None, allowed: Iterable[str]) -> None:
    """Refuse what a page of a stranger's web site could send through a user's browser.

    Such a page can have its own host name resolve to the address of this API (DNS rebinding), but it cannot
    be an IP address, `localhost`, or one of the `allowed` names.

    Raises:
        RequestProblem: the request is for another host (421), or comes from another site (403).
    """
    name = _host_name(host or "")
    if name is None or not (_is_address(name) or name in {"localhost", *allowed}):
        raise RequestProblem(
            421,
            f"this is not the API of that host host=`{host or ''}`\n"
            "  add the name to the option rest.address",
        )
    if origin is not None and urlsplit(origin).netloc.lower() != (host or "").lower():
        raise RequestProblem(403, f"pages of other sites may not ask origin=`{origin}`")


def allowed_names(texts: str | None) -> frozenset[str]:
    """Return the names of the option `rest.address`."""
    return frozenset(name.strip().lower() for name in (texts or "").split(",") if name.strip())


def _host_name(host: str) -> str | None:
    """Return the name or address of a Host header, without its port; None: it has none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Entry(msgspec.Struct):
    arguments: dict[str, Any]
    answer: OperationAnswer


class Operations:
    """Remembers a bounded number of operations; those that go on are never forgotten."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._entries: dict[str, _Entry] = {}

    def begin(
        self, trigger_id: str, verb: str, arguments: Mapping[str, Any], now_ms: int
    ) -> tuple[OperationAnswer, bool]:
        """The operation of this id, and whether it is new: only then it has to be carried out.

        One that was refused because the job was not ready is new when it is sent again: nothing was done.

        Raises:
            RequestProblem: the id is that of another operation (409), or too many go on (503).
        """
        entry = self._entries.get(trigger_id)
        if entry is not None:
            if (entry.answer.verb, entry.arguments) != (verb, dict(arguments)):
                raise RequestProblem(
                    409,
                    f"another operation has this triggerId triggerId=`{trigger_id}` "
                    f"verb=`{entry.answer.verb}`\n  choose a new id for each operation",
                )
            found = entry.answer.problem
            if found is None or found.error != JobNotReady.__name__:
                return entry.answer, False
            del self._entries[trigger_id]
        self._make_room()
        answer = OperationAnswer(
            trigger_id=trigger_id, verb=verb, status=OperationStatus.IN_PROGRESS, began_ms=now_ms
        )
        self._entries[trigger_id] = _Entry(dict(arguments), answer)
        return answer, True

    def complete(self, trigger_id: str, result: dict[str, Any], now_ms: int) -> None:
        """Note that the operation is done."""
        self._end(trigger_id, now_ms, status=OperationStatus.COMPLETED, result=result)

    def fail(self, trigger_id: str, problem: Problem, now_ms: int) -> None:
        """Note that the operation was refused, or failed."""
        self._end(trigger_id, now_ms, status=OperationStatus.FAILED, problem=problem)

    def find(self, trigger_id: str) -> OperationAnswer:
        """Return the operation of this id.

        Raises:
            RequestProblem: none is remembered (404).
        """
        entry = self._entries.get(trigger_id)
        if entry is None:
            raise RequestProblem(
                404,
                f"no such operation triggerId=`{trigger_id}`\n  a coordinator that has taken over does not "
                "know those of the one before: send the request again, with the same triggerId",
            )
        return entry.answer

    @property
    def all(self) -> list[OperationAnswer]:
        """Return all operations that are remembered, oldest first."""
        return [entry.answer for entry in self._entries.values()]

    def _end(self, trigger_id: str, now_ms: int, **changes: Any) -> None:
        entry = self._entries[trigger_id]
        entry.answer = msgspec.structs.replace(entry.answer, ended_ms=now_ms, **changes)

    def _make_room(self) -> None:
        if len(self._entries) < self._kept:
            return
        over = (
            trigger_id
            for trigger_id, entry in self._entries.items()
            if entry.answer.status is not OperationStatus.IN_PROGRESS
        )
        oldest = next(over, None)
        if oldest is None:
            raise RequestProblem(
                503, f"too many operations go on headgate.rest.operations=`{self._kept}`"
            )
        del self._entries[oldest]
