"""Sealed records, whose bytes can be verified: JSON objects with a format version and a checksum in front.

    {"format":2,"checksum":"9d0c…","entry":"JobEnded",…}

The checksum is xxh3-64, in hex, over all other bytes of the object, so any change of a stored record is
found, whatever the changed bytes would mean. Records of format 1 had neither field. They are still read,
but only if they have no field that format 1 did not know: a record of a later format whose head is
damaged keeps at least one of the two fields, or a garbled form of it, and is therefore never taken for an
old one.

A large record of a kind that grows with the job is compressed: behind the head come the size of its other
fields and a line break, and then these fields as JSON, compressed by zstd.

    {"format":6,"checksum":"9d0c…","zstd":13081635}
    …
"""

from __future__ import annotations

import re
from typing import Any, Final, Generic, TypeVar, final

import msgspec
import pyarrow as pa
import xxhash

from ..errors import CorruptError, StateError

FORMAT_VERSION: Final = 8
"""Raise it whenever the fields of a sealed record change, and keep reading the older formats.

Format 3 added the history of runs: `RunHistory` in the entries of the job log. Format 4 added the output
of earlier runs that a run replaces: `OutputListed` and `OldOutput`. Format 5 added the address of a
leader's REST API: `Leader.rest`. Format 6 added compressed records. Format 7 added
segments: a handle of state may name a piece of an object. Format 8 added packs: a handle of in-flight
records may have those of many channels.
"""
_FIRST_SEALED: Final = 2
_HEAD: Final = re.compile(rb'\{"format":(\d{1,9}),"checksum":"([0-9a-f]{16})",')
_CHECKSUM_CHARACTERS: Final = 16
_COMPRESSED: Final = re.compile(rb'"zstd":(\d{1,10})\}\n')
_FIRST_COMPRESSED: Final = 6
COMPRESS_FROM: Final = 65_536
"""Records of fewer bytes stay as they are, so that people can read them."""
T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of everything in a sealed record. Fields that the format does not have are refused."""


@final
class SealedFormat(Generic[T]):
    """Encodes and decodes one kind of sealed record."""

    def __init__(self, what: str, type_: Any, *, compressed: bool = False) -> None:
        """
        Args:
            what: names the record in errors.
            type_: a `Record`, or a union of tagged ones.
            compressed: large records are compressed.
        """
        self._what = what
        self._compressed = compressed
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(type_)

    def encode(self, value: T) -> bytes:
        """Return the sealed record. Equal records give equal bytes."""
        body = msgspec.json.encode(value)
        head = f'{{"format":{FORMAT_VERSION},"checksum":"'.encode()
        rest = b'",' + body[1:]
        if self._compressed and len(body) >= COMPRESS_FROM:
            fields = pa.compress(body[1:], codec="zstd", asbytes=True)
            rest = f'","zstd":{len(body) - 1}}}\n'.encode() + fields
        return b"".join((head, _checksum(head, rest).encode(), rest))

    def decode(self, data: bytes, name: str, where: str = "") -> T:
        """Read a record.

        Args:
            data: the bytes of the record.
            name: the name of the object that holds them, for errors.
            where: the place of that object, for errors.

        Raises:
            CorruptError: the bytes have changed since they were written.
            StateError: a newer version of headgate wrote them.
        """
        try:
            return self._decode(data, name)
        except StateError as error:
            error.where = where
            raise

    def _decode(self, data: bytes, name: str) -> T:
        head = _HEAD.match(data)
        if head is None:
            return self._decode_first_format(data, name)
        version = int(head[1])
        if version > FORMAT_VERSION:
            raise self._newer(version, name)
        start = head.start(2)
        expected = _checksum(data[:start], data[start + _CHECKSUM_CHARACTERS :])
        if expected != head[2].decode():
            raise self._corrupt(
                name, f"its checksum is {head[2].decode()}, its bytes give {expected}"
            )
        if version < _FIRST_SEALED:
            raise self._corrupt(name, f"format {version} has no checksum")
        body = b"{" + self._fields(data, head.end(), name, version)
        try:
            value = self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise self._misfit(name, version, str(error)) from error
        # Records of older formats lack the fields that were added later, which have their defaults.
        if version == FORMAT_VERSION and msgspec.json.encode(value) != body:
            missing = _first_missing(msgspec.json.decode(body), msgspec.to_builtins(value))
            cause = f"the field `{missing}` is missing" if missing else "they are in another order"
            raise self._misfit(name, version, cause)
        return value

    def _fields(self, data: bytes, begin: int, name: str, version: int) -> bytes:
        """Return the fields that begin at `begin`, as JSON."""
        compressed = _COMPRESSED.match(data, begin)
        if compressed is None or version < _FIRST_COMPRESSED:
            return data[begin:]
        try:
            fields = memoryview(data)[compressed.end() :]
            size = int(compressed[1])
            return bytes(pa.decompress(fields, size, codec="zstd", asbytes=True))
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise self._misfit(name, version, str(error)) from error

    def _decode_first_format(self, data: bytes, name: str) -> T:
        """Decode a record of format 1, which has no checksum: only its fields can be checked."""
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._corrupt(name, f"as a record of format 1: {error}") from error

    def _corrupt(self, name: str, cause: str) -> CorruptError:
        return CorruptError(
            f"a {self._what} is damaged name=`{name}` cause=`{cause}`",
            fix="bring the object back from a copy; if there is none, start from a savepoint (--from), or "
            "start the job without state (--fresh) under a new name or in another storage",
        )

    def _misfit(self, name: str, version: int, cause: str) -> CorruptError:
        return CorruptError(
            f"a {self._what} does not have the fields of format {version} name=`{name}` cause=`{cause}`",
            fix="its checksum is right, so a program that is not headgate, or an unreleased version of it, "
            "wrote it: use that version",
        )

    def _newer(self, version: int, name: str) -> StateError:
        return StateError(
            f"a {self._what} is of a newer format, or damaged name=`{name}` format=`{version}` "
            f"known=`{FORMAT_VERSION}`",
            fix="use the version of headgate that wrote it, or a newer one",
        )


def _checksum(before: bytes, behind: bytes) -> str:
    digest = xxhash.xxh3_64(before)
    digest.update(behind)
    return digest.hexdigest()


def _first_missing(found: Any, expected: Any, path: str = "") -> str:
    """Return the path of a field that `expected` has and `found` lacks; empty if there is none."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key, value in expected.items():
            below = f"{path}.{key}" if path else str(key)
            if key not in found:
                return below
            if missing := _first_missing(found[key], value, below):
                return missing
    elif isinstance(expected, list | tuple) and isinstance(found, list):
        for index, (one, other) in enumerate(zip(found, expected, strict=False)):
            if missing := _first_missing(one, other, f"{path}[{index}]"):
                return missing
    return ""
