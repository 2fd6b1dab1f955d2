"""Control links over sockets."""

from __future__ import annotations

import asyncio

import pytest

from headgate.runtime.control import link


def test_an_address_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that drops what is sent to it: there may be another address to try."""

    async def silent(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", silent)
    monkeypatch.setattr(link, "CONNECT_S", 0.0)

    async def main() -> None:
        async with asyncio.timeout(60) as here:
            with pytest.raises(OSError):
                await link.connect("tcp:127.0.0.1:1")
        assert not here.expired()

    asyncio.run(main())
