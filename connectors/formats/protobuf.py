"""Protobuf as a format of messages."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ...errors import UsageError
from ...operators.extras import check_extra
from ..files.decode import Decoded, Unreadable, decode
from .cursors import encode_varints, unzigzag, zigzag
from .format import Decode, Encode, Format, Values, check_not_empty, with_tombstones
from .protobuf_columns import check_columns, fill_messages, make_batch
from .protobuf_schema import (
    Unfit,
    columns_of,
    file_of,
    find_message,
    indexes_in,
    load_files,
    name_at,
)
from .schema_registry import (
    HEADER_BYTES,
    DecodeBehind,
    Registered,
    RegistryClient,
    RegistryError,
    SchemaCache,
    SchemaRegistry,
    UnknownSchema,
    decode_by_id,
    decode_in_groups,
    header_of,
    newest,
    written_id,
)

_INDEXES_MAX: Final = 32
"""Messages are nested in each other at most this deep in a header."""


class ProtobufFormat(Format):
    """Messages of Protobuf, of one type; or of several, if those of a registry tell it."""

    name = "protobuf"
    columns_apart = True
    extras = ("protobuf",)

    def __init__(
        self, message: str | None, descriptor: bytes | None, registry: SchemaRegistry | None
    ) -> None:
        self._message = message
        self._descriptor = descriptor
        self._registry = registry

    def _found(self) -> Any:
        """Return the descriptor of the message; None: the registry has it."""
        if self._descriptor is None:
            return None
        return find_message(load_files(self._descriptor), self._message or "")

    def columns(self) -> pa.Schema:
        found = self._found()
        return super().columns() if found is None else columns_of(found)

    def check_connection(self) -> None:
        if self._registry is not None:
            RegistryClient(self._registry).check()

    def check_columns(self, schema: pa.Schema) -> None:
        found = self._found()
        if found is not None:
            _fit(lambda: check_columns(found, schema))

    def decoder(self, schema: pa.Schema) -> Decode:
        found = self._found()
        if self._registry is None:
            read = _reader(found, schema)
            return lambda payloads: with_tombstones(payloads, lambda given: read(given, 0))
        client = RegistryClient(self._registry)

        def make(registered: Registered) -> DecodeBehind:
            return _by_index(client, registered, found, self._message, schema)

        cache = SchemaCache(client, make, self._registry.cached)
        return lambda payloads: with_tombstones(
            payloads, lambda messages: decode_by_id(messages, cache)
        )

    def check_output(self, schema: pa.Schema) -> None:
        check_not_empty(schema)
        found = self._found()
        if found is None:
            raise UsageError(
                "a sink needs the descriptor of its message",
                fix='protobuf_format("shop.Order", descriptor="order.pb")',
            )
        _fit(lambda: check_columns(found, schema))

    def encoder(self, schema: pa.Schema, topic: str) -> Encode:
        from google.protobuf.message_factory import GetMessageClass

        found = self._found()
        make = GetMessageClass(found)
        header = self._header(found, topic)

        def encode(batch: pa.RecordBatch) -> Values:
            messages = [make() for _ in range(batch.num_rows)]
            fill_messages(messages, batch, found)
            return [header + each.SerializeToString(deterministic=True) for each in messages]

        return encode

    def _header(self, found: Any, topic: str) -> bytes:
        """Return what stands in front of messages: the id of the schema, and the indexes of the message."""
        if self._registry is None:
            return b""
        if self._registry.auto_register:
            text = _registered_text(found)
            id = written_id(self._registry, topic, "PROTOBUF", text)
        else:
            registered = newest(self._registry, topic)
            id, text = registered.id, registered.text
            if registered.kind != "PROTOBUF":
                raise UsageError(
                    f"the newest schema of the topic is not of Protobuf topic=`{topic}`",
                    fix="register one",
                )
        indexes = indexes_in(text, found.full_name)
        if indexes is None:
            raise RegistryError(
                f"the newest schema of the topic has no such message topic=`{topic}` "
                f"message=`{found.full_name}`",
                fix="register one that has it",
            )
        return header_of(id) + encode_indexes(indexes)


def _fit(check: Callable[[], None]) -> None:
    try:
        check()
    except Unfit as error:
        raise UsageError(
            f"the columns do not fit the message: {error}",
            fix="change the column; docs/formats.md has the table of types",
        ) from None


def _registered_text(found: Any) -> str:
    """Return the file of a message in the form in which a registry takes it."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto()
    found.file.CopyToProto(file)
    imported = [each for each in file.dependency if not each.startswith("google/protobuf/")]
    if imported:
        raise UsageError(
            f"a file that imports others cannot be registered by a sink imports=`{', '.join(imported)}`",
            fix="register it with the tools of the registry, and leave auto_register out",
        )
    return base64.b64encode(file.SerializeToString(deterministic=True)).decode()


def _reader(descriptor: Any, schema: pa.Schema) -> Callable[[Sequence[bytes], int], Decoded]:
    """Return a function that decodes messages behind a header of this number of bytes."""
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessageClass

    parse = GetMessageClass(descriptor).FromString

    def read(messages: Sequence[bytes], skipped: int) -> Decoded:
        def convert(start: int, stop: int) -> pa.RecordBatch:
            part = messages[start:stop]
            try:
                parsed = [parse(each[skipped:] if skipped else each) for each in part]
            except DecodeError:
                raise Unreadable(f"it is no message `{descriptor.full_name}` of Protobuf") from None
            return make_batch(parsed, descriptor, schema)

        return decode(len(messages), convert)

    return read


# -- messages of a registry -------------------------------------------------------------------------


def _by_index(
    client: RegistryClient,
    registered: Registered,
    found: Any,
    message: str | None,
    schema: pa.Schema,
) -> DecodeBehind:
    """Return the decoder of messages of one registered schema, each of the message that it names.

    Args:
        client: asks for the compiled form of a schema.
        registered: the schema.
        found: the descriptor of the user; None: that of the registry counts.
        message: the full name of the message that is wanted; None: any.
        schema: the columns.
    """
    if registered.kind != "PROTOBUF":
        raise ValueError(f"it is of type {registered.kind}, not of Protobuf")
    if found is None and file_of(registered.text) is None:
        # The registry of Confluent has texts, and compiles them on request.
        try:
            registered = client.schema(registered.id, "?format=serialized")
        except UnknownSchema:
            raise ValueError("the registry has it as a text only: give descriptor=") from None
    readers: dict[tuple[int, ...], Callable[[Sequence[bytes], int], Decoded] | str] = {}

    def reader_of(indexes: tuple[int, ...]) -> Callable[[Sequence[bytes], int], Decoded] | str:
        name = name_at(registered.text, indexes)
        if name is None or (message is not None and name != message):
            return f"it is a message `{name or indexes}`, not `{message}`"
        try:
            descriptor = found if found is not None else _compiled(registered, name)
            check_columns(descriptor, schema)
        except (Unfit, UsageError) as error:
            return f"schema {registered.id} of the registry: {str(error).splitlines()[0]}"
        return _reader(descriptor, schema)

    def decoder_of(key: tuple[tuple[int, ...], int] | str, index: int) -> DecodeBehind | str:
        if isinstance(key, str):
            return key
        indexes, skipped = key
        if indexes not in readers:
            if len(readers) >= _INDEXES_MAX:
                readers.clear()
            readers[indexes] = reader_of(indexes)
        read = readers[indexes]
        return read if isinstance(read, str) else lambda messages: read(messages, skipped)

    return lambda messages: decode_in_groups(
        messages, [read_indexes(each) for each in messages], decoder_of
    )


def _compiled(registered: Registered, name: str) -> Any:
    """Return the descriptor of a message of a registered schema."""
    files = []
    for path, text in (*registered.references, ("", registered.text)):
        file = file_of(text)
        if file is None:
            raise UsageError("the registry has it as a text only: give descriptor=", fix="")
        file.name = path or file.name or "schema.proto"
        files.append(file)
    return find_message(files, name)


def read_indexes(message: bytes) -> tuple[tuple[int, ...], int] | str:
    """Return the indexes in the header of a message and the size of the header, or what is wrong."""
    if message[HEADER_BYTES : HEADER_BYTES + 1] == b"\0":
        return (0,), HEADER_BYTES + 1
    numbers: list[int] = []
    value = shift = 0
    for at in range(HEADER_BYTES, min(len(message), HEADER_BYTES + 5 * _INDEXES_MAX)):
        value |= (message[at] & 0x7F) << shift
        shift += 7
        if message[at] < 0x80:
            numbers.append(int(unzigzag(np.array([value & (2**64 - 1)], np.uint64))[0]))
            value = shift = 0
            if numbers[0] < 1 or numbers[0] > _INDEXES_MAX:
                break
            if len(numbers) > numbers[0]:
                return tuple(numbers[1:]), at + 1
        elif shift > 28:
            break
    return "its header does not name a message"


def encode_indexes(indexes: Sequence[int]) -> bytes:
    """Return indexes in the form that `read_indexes` reads."""
    if list(indexes) == [0]:
        return b"\0"
    numbers = zigzag(np.array([len(indexes), *indexes]))
    return b"".join(encode_varints(numbers).to_pylist())


# -- the user's form --------------------------------------------------------------------------------


def protobuf_format(
    message: str | type[Any] | None = None,
    *,
    descriptor: bytes | str | PathLike[str] | None = None,
    registry: SchemaRegistry | None = None,
) -> Format:
    """Return the format Protobuf, for `kafka_source` and `kafka_sink`. It needs `headgate[protobuf]`.

    Args:
        message: the full name of the message, such as `shop.Order`, or a generated class, which brings its
            descriptor. With a registry it may be left out: then all messages are read that have the
            columns.
        descriptor: a FileDescriptorSet, or the path of a file with one, as `protoc --include_imports
            --descriptor_set_out` writes it. A source with a registry can take the registry's.
        registry: of the schemas of messages, as `schema_registry` returns it.

    Raises:
        UsageError: there is no such message, or the descriptor cannot be read.
    """
    check_extra("protobuf", "the format protobuf")
    name = message if isinstance(message, str) else None
    if message is not None and not isinstance(message, str):
        if descriptor is not None or not hasattr(message, "DESCRIPTOR"):
            raise UsageError(
                f"the message is neither a name nor a generated class message=`{message!r}`",
                fix='protobuf_format("shop.Order", descriptor="order.pb")',
            )
        name, descriptor = str(message.DESCRIPTOR.full_name), _descriptor_of(message)
    elif descriptor is not None and not isinstance(descriptor, bytes):
        try:
            descriptor = Path(descriptor).read_bytes()
        except OSError as error:
            raise UsageError(
                f"the descriptor cannot be read: {error}",
                fix="protoc --descriptor_set_out=order.pb",
            ) from None
    if descriptor is None and registry is None:
        raise UsageError(
            "messages of Protobuf are read by their descriptor", fix='descriptor="order.pb"'
        )
    if descriptor is not None:
        if name is None:
            raise UsageError("which message of the descriptor is it?", fix='message="shop.Order"')
        find_message(load_files(descriptor), name)
    return ProtobufFormat(name, descriptor, registry)


def _descriptor_of(generated: Any) -> bytes:
    """Return the file of a generated class, and all that it imports."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    found: dict[str, Any] = {}

    def collect(file: Any) -> None:
        if file.name in found:
            return
        found[file.name] = made = FileDescriptorProto()
        file.CopyToProto(made)
        for each in file.dependencies:
            collect(each)

    collect(generated.DESCRIPTOR.file)
    return bytes(FileDescriptorSet(file=found.values()).SerializeToString(deterministic=True))
