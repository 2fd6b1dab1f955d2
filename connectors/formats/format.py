"""The contract of formats of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final, TypeAlias

import pyarrow as pa

from ...errors import PlanError, SourceError, UsageError
from ..files.decode import Decoded

NO_VALUE: Final = "it has no value (a tombstone)"
Values: TypeAlias = Sequence[bytes | None]
Decode: TypeAlias = Callable[[Values], Decoded]
"""Decodes payloads: the good rows in order, and the places and reasons of the others."""
Encode: TypeAlias = Callable[[pa.RecordBatch], Values]
"""Encodes rows: a payload each."""


class Format:
    """A format of messages; picklable.

    Attributes:
        name: what users call it.
        columns_apart: True if columns can be left out when only some of them are needed.
        reads_lines: True if values without line breaks are decoded as lines of one text.
        extras: extras of headgate's installation that it needs.
    """

    name: ClassVar[str]
    columns_apart: ClassVar[bool] = False
    reads_lines: ClassVar[bool] = False
    extras: tuple[str, ...] = ()

    def columns(self) -> pa.Schema:
        """Return the columns of messages, for a source that declares none.

        Raises:
            UsageError: they do not follow from the format.
        """
        raise UsageError(
            f"{self.name} values carry no types: the source needs a schema",
            fix='give schema=..., such as {"id": "int64", "name": "string"} or a Struct class',
        )

    def check_connection(self) -> None:
        """Check that a service that the format needs answers; may block.

        Raises:
            HeadgateError: it does not, or refuses us.
        """

    def check_columns(self, schema: pa.Schema) -> None:
        """Check that messages of this format can have these columns.

        Raises:
            UsageError: they cannot.
        """

    def decoder(self, schema: pa.Schema) -> Decode:
        """Return a decoder for columns that `check_columns` has accepted. It is called in one thread."""
        raise NotImplementedError

    def check_output(self, schema: pa.Schema) -> None:
        """Check that columns can be written in this format.

        Raises:
            UsageError: they cannot.
        """
        raise UsageError(f"{self.name} cannot be written", fix='format="json"')

    def encoder(self, schema: pa.Schema, topic: str) -> Encode:
        """Return an encoder for columns that `check_output` has accepted; this may block.

        Raises:
            JobError: a service that the format needs refuses it, or does not answer.
        """
        raise NotImplementedError


class UndecodableError(SourceError):
    """Messages cannot be decoded for a reason that lies outside of them.

    Attributes:
        index: the place of the first one among those that were to be decoded.
    """

    def __init__(self, message: str, index: int, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.index = index


@contextmanager
def planning() -> Iterator[None]:
    """Raise a UsageError of the block as a PlanError: a sink of the job cannot write its stream."""
    try:
        yield
    except UsageError as error:
        raise PlanError(error.message, fix=error.fix) from error


def check_not_empty(schema: pa.Schema) -> None:
    """Check that a message has columns.

    Raises:
        UsageError: it has none.
    """
    if not schema.names:
        raise UsageError("no column is left for the value", fix="select another one")


def with_tombstones(payloads: Values, decode: Callable[[Sequence[bytes]], Decoded]) -> Decoded:
    """Decode payloads, of which those without a value are bad records."""
    there = [index for index, payload in enumerate(payloads) if payload is not None]
    if len(there) == len(payloads):
        return decode([payload for payload in payloads if payload is not None])
    decoded = decode([payload for payload in payloads if payload is not None])
    missing = [(index, NO_VALUE) for index, payload in enumerate(payloads) if payload is None]
    bad = sorted([*((there[index], reason) for index, reason in decoded.bad), *missing])
    return Decoded(decoded.batches, bad)
