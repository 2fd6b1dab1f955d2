"""Files of the records that a service has refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pyarrow as pa

from ...errors import StorageError
from ..files.locations import filesystem, parse_location


class Refused(msgspec.Struct, frozen=True):
    """A line of such a file."""

    sink: str
    url: str
    status: int
    reason: str
    record: msgspec.Raw


def write_refused(
    address: str, options: Mapping[str, str], name: str, letters: list[Refused]
) -> None:
    """Write a file of refused records, durably; in a thread. A file of the same name is replaced.

    Args:
        address: a directory, or a prefix on S3.
        options: of the storage.
        name: of the file.
        letters: its lines.

    Raises:
        StorageError: it cannot be written.
    """
    data = b"".join(msgspec.json.encode(letter) + b"\n" for letter in letters)
    location = parse_location(address)
    try:
        if location.scheme == "file":
            _write_local(Path(location.path), name, data)
        else:
            store = filesystem(location.scheme, options)
            with store.open_output_stream(f"{location.path}/{name}") as stream:
                stream.write(data)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(
            f"refused records cannot be written dead_letters=`{address}`: {error}",
            fix="check the address, and the right to write there",
        ) from error


def _write_local(directory: Path, name: str, data: bytes) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f".{name}"
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(directory / name)
    folder = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
