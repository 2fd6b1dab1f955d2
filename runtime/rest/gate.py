"""Who may ask: the token, and the names that a request may be for. Without I/O."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from .problems import RequestProblem


def check_token(authorization: str | None, token: str) -> None:
    """Compare in a time that does not depend on where the two differ.

    Raises:
        RequestProblem: the header does not show the token (401).
    """
    scheme, _, shown = (authorization or "").partition(" ")
    same = hmac.compare_digest(shown.strip().encode(errors="replace"), token.encode())
    if scheme.lower() != "bearer" or not same:
        raise RequestProblem(
            401, "the job's token is missing or wrong\n  send it as `Authorization: Bearer TOKEN`"
        )


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
    """The names of the option `rest.address`."""
    return frozenset(name.strip().lower() for name in (texts or "").split(",") if name.strip())


def _host_name(host: str) -> str | None:
    """The name or address of a Host header, without its port; None: it is none."""
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
