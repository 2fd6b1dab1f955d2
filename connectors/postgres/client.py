"""The connection to a PostgreSQL server: its address, secrets, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ...errors import HeadgateError, JobError, SourceError, UsageError
from ..secrets import is_reference, read_secret

if TYPE_CHECKING:
    import psycopg

Connection: TypeAlias = "psycopg.Connection[Any]"
AsyncConnection: TypeAlias = "psycopg.AsyncConnection[Any]"
ANSWER_S_MAX: Final = 15
"""The time in which a server has to accept a connection."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    "connect_timeout": ANSWER_S_MAX,
    "client_encoding": "utf8",
    # A machine that vanished is noticed within a minute.
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 50_000,
}
_SESSION: Final = (
    "SET timezone = 'UTC'",
    "SET datestyle = 'ISO'",
    "SET intervalstyle = 'iso_8601'",
    "SET bytea_output = 'hex'",
    "SET extra_float_digits = 1",
    "SELECT set_config('synchronous_commit', 'on', false) "
    "WHERE current_setting('synchronous_commit') = 'off'",
)
"""The forms of values in text, which users and databases may have changed; and a commit is durable when the
server has answered, as checkpoints rely on that.
"""


@dataclass(frozen=True)
class Address:
    """The address of a database, as the user gives it.

    Attributes:
        dsn: `postgresql://user@host:port/database`, or `host=... dbname=...`; or where it can be read.
        password: the password, or where it can be read; None: it is in the DSN, in `~/.pgpass`, or not
            needed.
    """

    dsn: str
    password: str | None = None

    def check(self) -> None:
        """Check the form of the DSN.

        Raises:
            UsageError: it is no DSN.
        """
        if not self.dsn:
            raise UsageError("no server is named", fix='dsn="postgresql://user@host:5432/database"')

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of libpq, with secrets read on this machine.

        Raises:
            UsageError: the DSN or a secret cannot be read.
        """
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        try:
            found = conninfo_to_dict(read_secret("dsn", self.dsn))
        except psycopg.ProgrammingError:
            # The text of the error could have a part of a password.
            raise UsageError(
                f"not the address of a PostgreSQL server dsn=`{self}`",
                fix='dsn="postgresql://user@host:5432/database", or "host=... dbname=... user=..."',
            ) from None
        if self.password is not None:
            found["password"] = read_secret("password", self.password)
        return {**_DEFAULTS, **found}

    def __str__(self) -> str:
        """Return host, port and database."""
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        if is_reference(self.dsn):
            return self.dsn
        try:
            found = conninfo_to_dict(self.dsn)
        except psycopg.ProgrammingError:
            return "***"
        host, port = found.get("host", "localhost"), found.get("port", 5432)
        return f"{host}:{port}/{found.get('dbname', found.get('user', ''))}"

    def __repr__(self) -> str:
        """Return the address without secrets."""
        return f"Address({self})"


def connect(address: Address, application: str, **options: Any) -> Connection:
    """Return a connection in which every statement is a transaction, unless one is opened.

    Args:
        address: of the database.
        application: the name that the server shows for the connection.
        options: further parameters of libpq.

    Raises:
        SourceError: the server does not answer, or refuses us.
        UsageError: the DSN or a secret cannot be read.
    """
    import psycopg

    parameters = {**address.parameters(), "application_name": application, **options}
    try:
        # Prepared statements would not survive a connection pooler.
        connection = psycopg.connect(autocommit=True, prepare_threshold=None, **parameters)
        try:
            for statement in _SESSION:
                connection.execute(statement)
        except BaseException:
            connection.close()
            raise
    except psycopg.Error as error:
        raise cannot_use(address, error) from error
    return connection


async def connect_async(address: Address, application: str) -> AsyncConnection:
    """Return a connection like that of `connect`, for the event loop.

    Raises:
        SourceError: the server does not answer, or refuses us.
        UsageError: the DSN or a secret cannot be read.
    """
    import psycopg

    parameters = {**address.parameters(), "application_name": application}
    try:
        connection = await psycopg.AsyncConnection.connect(
            autocommit=True, prepare_threshold=None, **parameters
        )
        try:
            for statement in _SESSION:
                await connection.execute(statement)
        except BaseException:
            await connection.close()
            raise
    except psycopg.Error as error:
        raise cannot_use(address, error) from error
    return connection


def cannot_use(address: Address, error: Exception) -> SourceError:
    """Return the error for a server that does not answer, or refuses us."""
    return SourceError(
        f"the PostgreSQL server cannot be used server=`{address}`: {reason_of(error)}",
        fix="check the address, the database, the user and the password, the rules in pg_hba.conf, and "
        "sslmode",
    )


def reason_of(error: BaseException) -> str:
    """Return what the server has said, in one line."""
    diagnosed: Any = getattr(error, "diag", None)
    parts = [
        getattr(diagnosed, "message_primary", None),
        getattr(diagnosed, "message_detail", None),
    ]
    said = ": ".join(part for part in parts if part)
    context = getattr(diagnosed, "context", None)
    if said and context:
        said = f"{said} ({context.splitlines()[0]})"
    return said or " ".join(str(error).split())


@contextmanager
def refusals(what: str, fix: str) -> Iterator[None]:
    """Turn errors of the server in the block into a JobError.

    Args:
        what: that cannot be done, a clause.
        fix: what to do about it.
    """
    import psycopg

    try:
        yield
    except HeadgateError:
        raise
    except psycopg.Error as error:
        raise JobError(f"{what}: {reason_of(error)}", fix=fix) from error


@contextmanager
def reading(connection: Connection) -> Iterator[None]:
    """Let the statements in the block be one transaction that cannot change anything."""
    with connection.transaction():
        connection.execute("SET TRANSACTION READ ONLY")
        yield


def is_lost(error: BaseException) -> bool:
    """Return True if the connection broke or the server is away, so that trying again may help."""
    import psycopg

    text = str(error)
    if "FATAL" in text and getattr(error, "sqlstate", None) is None:
        # The server has refused a connection. For some reasons it may accept the next one.
        return any(part in text for part in ("the database system is", "too many", "slots are"))
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and not isinstance(
        error,
        psycopg.errors.DiskFull
        | psycopg.errors.ConfigurationLimitExceeded
        | psycopg.errors.ObjectInUse
        | psycopg.errors.InvalidPassword,
    )
