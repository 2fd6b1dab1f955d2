"""Answers over HTTP, of the REST API and of `headgate ui`.

aiohttp is loaded by what answers, as the coordinator imports this before there is a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from .answers import PROBLEM_TYPE, Answer, Problem, problem

if TYPE_CHECKING:
    from aiohttp import web

HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def json_reply(
    body: Answer | dict[str, Any],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    close: bool = False,
) -> web.Response:
    """Return an answer as JSON; `close`: the connection is not kept."""
    from aiohttp import web

    response = web.Response(
        body=msgspec.json.encode(body),
        status=status,
        content_type="application/json",
        headers={**HEADERS, **(headers or {})},
    )
    if close:
        response.force_close()
    return response


def binary_reply(data: bytes, media: str, headers: Mapping[str, str]) -> web.Response:
    """Return an answer that is not text."""
    from aiohttp import web

    return web.Response(body=data, content_type=media, headers={**HEADERS, **headers})


def event_stream() -> web.StreamResponse:
    """Return an answer to which events are written one by one."""
    from aiohttp import web

    return web.StreamResponse(
        headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
    )


def refusal(found: Problem, *, close: bool) -> web.Response:
    """Return a refusal. Connections without a token are not kept."""
    from aiohttp import web

    headers = {**HEADERS, **({"WWW-Authenticate": "Bearer"} if found.status == 401 else {})}
    response = web.Response(
        body=msgspec.json.encode(found),
        status=found.status,
        content_type=PROBLEM_TYPE,
        headers=headers,
    )
    if close:
        response.force_close()
    return response


def problem_of_http(error: web.HTTPException) -> Problem:
    """Answer requests that aiohttp refuses: unknown paths and methods, and bodies that are too large."""
    from aiohttp import web

    match error:
        case web.HTTPNotFound():
            return problem(404, "there is nothing at this path\n  see /v1/openapi.json")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return problem(405, f"this path does not take {error.method}\n  it takes {allowed}")
        case web.HTTPRequestEntityTooLarge():
            return problem(413, "the body is larger than headgate.rest.body-max")
    return problem(error.status, error.reason)
