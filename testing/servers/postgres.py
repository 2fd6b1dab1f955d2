"""PostgreSQL, from Debian's packages, as a user who is not root.

The client psycopg (`pip install 'headgate[postgres]'`) is needed. A server that the machine has is used;
otherwise the packages are unpacked once, and nothing is installed or started as a service.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, LiteralString

from .process import HeldPort, ServerProcess, runs
from .programs import NotAvailableError, made_once, run_command

WITH_PASSWORD: Final = "with_password"
"""Members of this role must give their password; everybody else is trusted."""
_DOWNLOAD_S_MAX: Final = 300
_INIT_S_MAX: Final = 120
_CHILDREN_S_MAX: Final = 60
_LIBRARIES: Final = (
    *(
        "libpq5",
        "libicu72",
        "libxml2",
        "libxslt1.1",
        "libldap-2.5-0",
        "libsasl2-2",
        "libgssapi-krb5-2",
    ),
    *("libkrb5-3", "libk5crypto3", "libkrb5support0", "libkeyutils1", "libpam0g"),
)
"""Libraries that the server needs and a small Debian may not have."""
_NOBODY: Final = 65534
_SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "100",
    "shared_buffers": "16MB",
    # A test kills processes and not the machine, so the caches of the system survive.
    "fsync": "off",
    "logging_collector": "off",
}


class PostgresServer:
    """A server on loopback, with the superuser `postgres`.

    Attributes:
        port: its port on 127.0.0.1.
        dsn: its address for clients, with the database `postgres`.
    """

    def __init__(self, directory: Path, settings: Mapping[str, str] | None = None) -> None:
        """Prepare a server; `start` starts it.

        Args:
            directory: for its log; created.
            settings: of the server, beside those of tests.

        Raises:
            NotAvailableError: there is no client, or no server and no way to get one.
        """
        if find_spec("psycopg") is None:
            raise NotAvailableError("psycopg is not installed: pip install 'headgate[postgres]'")
        directory.mkdir(parents=True, exist_ok=True)
        self._port = HeldPort()
        self.port = self._port.number
        self.dsn = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        # PostgreSQL refuses to run as root. Nobody else can reach the directories of root's tests.
        self._home = Path(tempfile.mkdtemp(prefix="headgate-postgres-"))
        self._data = self._home / "data"
        self._settings = {**_SETTINGS, "port": str(self.port), **(settings or {})}
        root = os.geteuid() == 0
        self._programs = _programs(self._home, copy=root)
        self._as_user = (
            ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
            if root
            else []
        )
        if root:
            self._home.chmod(0o755)
            self._data.mkdir(mode=0o700)
            os.chown(self._data, _NOBODY, _NOBODY)
        self._process = ServerProcess(
            "PostgreSQL",
            [*self._as_user, str(self._programs.path / "postgres"), "-D", str(self._data)],
            directory / "postgres.log",
            self._answers,
            self._programs.environment,
        )
        self._initialised = False

    def start(self) -> None:
        """Start it, or start it again with its data.

        Raises:
            RuntimeError: it did not come up; the text has the end of its log.
        """
        if not self._initialised:
            self._initialise()
        self._process.start()

    def _initialise(self) -> None:
        tool = [str(self._programs.path / "initdb"), "-D", str(self._data), "-U", "postgres"]
        done = subprocess.run(
            [*self._as_user, *tool, "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C.UTF-8"],
            capture_output=True,
            text=True,
            timeout=_INIT_S_MAX,
            check=False,
            env=self._programs.environment,
            cwd=self._home,
        )
        if done.returncode:
            raise RuntimeError(f"initdb failed: {done.stdout}{done.stderr}")
        with (self._data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in self._settings.items())
        rules = self._data / "pg_hba.conf"
        rules.write_text(
            f"host all +{WITH_PASSWORD} 127.0.0.1/32 scram-sha-256\n{rules.read_text()}"
        )
        self._initialised = True

    def kill(self) -> None:
        """Kill all processes of the server, as a crash of its machine would."""
        children = self._children()
        self._process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for _ in range(_CHILDREN_S_MAX * 100):
            if not any(_runs(child) for child in children):
                return
            time.sleep(0.01)
        raise RuntimeError("processes of PostgreSQL did not end")

    def stop(self) -> None:
        """Shut the server down; its clients are disconnected."""
        if self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGINT)  # on SIGTERM it waits for its clients
            self._process.stop()

    def close(self) -> None:
        """Shut it down for good, and delete its data."""
        self.stop()
        self._port.release()
        shutil.rmtree(self._home, ignore_errors=True)

    def execute(self, *statements: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run statements, each in a transaction of its own, and return the rows of the last one."""
        import psycopg

        rows: list[tuple[Any, ...]] = []
        with psycopg.connect(self.dsn, dbname=database, autocommit=True) as connection:
            for statement in statements:
                made: Any = statement
                cursor = connection.execute(made)
                rows = cursor.fetchall() if cursor.description else []
        return rows

    def _children(self) -> list[int]:
        pid = self._process.pid
        if pid is None:
            return []
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]

    def _answers(self) -> bool:
        import psycopg

        query: LiteralString = "SHOW data_directory"
        try:
            with psycopg.connect(self.dsn, connect_timeout=5) as connection:
                found = connection.execute(query).fetchone()
        except psycopg.OperationalError:
            return False
        return found is not None and found[0] == str(self._data)


def _runs(pid: int) -> bool:
    """Return True if there is such a process that is not only waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


running = runs(PostgresServer)
"""Runs a server for the time of a block; its arguments and errors are those of `PostgresServer`."""


class _Programs:
    """The directory of the server's programs, and the variables with which they run."""

    def __init__(self, path: Path, libraries: Sequence[Path] = ()) -> None:
        self.path = path
        self.environment = {**os.environ, "LC_ALL": "C.UTF-8", "TZ": "UTC"}
        if libraries:
            self.environment["LD_LIBRARY_PATH"] = ":".join(map(str, libraries))


def _programs(home: Path, *, copy: bool) -> _Programs:
    """Return the programs: those of the machine, or those of packages that were unpacked.

    Args:
        home: the directory of the server.
        copy: the cache may be out of reach for the user of the server.
    """
    if find_spec("psycopg_binary") is None and find_spec("psycopg_c") is None:
        raise NotAvailableError("psycopg has no binary part: pip install 'headgate[postgres]'")
    installed = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"),
        key=lambda path: [int(number) for number in re.findall(r"\d+", path.parts[4])],
    )
    if installed:
        return _Programs(installed[-1].parent)
    tree = made_once("postgresql-debian", ["unpacked"], _unpack)
    if copy:
        tree = Path(shutil.copytree(tree, home / "programs", symlinks=True))
    libraries = [tree / each / f"{os.uname().machine}-linux-gnu" for each in ("usr/lib", "lib")]
    found = sorted(tree.glob("usr/lib/postgresql/*/bin"))
    return _Programs(found[-1], libraries)


def _unpack(directory: Path) -> None:
    try:
        _download(directory)
    except NotAvailableError as error:
        raise NotAvailableError(
            f"{error}; install PostgreSQL yourself (apt-get install postgresql)"
        ) from error
    for package in directory.glob("*.deb"):
        run_command("dpkg-deb", "-x", str(package), str(directory), seconds_max=120)
        package.unlink()
    (directory / "unpacked").touch()


def _download(directory: Path) -> None:
    try:
        server = _server_package()
    except NotAvailableError:
        # A fresh container has no lists of packages.
        run_command("apt-get", "update", seconds_max=_DOWNLOAD_S_MAX)
        server = _server_package()
    download = ("apt-get", "download", server, *_LIBRARIES)
    run_command(*download, seconds_max=_DOWNLOAD_S_MAX, cwd=directory)


def _server_package() -> str:
    """Return the name of the package of the server, such as postgresql-15."""
    told = run_command("apt-cache", "depends", "postgresql", seconds_max=60)
    found = re.search(r"Depends: (postgresql-\d+)\s", told)
    if found is None:
        raise NotAvailableError("Debian's lists of packages do not have postgresql")
    return found[1]
