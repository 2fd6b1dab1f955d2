"""Redis, from Debian's packages.

The client redis (`pip install 'headgate[redis]'`) is needed. A server that the machine has is used, of
Redis or of Valkey; otherwise the packages are unpacked once, and nothing is installed or started as a
service.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .process import LocalServer, ServerProcess, runs
from .programs import NotAvailableError, debian_packages, made_once

_PACKAGES: Final = (
    *("redis-server", "redis-tools", "libjemalloc2", "liblua5.1-0", "lua-bitop", "lua-cjson"),
    *("liblzf1", "libatomic1"),
)
"""The server, and libraries that a small Debian may not have."""


class RedisServer(LocalServer):
    """A server on loopback that keeps all that it has acknowledged, in an append-only file.

    Attributes:
        port: its port on 127.0.0.1.
        url: its address for clients.
    """

    def __init__(self, directory: Path, *arguments: str) -> None:
        """Prepare a server; `start` starts it.

        Args:
            directory: for its data and its log; created.
            arguments: of the server, beside those of tests, such as `--requirepass`, `secret`.

        Raises:
            NotAvailableError: there is no client, or no server and no way to get one.
        """
        if find_spec("redis") is None:
            raise NotAvailableError("redis is not installed: pip install 'headgate[redis]'")
        program, environment = _program()
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory.resolve()
        super().__init__()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._password = _after("--requirepass", arguments)
        command = [
            *(program, "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", str(self._directory), "--appendonly", "yes", "--save", ""),
            *("--appendfsync", "always"),
            *arguments,
        ]
        self._process = ServerProcess(
            "Redis", command, directory / "redis.log", self._answers, environment
        )

    def client(self) -> Any:
        """Return a client of the server, which the caller closes."""
        import redis

        return redis.Redis(port=self.port, password=self._password, protocol=2)

    def _answers(self) -> bool:
        """Return True if this very server answers, and has read its file.

        It tells its settings before that, and refuses a ping until then.
        """
        import redis

        client = self.client()
        try:
            told = client.config_get("dir")
            client.ping()
        except redis.RedisError:
            return False  # it does not listen, or is still reading its file
        finally:
            client.close()
        return bool(told.get("dir") == str(self._directory))


def _after(name: str, arguments: Sequence[str]) -> str | None:
    return arguments[arguments.index(name) + 1] if name in arguments else None


running = runs(RedisServer)
"""Runs a server for the time of a block; its arguments and errors are those of `RedisServer`."""


def _program() -> tuple[str, dict[str, str] | None]:
    """Return the path of a server, and the environment that it needs, if that is not this process's."""
    for name in ("redis-server", "valkey-server"):
        installed = shutil.which(name)
        if installed is not None:
            return installed, None
    tree = made_once("redis-debian", ["usr/bin/redis-check-rdb"], _unpack)
    libraries = ":".join(
        str(tree / each / f"{os.uname().machine}-linux-gnu") for each in ("usr/lib", "lib")
    )
    # The program is the server, too, if it is called by that name; the package has a link for it.
    return str(tree / "usr/bin/redis-server"), {**os.environ, "LD_LIBRARY_PATH": libraries}


def _unpack(directory: Path) -> None:
    debian_packages(directory, _PACKAGES, "Redis", "redis-server")
