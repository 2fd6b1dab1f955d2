"""The metadata of a savepoint: one JSON object, written last, by which the savepoint exists.

Names of files in it are relative to the savepoint's directory, so that the directory can be copied
anywhere. Unknown fields are ignored on reading, so that a newer minor version may add some.
"""

from __future__ import annotations

from importlib.metadata import version

import msgspec

from ...errors import StateError
from ..protocol.manifest import Manifest

FORMAT_VERSION = 1


class Savepoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a savepoint says of itself."""

    format_version: int = FORMAT_VERSION
    job: str
    created_ms: int
    headgate: str
    """The version of headgate that wrote it."""
    native: bool = False
    """True if its files are those of the state backend; else all state is in tables and items."""
    manifest: Manifest


def savepoint_of(manifest: Manifest, job: str, *, native: bool) -> Savepoint:
    """The savepoint of `job` that consists of `manifest`."""
    return Savepoint(
        job=job,
        created_ms=manifest.completed_ms,
        headgate=version("headgate"),
        native=native,
        manifest=manifest,
    )


def encode(savepoint: Savepoint) -> bytes:
    """As JSON; equal savepoints give equal bytes."""
    return msgspec.json.encode(savepoint)


def decode(data: bytes, where: str) -> Savepoint:
    """Read the metadata of a savepoint; `where` is its address, for errors.

    Raises:
        StateError: it cannot be read, or is of a newer format.
    """
    try:
        savepoint = msgspec.json.decode(data, type=Savepoint)
    except msgspec.MsgspecError as error:
        raise StateError(
            f"the metadata of the savepoint cannot be read cause=`{error}`",
            where=where,
            fix="was it changed by hand, or copied in part? take another savepoint",
        ) from error
    if savepoint.format_version > FORMAT_VERSION:
        raise StateError(
            f"the savepoint is of a newer format format=`{savepoint.format_version}` "
            f"known=`{FORMAT_VERSION}` written_by=`headgate {savepoint.headgate}`",
            where=where,
            fix="use that version of headgate, or a newer one",
        )
    return savepoint
