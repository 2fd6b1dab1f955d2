"""What the process of Spark is given, and what it says: one JSON object on a line each."""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

import msgspec

from .query import SparkPlan

SIZE: Final = struct.Struct(">Q")
"""In front of the task: its size in bytes."""


class Task(msgspec.Struct, frozen=True):
    """Analyse a query, and perhaps write down its result.

    Attributes:
        name: the application's, as Spark shows it.
        declared: the schema to be read as, serialised by Arrow; None: whatever the query has.
        target: the directory for the result, as Spark names it; empty: only analyse.
        scratch: a local directory for what Spark needs meanwhile.
    """

    plan: SparkPlan
    name: str
    declared: bytes | None = None
    target: str = ""
    scratch: str = ""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far Spark is, in words."""

    text: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The task is done; `schema` is that of the query, in Spark's JSON form."""

    schema: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The task failed.

    Attributes:
        usage: the query is wrong as written, so another try would fail, too.
        detail: what Spark or Python said, in full.
    """

    message: str
    fix: str = ""
    detail: str = ""
    usage: bool = False


Message: TypeAlias = Progress | Done | Failed
