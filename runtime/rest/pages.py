"""The web UI: the files in `ui/`, as the REST API and `headgate ui` serve them.

They need no token, as they are the same for all jobs: the page asks for the token, and shows it with each
request for data. Nothing but these files can be loaded or run in the page (`POLICY`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from aiohttp import web

FOLDER: Final = Path(__file__).parent / "ui"
POLICY: Final = "; ".join(
    (
        "default-src 'self'",
        *(
            f"{name} 'none'"
            for name in ("object-src", "base-uri", "form-action", "frame-ancestors")
        ),
    )
)
"""The content security policy: no other host, no inline script or style, and no page around it."""
_HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
REDIRECTED: Final = web.AppKey("REDIRECTED", set[str])
"""The paths of an application from which browsers are sent on."""
_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}


@dataclass(frozen=True, slots=True)
class Page:
    """A file of the web UI."""

    body: bytes
    type: str
    etag: str


@lru_cache(maxsize=1)
def pages() -> dict[str, Page]:
    """Return all files of the web UI, by their paths below `ui/`."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            name = path.relative_to(FOLDER).as_posix()
            found[name] = Page(body, _TYPES[path.suffix], etag)
    return found


def add_pages(app: web.Application, prefix: str = "") -> None:
    """Add the routes of the web UI below `prefix`."""
    app.router.add_route("GET", f"{prefix}/ui/{{page:.*}}", _show)


def add_redirection(app: web.Application, path: str, to: str) -> None:
    """Add a route that sends browsers on to `to`.

    A relative address is right behind a proxy that adds a prefix to all paths.
    """

    app.setdefault(REDIRECTED, set()).add(path)

    async def redirect(request: web.Request) -> web.StreamResponse:
        response = web.Response(status=307, headers={**_HEADERS, "Location": to})
        response.force_close()
        return response

    app.router.add_route("GET", path, redirect)


def is_page(request: web.Request) -> bool:
    """Return True for a request that is answered here; it needs no token."""
    return "page" in request.match_info or request.path in request.app.get(REDIRECTED, ())


async def _show(request: web.Request) -> web.StreamResponse:
    """Answer with the file that the path names. The connection is closed, as it has shown no token."""
    page = pages().get(request.match_info["page"] or "index.html")
    if page is None:
        raise web.HTTPNotFound
    headers = {**_HEADERS, "ETag": page.etag}
    if request.headers.get("If-None-Match") == page.etag:
        response = web.Response(status=304, headers=headers)
    else:
        response = web.Response(
            body=page.body, content_type=page.type, charset="utf-8", headers=headers
        )
    response.force_close()
    return response
