"""MariaDB, from Debian's packages.

The client pymysql (`pip install 'headgate[mysql]'`) is needed. A server that the machine has is used;
otherwise the packages are unpacked once, and nothing is installed or started as a service.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .process import LocalServer, ServerProcess, runs
from .programs import NotAvailableError, debian_packages, made_once

_PACKAGES: Final = (
    *("mariadb-server-core", "libaio1", "liburing2", "libnuma1", "libpcre2-8-0"),
    *("libcrypt1", "libsystemd0"),
)
"""The server, and libraries that a small Debian may not have."""
_INIT_S_MAX: Final = 120
_SETTINGS: Final = {
    "bind-address": "127.0.0.1",
    "server-id": "1",
    "log-bin": "mariadb-bin",
    "binlog-format": "ROW",
    "binlog-row-image": "FULL",
    "binlog-row-metadata": "FULL",
    "character-set-server": "utf8mb4",
    "innodb-buffer-pool-size": "32M",
    "innodb-log-file-size": "8M",
    # A test kills processes and not the machine, so the caches of the system survive.
    "innodb-flush-log-at-trx-commit": "2",
    "sync-binlog": "0",
}
_BOOTSTRAP: Final = ("mysql_system_tables.sql", "mysql_system_tables_data.sql")
_USERS: Final = (
    "SET sql_log_bin = 0;\n"
    "CREATE USER IF NOT EXISTS 'root'@'127.0.0.1';\n"
    "GRANT ALL ON *.* TO 'root'@'127.0.0.1' WITH GRANT OPTION;\n"
    "CREATE DATABASE IF NOT EXISTS shop;\n"
)
"""Statements of each start. Without names of hosts, clients on loopback have this address."""


class MariaDbServer(LocalServer):
    """A server on loopback that writes changes of rows into its log, with the database `shop`.

    Attributes:
        port: its port on 127.0.0.1.
        url: its address for clients, as the user `root`, who has no password.
    """

    def __init__(self, directory: Path, settings: Mapping[str, str] | None = None) -> None:
        """Prepare a server; `start` starts it.

        Args:
            directory: for its data and its log; created.
            settings: of the server, beside those of tests.

        Raises:
            NotAvailableError: there is no client, or no server and no way to get one.
        """
        if find_spec("pymysql") is None:
            raise NotAvailableError("pymysql is not installed: pip install 'headgate[mysql]'")
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory.resolve()
        self._data = self._directory / "data"
        home, self._environment = _program()
        super().__init__()
        self.url = f"mysql://root@127.0.0.1:{self.port}/shop"
        users = self._directory / "users.sql"
        users.write_text(_USERS)
        self._shared = home / "share/mysql"
        self._program = [
            *(str(home / "sbin/mariadbd"), "--no-defaults", f"--basedir={home}"),
            *(f"--datadir={self._data}", f"--lc-messages-dir={self._shared}"),
            *(["--user=root"] if os.geteuid() == 0 else []),
        ]
        options = {**_SETTINGS, **(settings or {})}
        command = [
            *self._program,
            *(f"--port={self.port}", "--skip-name-resolve", f"--init-file={users}"),
            # The path of a socket must be short, and is relative to the directory of the data.
            "--socket=mariadb.sock",
            *(f"--{name}={value}" for name, value in options.items()),
        ]
        self._process = ServerProcess(
            "MariaDB", command, directory / "mariadb.log", self._answers, self._environment
        )

    def start(self) -> None:
        """Start it, or start it again with its data.

        Raises:
            RuntimeError: it did not come up; the text has the end of its log.
        """
        if not self._data.exists():
            self._initialise()
        super().start()

    def _initialise(self) -> None:
        """Make the tables of the server, as the script mariadb-install-db does it."""
        self._data.mkdir()
        parts = [(self._shared / name).read_text() for name in _BOOTSTRAP]
        statements = "\n".join(
            ["CREATE DATABASE mysql;", "USE mysql;", "SET @auth_root_socket = NULL;", *parts]
        )
        done = subprocess.run(
            [*self._program, "--bootstrap", "--innodb-log-file-size=8M"],
            input=statements,
            capture_output=True,
            text=True,
            timeout=_INIT_S_MAX,
            check=False,
            env=self._environment,
        )
        if done.returncode:
            shutil.rmtree(self._data)
            raise RuntimeError(f"MariaDB made no tables of its own: {done.stderr[-2000:]}")

    def stop(self) -> None:
        """Shut it down; `start` starts it again with its data."""
        self._process.stop()

    def execute(self, *statements: str, **options: Any) -> list[tuple[Any, ...]]:
        """Run statements, each in a transaction of its own, and return the rows of the last one.

        Args:
            statements: to run.
            options: of the connection, such as `user`.
        """
        import pymysql

        given = {"user": "root", "database": "shop", "autocommit": True, **options}
        rows: list[tuple[Any, ...]] = []
        connection = pymysql.connect(host="127.0.0.1", port=self.port, **given)
        try:
            with connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
                    rows = list(cursor.fetchall())
        finally:
            connection.close()
        return rows

    def _answers(self) -> bool:
        """Return True if this very server answers."""
        import pymysql

        try:
            ((found,),) = self.execute("SELECT @@datadir")
        except pymysql.MySQLError:
            return False  # it does not listen, or has not made its database yet
        return Path(found) == self._data


running = runs(MariaDbServer)
"""Runs a server for the time of a block; its arguments and errors are those of `MariaDbServer`."""


def _program() -> tuple[Path, dict[str, str]]:
    """Return the directory above `sbin/mariadbd`, and the environment that it needs."""
    installed = shutil.which("mariadbd") or "/usr/sbin/mariadbd"
    if Path(installed).exists():
        return Path(installed).parents[1], dict(os.environ)

    def make(directory: Path) -> None:
        debian_packages(directory, _PACKAGES, "MariaDB", "mariadb-server")

    tree = made_once("mariadb-debian", ["usr/sbin/mariadbd"], make)
    libraries = ":".join(
        str(tree / each / f"{os.uname().machine}-linux-gnu") for each in ("usr/lib", "lib")
    )
    return tree / "usr", {**os.environ, "LD_LIBRARY_PATH": libraries}
