"""The task that is given to the process of Spark, and its answers: one JSON object per line."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
import xxhash

from ...errors import UsageError
from ...operators.functions.pickling import dump_function

# --- the query -------------------------------------------------------------------------------------


LOCAL: Final = "local[*]"
_HERE: Final = re.compile(r"local(\[.*\])?|(spark|sc)://(localhost|127\.0\.0\.1|\[::1\])([:/;].*)?")
_MASTERS: Final = ("spark://", "k8s://", "sc://")


class SparkPlan(msgspec.Struct, frozen=True):
    """A query as it is handed to the process of Spark. Exactly one of sql, table, path and function is
    set.
    """

    sql: str = ""
    table: str = ""
    path: str = ""
    format: str = ""
    options: dict[str, str] = {}
    function: bytes = b""
    """A pickled function of the session that returns a DataFrame."""
    master: str = LOCAL
    conf: dict[str, str] = {}

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that are equal for equal plans."""
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self, order="deterministic"))


@dataclass(frozen=True)
class SparkQuery:
    """A `SparkPlan` whose function, if it has one, is still a function.

    On the way to other processes the function is pickled separately: workers carry it as bytes and never
    load it, nor its imports.
    """

    plan: SparkPlan
    function: Callable[[Any], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"plan": self.shipped(), "function": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def shipped(self) -> SparkPlan:
        """Return the plan with the function in it."""
        if self.function is None:
            return self.plan
        return msgspec.structs.replace(self.plan, function=dump_function(self.function))

    def describe(self) -> str:
        """Return a short text for `explain`."""
        plan = self.plan
        if plan.sql:
            return " ".join(plan.sql.split())
        if plan.table:
            return f"table {plan.table}"
        if plan.path or plan.format:
            return f"{plan.format or 'files'} {plan.path}".rstrip()
        return str(getattr(self.function, "__name__", "function"))

    @property
    def runs_here(self) -> bool:
        """True if Spark sees the files of the machine on which it is started."""
        return _HERE.fullmatch(self.plan.master) is not None


def make_query(
    *,
    sql: str | None,
    table: str | None,
    path: str | None,
    format: str | None,
    options: Mapping[str, Any] | None,
    query: Callable[[Any], Any] | None,
    master: str,
    conf: Mapping[str, Any] | None,
) -> SparkQuery:
    """Return the query that arguments of `spark_source` describe.

    Raises:
        UsageError: the arguments describe no query, or more than one.
    """
    # Databases and similar systems are a format without a path.
    read = path if path is not None else (format or None)
    given = {"sql": sql, "table": table, "path or format": read, "query": query}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise UsageError(
            f"a Spark source needs exactly one query given=`{', '.join(named) or 'none'}`",
            fix="give one of sql=, table=, path= (or format=), and query=function(spark)",
        )
    for name, text in (("sql", sql), ("table", table), ("path", path), ("format", format)):
        if text is not None and not text.strip():
            raise UsageError(f"must not be empty {name}=`{text}`")
    if options and read is None:
        raise UsageError("options= are those of a format: they need path= or format=")
    if query is not None and not callable(query):
        raise UsageError(f"not a function query=`{query!r}`", fix="give query=function(spark)")
    _check_master(master)
    plan = SparkPlan(
        sql=sql or "",
        table=table or "",
        path=path or "",
        format=format or "",
        options=_texts(options),
        master=master,
        conf=_texts(conf),
    )
    return SparkQuery(plan, query)


def _check_master(master: str) -> None:
    local = re.fullmatch(r"local(\[.+\])?", master)
    if not local and master != "yarn" and not master.startswith(_MASTERS):
        raise UsageError(
            f"not a place where Spark runs master=`{master}`",
            fix="write local[*], local[4], spark://host:port, k8s://address, yarn or sc://host:port",
        )


def _texts(values: Mapping[str, Any] | None) -> dict[str, str]:
    """Return settings in Spark's form: truth values in lower case."""
    return {
        str(key): str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in (values or {}).items()
    }


# --- messages --------------------------------------------------------------------------------------


SIZE: Final = struct.Struct(">Q")
"""The size of the task in bytes, which is sent before it."""


class Task(msgspec.Struct, frozen=True):
    """A task: to analyse a query, and perhaps to write its result.

    Attributes:
        name: the name of the application, as Spark shows it.
        declared: the declared schema, serialised by Arrow; None: that of the query.
        target: the directory for the result, as Spark names it; empty: only analyse.
        scratch: a local directory for Spark's temporary files.
    """

    plan: SparkPlan
    name: str
    declared: bytes | None = None
    target: str = ""
    scratch: str = ""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Spark's progress as text."""

    text: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The task is done; `schema` is that of the query, in Spark's JSON form."""

    schema: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The task failed.

    Attributes:
        usage: True if the query is wrong as written, so another attempt would fail too.
        detail: the full error of Spark or Python.
    """

    message: str
    fix: str = ""
    detail: str = ""
    usage: bool = False


Message: TypeAlias = Progress | Done | Failed
