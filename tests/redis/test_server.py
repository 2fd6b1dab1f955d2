"""The server that tests start: it is used when it has read what it has kept."""

from __future__ import annotations

from pathlib import Path

from headgate.testing.servers.redis import running
from headgate.tests.support.skips import available

_KEYS = 20_000
"""A server that reads its file looks at requests after each 1,024 commands."""


def test_a_server_that_is_started_again_has_read_its_file(tmp_path: Path) -> None:
    """It answers before, and refuses all that concerns data until then."""
    slowly = ("--key-load-delay", "100", "--aof-use-rdb-preamble", "no")
    with available(running(tmp_path / "server", *slowly)) as server:
        with server.client() as client:
            pipeline = client.pipeline(transaction=False)
            for number in range(_KEYS):
                pipeline.set(f"key-{number}", number)
            pipeline.execute()
        server.kill()
        server.start()
        with server.client() as client:
            assert not client.info("persistence")["loading"]
            assert client.dbsize() == _KEYS
