"""Savepoints in their directories: published, read, deleted.

The metadata of a savepoint is one sealed JSON object, written last, which completes the savepoint. Names
of files in it are relative to the savepoint's directory, so that the directory can be copied anywhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from ...errors import StateError, StorageError
from ...state.sealed import FORMAT_VERSION, Record, SealedFormat
from ..protocol import names
from ..protocol.checkpoints.manifest import Manifest
from ..protocol.names import SAVEPOINT_METADATA
from ..storage.base import AddressOpener, CheckpointStore, Existed

UNFINISHED = "the savepoint is unfinished: it is being taken, or its writer died"


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
    from importlib.metadata import version  # loads a parser of e-mail, and few jobs get here soon

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


@asynccontextmanager
async def opened(
    open_at: AddressOpener, address: str, options: Mapping[str, str], *, writable: bool = True
) -> AsyncIterator[CheckpointStore]:
    """Yield the store at `address`, open within the block."""
    store = open_at(address, options)
    try:
        await store.open(writable=writable)
        yield store
    finally:
        await store.close()


async def publish(store: CheckpointStore, savepoint: Savepoint) -> None:
    """Publish the savepoint: all its files must exist already.

    Raises:
        StorageError: it could not be written, or another savepoint exists.
    """
    data = encode(savepoint)
    result = await store.create_if_absent(names.SAVEPOINT_METADATA, data)
    if isinstance(result, Existed) and result.data != data:
        raise StorageError("there is another savepoint already", where=store.describe())


async def read(store: CheckpointStore) -> Savepoint | None:
    """Return the savepoint in this directory; None if there is none."""
    data = await store.read(names.SAVEPOINT_METADATA)
    return None if data is None else decode(data, store.describe())


async def delete(store: CheckpointStore, files: Sequence[str]) -> None:
    """Delete a savepoint, complete or not: its metadata first, so that it never lacks files."""
    await store.delete(names.SAVEPOINT_METADATA)
    await store.delete_files(files)


async def unfinished_files(store: CheckpointStore, address: str) -> list[str] | None:
    """Return the files of a savepoint without metadata at `address`; None if it is something else.

    An interrupted savepoint still has its generated name, and contains nothing but files of
    savepoints.
    """
    if not names.is_savepoint_dir(address.rstrip("/").rpartition("/")[2]):
        return None
    found = [name async for name, _ in store.list_files("")]
    return found if all(map(names.is_savepoint_file, found)) else None


async def dispose(
    open_at: AddressOpener, address: str, options: Mapping[str, str], *, unfinished: bool = False
) -> Savepoint | None:
    """Delete the savepoint at `address` and all its files; return it, or None if it was unfinished.

    Args:
        open_at: opens the store there.
        address: of the savepoint.
        options: of the store.
        unfinished: it may lack its metadata; the caller knows that it is not being written.

    Raises:
        StateError: there is no savepoint, or an unfinished one without `unfinished`.
    """
    async with opened(open_at, address, options, writable=False) as store:
        savepoint = await read(store)
        if savepoint is not None:
            await delete(store, sorted(savepoint.manifest.files()))
            return savepoint
        files = await unfinished_files(store, address)
        if files is None:
            raise StateError(
                "there is no savepoint",
                where=store.describe(),
                fix=f"give the directory that holds `{names.SAVEPOINT_METADATA}`",
            )
        if not unfinished:
            raise StateError(
                UNFINISHED,
                where=store.describe(),
                fix="if no job is writing it: headgate savepoint dispose --unfinished PATH",
            )
        await store.delete_incomplete("")
        await store.delete_files(files)
        return None
