"""The connection to a server of MySQL or MariaDB: its address, secrets, and errors that say what to do."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

from ...errors import HeadgateError, JobError, SourceError, UsageError
from ..secrets import is_reference, read_secret
from ..tls import client_context

if TYPE_CHECKING:
    import pymysql

Connection: TypeAlias = "pymysql.connections.Connection[Any]"
_ANSWER_S_MAX: Final = 15
"""The time in which a server has to accept a connection."""
SILENCE_S_MAX: Final = 60
"""A server that says nothing for this time is away: it is asked to tell more often that it lives."""
_WAITING_S_MAX: Final = 30 * 24 * 3600
"""The server keeps a connection whose client does not take what it sends, as rows may have to wait."""
_AWAY: Final = (1040, 1053, 1077, 1079, 1158, 1159, 1160, 1161, 1205, 1213, 1317, 1412, 1927)
"""Errors of a server that shuts down, has too many clients, or could not do it now.

1412 is of a table that was changed after the transaction which reads it had begun.
"""
_AWAY_CLIENT: Final = (2002, 2003, 2006, 2013, 2055)
_EXAMPLE: Final = 'url="mysql://user@host:3306/database"'


@dataclass(frozen=True)
class Address:
    """The address of a database, as the user gives it.

    Attributes:
        url: `mysql://user@host:3306/database`; or where it can be read.
        password: the password, or where it can be read; None: it is in the URL, or not needed.
        tls: the connection is encrypted, and the certificate of the server is checked.
        ca: with TLS: the file of the authorities to trust; None: those of the system.
        certificate: with TLS: the file with the certificate of the client.
        key: with TLS: the file with its key.
    """

    url: str
    password: str | None = None
    tls: bool = False
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def check(self) -> None:
        """Check the form of the address.

        Raises:
            UsageError: it is not that of a database, or files of TLS are given without TLS.
        """
        if not is_reference(self.url):
            _parts(self.url)
        if not self.tls and (self.ca or self.certificate or self.key):
            raise UsageError("files of certificates are given, and tls is not", fix="tls=True")

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the client, with secrets read on this machine.

        Raises:
            UsageError: the address, a secret or a file of certificates cannot be read.
        """
        found = _parts(read_secret("url", self.url))
        if self.password is not None:
            found["password"] = read_secret("password", self.password)
        if self.tls:
            found["ssl"] = client_context(self.ca, self.certificate, self.key)
        return found

    def __str__(self) -> str:
        """Return host, port and database."""
        if is_reference(self.url):
            return self.url
        try:
            found = _parts(self.url)
        except UsageError:
            return "***"
        return f"{found['host']}:{found['port']}/{found['database'] or ''}"

    def __repr__(self) -> str:
        """Return the address without secrets."""
        return f"Address({self})"


def _parts(url: str) -> dict[str, Any]:
    """Return the parts of an address as parameters of the client.

    Raises:
        UsageError: it is not that of a database. The text has nothing of it, as it may have a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 3306
        fits = parts.scheme in ("mysql", "mariadb") and bool(parts.hostname) and not parts.query
    except ValueError:
        fits = False
    if not fits:
        raise UsageError("not the address of a MySQL or MariaDB server", fix=_EXAMPLE)
    return {
        "host": parts.hostname,
        "port": port,
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "database": unquote(parts.path.strip("/")) or None,
    }


def settings_of(address: Address) -> dict[str, Any]:
    """Return the parameters of a client, in whose session values have the forms that are expected."""
    from pymysql.converters import encoders

    return {
        **address.parameters(),
        "charset": "utf8mb4",
        "autocommit": True,
        "connect_timeout": _ANSWER_S_MAX,
        "read_timeout": SILENCE_S_MAX,
        "write_timeout": SILENCE_S_MAX,
        # Without decoders values come as texts and bytes, and become columns at once.
        "conv": encoders,
        "init_command": (
            f"SET time_zone = '+00:00', sql_mode = '', net_write_timeout = {_WAITING_S_MAX}, "
            "max_sort_length = 4096"  # keys are sorted by all of their bytes
        ),
    }


def connect(address: Address, **options: Any) -> Connection:
    """Return a connection in which every statement is a transaction, unless one is opened.

    Args:
        address: of the database.
        options: further parameters of the client.

    Raises:
        SourceError: the server does not answer, or refuses us.
        UsageError: the address or a secret cannot be read.
    """
    import pymysql

    settings = {**settings_of(address), **options}
    try:
        return pymysql.connect(**settings)
    except (pymysql.MySQLError, RuntimeError) as error:
        raise cannot_use(address, error) from error


@contextmanager
def connected(address: Address, **options: Any) -> Iterator[Connection]:
    """Connect for the time of a block, like `connect`."""
    connection = connect(address, **options)
    try:
        yield connection
    finally:
        if connection.open:
            connection.close()


def query(
    connection: Connection, statement: str, values: Sequence[Any] = ()
) -> list[tuple[Any, ...]]:
    """Run a statement, and return its rows: values are texts, or bytes of binary columns."""
    with connection.cursor() as cursor:
        cursor.execute(statement, tuple(values) or None)
        return list(cursor.fetchall())


def cannot_use(address: Address, error: Exception) -> SourceError:
    """Return the error for a server that does not answer, or refuses us."""
    return SourceError(
        f"the MySQL server cannot be used server=`{address}`: {reason_of(error)}",
        fix="check the address, the database, the user and the password, and whether it wants tls=True",
    )


def reason_of(error: BaseException) -> str:
    """Return what the server has said, in one line."""
    said = error.args[1] if len(error.args) > 1 else error
    return " ".join(str(said).split())


def code_of(error: BaseException | None) -> int:
    """Return the number of an error of the server or the client; 0: it has none."""
    code = error.args[0] if error is not None and error.args else 0
    return code if isinstance(code, int) else 0


@contextmanager
def refusals(what: str, fix: str) -> Iterator[None]:
    """Turn errors of the server in the block into a JobError.

    Args:
        what: that cannot be done, a clause.
        fix: what to do about it.
    """
    import pymysql

    try:
        yield
    except HeadgateError:
        raise
    except pymysql.MySQLError as error:
        raise JobError(f"{what}: {reason_of(error)}", fix=fix) from error


def is_lost(error: BaseException | None) -> bool:
    """Return True if the connection broke or the server is away, so that trying again may help."""
    import pymysql

    if isinstance(error, pymysql.InterfaceError | OSError):
        return True
    if isinstance(getattr(error, "original_exception", None), ssl.SSLCertVerificationError):
        return False
    return isinstance(error, pymysql.MySQLError) and code_of(error) in (*_AWAY, *_AWAY_CLIENT)


def quoted(*names: str) -> str:
    """Return a name as SQL writes it."""
    return ".".join("`" + name.replace("`", "``") + "`" for name in names)
