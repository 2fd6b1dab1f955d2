"""The catalog of an Iceberg table: how it is reached, and errors that show no secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from ...errors import StorageError, UsageError
from ..files.locations import check_directory
from ..s3_config import without_role
from ..secrets import is_reference, read_secret

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

KINDS: Final = ("rest", "sql")
_SECRET: Final = re.compile(
    r"passw|pwd|secret|token|credential|authorization|key|connection-string", re.I
)
_SQLITE: Final = re.compile(r"sqlite:///([^?]+\.\w+)")
"""A catalog that is a file on this machine."""
_WITHOUT_REFERENCES: Final = ("warehouse",)
"""Properties whose values are addresses, which may begin with `file:`."""


@dataclass(frozen=True, slots=True, repr=False)
class IcebergCatalog:
    """A catalog, by the properties that the library of Iceberg knows.

    A value of the form `env:NAME` or `file:/path`, other than that of `warehouse`, is read where the
    catalog is used: on the machine that submits the job, and on each worker.

    Attributes:
        properties: `type`, `uri`, `warehouse`, `name` and others.
    """

    properties: dict[str, str]

    def __post_init__(self) -> None:
        """Check what has to be there.

        Raises:
            UsageError: a property is missing, or of no use.
        """
        wrong = [key for key, value in self.properties.items() if not isinstance(value, str)]
        if wrong:
            raise UsageError(
                f"a property of a catalog is a text property=`{wrong[0]}`", fix='such as "true"'
            )
        if not self.properties.get("uri"):
            raise UsageError(
                "the catalog has no address",
                fix='catalog={"uri": "https://..."} or {"uri": "sqlite:///catalog.db", "warehouse": ...}',
            )
        if is_reference(self.properties["uri"]) and "type" not in self.properties:
            raise UsageError(
                "the kind of the catalog cannot be told, as its address is read on each machine",
                fix='add "type": "rest", or "sql"',
            )
        if self.kind not in KINDS:
            raise UsageError(
                f"no such kind of catalog type=`{self.kind}`", fix=f"one of: {', '.join(KINDS)}"
            )

    @property
    def kind(self) -> str:
        """`rest` or `sql`."""
        given = self.properties.get("type")
        return given or ("rest" if self.properties["uri"].startswith("http") else "sql")

    def __str__(self) -> str:
        """Return the address without user, password and parameters."""
        return _without_secrets(self.properties["uri"])

    def __repr__(self) -> str:
        """Return the properties without secrets."""
        shown = {
            key: "***" if _SECRET.search(key) else _without_secrets(value)
            for key, value in self.properties.items()
        }
        return f"IcebergCatalog({shown!r})"

    def exists(self, options: Mapping[str, str]) -> bool:
        """Return False if the catalog is a database without the tables of one; it is not changed.

        Args:
            options: as for `opened`.

        Raises:
            UsageError: a secret cannot be read, or the file of the database cannot be created.
            StorageError: the database does not answer, or refuses us.
        """
        if self.kind == "rest":
            return True
        file = _SQLITE.fullmatch(read_secret("uri", self.properties["uri"]))
        if file is not None and not os.path.exists(file[1]):
            check_directory(os.path.dirname(file[1]), {})
            return False
        from sqlalchemy import inspect

        with self.opened(options, create=False) as catalog:
            engine: Any = catalog.engine
            return bool(inspect(engine).has_table("iceberg_tables"))

    @contextmanager
    def opened(self, options: Mapping[str, str], *, create: bool = True) -> Iterator[Catalog]:
        """Open the catalog.

        Args:
            options: those of the job, and `storage_options`: how S3 is reached.
            create: whether a database gets the tables of a catalog, unless it has them.

        Raises:
            UsageError: a secret cannot be read.
            StorageError: the catalog does not answer, or refuses us; also in the body of `with`.
        """
        from pyiceberg.catalog import load_catalog

        known = {
            key: value if key in _WITHOUT_REFERENCES else read_secret(key, value)
            for key, value in self.properties.items()
        }
        name = known.pop("name", "default")
        if not create:
            known["init_catalog_tables"] = "false"
        with self._reaching(known):
            catalog = load_catalog(name, **{**_s3_properties(options), **known, "type": self.kind})
            try:
                yield catalog
            finally:
                catalog.close()

    @contextmanager
    def _reaching(self, known: Mapping[str, str]) -> Iterator[None]:
        """Turn errors of the library into StorageError."""
        import pyarrow as pa
        from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, RESTError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (
            *(RESTError, SQLAlchemyError, CommitFailedException, NoSuchTableError),
            *(OSError, pa.ArrowException),
        ) as error:
            first = str(error).strip().partition("\n")[0]
            raise StorageError(
                f"the Iceberg table or its catalog cannot be reached catalog=`{self}`: "
                f"{_hidden(first, known) or type(error).__name__}",
                fix="check the address, the credentials and the rights",
            ) from None


def with_whole_paths(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of a catalog with local paths that all processes of a job understand."""
    found = dict(properties)
    uri, warehouse = found.get("uri"), found.get("warehouse")
    if isinstance(uri, str) and (match := _SQLITE.fullmatch(uri)):
        found["uri"] = f"sqlite:///{os.path.abspath(match[1])}"
        if isinstance(warehouse, str) and "://" not in warehouse:
            found["warehouse"] = Path(warehouse).absolute().as_uri()
    return found


def load_table(catalog: Catalog, name: str) -> Table | None:
    """Return the newest version of a table; None: there is no table."""
    from pyiceberg.exceptions import NoSuchTableError

    try:
        return catalog.load_table(name)
    except NoSuchTableError:
        return None


def _without_secrets(address: str) -> str:
    parts = urlsplit(address)
    if "@" not in parts.netloc and not parts.query:
        return address
    # Drivers of databases take user and password as parameters as well.
    query = "***" if parts.query else ""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query).geturl()


def _hidden(text: str, properties: Mapping[str, str]) -> str:
    """Return the text of an error without the secrets among these properties."""
    secrets = [value for key, value in properties.items() if _SECRET.search(key)]
    secrets += [urlsplit(value).password or "" for value in properties.values() if "@" in value]
    for value in properties.values():
        secrets += [given for key, given in parse_qsl(urlsplit(value).query) if _SECRET.search(key)]
    secrets += [unquote(value) for value in secrets]
    secrets += [part for value in secrets for part in value.split(":")]
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _s3_properties(options: Mapping[str, str]) -> dict[str, str]:
    """Return the `s3.*` options as the names that the library of Iceberg knows."""
    service = without_role(options, "Iceberg tables")
    found = {
        "s3.force-virtual-addressing": str(not service.path_style).lower(),
        "s3.connect-timeout": str(service.connect_timeout_ms / 1000),
        "s3.request-timeout": str(service.timeout_ms / 1000),
    }
    if service.endpoint:
        found["s3.endpoint"] = service.endpoint
    if service.region or service.endpoint:
        found["s3.region"] = service.region or "us-east-1"
    return found
