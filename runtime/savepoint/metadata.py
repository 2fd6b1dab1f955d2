"""The metadata of a savepoint: one sealed JSON object, written last, which completes the savepoint.

Names of files in it are relative to the savepoint's directory, so that the directory can be copied
anywhere.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from ...errors import StateError
from ...state.sealed import FORMAT_VERSION, Record, SealedFormat
from ..protocol.checkpoints.manifest import Manifest
from ..protocol.names import SAVEPOINT_METADATA


class Savepoint(Record, frozen=True, kw_only=True):
    """The metadata of a savepoint."""

    format_version: int = FORMAT_VERSION
    job: str
    created_ms: int
    headgate: str
    """The version of headgate that wrote it."""
    native: bool = False
    """True if its files are those of the state backend; otherwise all state is in tables and items.
    """
    manifest: Manifest


_FORMAT: Final = SealedFormat[Savepoint]("savepoint's metadata", Savepoint)


def savepoint_of(manifest: Manifest, job: str, *, native: bool) -> Savepoint:
    """Return the savepoint of `job` with the state of `manifest`."""
    return Savepoint(
        job=job,
        created_ms=manifest.completed_ms,
        headgate=version("headgate"),
        native=native,
        manifest=manifest,
    )


def encode(savepoint: Savepoint) -> bytes:
    """Encode as sealed JSON; equal savepoints give equal bytes."""
    return _FORMAT.encode(savepoint)


def decode(data: bytes, where: str) -> Savepoint:
    """Read the metadata of a savepoint; `where` is the address of its directory, for errors.

    Raises:
        CorruptError: the bytes are not those that were written.
        StateError: it is of a newer format.
    """
    savepoint = _FORMAT.decode(data, SAVEPOINT_METADATA, where)
    if savepoint.format_version > FORMAT_VERSION:
        raise StateError(
            f"the savepoint is of a newer format format=`{savepoint.format_version}` "
            f"known=`{FORMAT_VERSION}` written_by=`headgate {savepoint.headgate}`",
            where=where,
            fix="use that version of headgate, or a newer one",
        )
    return savepoint
