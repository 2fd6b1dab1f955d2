"""Schemas of Protobuf: loaded from descriptors, found by the indexes of messages, compared with columns."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from ...errors import UsageError
from ...operators.suggestions import suggest

_PLAIN: Final = {
    "bool": pa.bool_(),
    "int32": pa.int32(),
    "sint32": pa.int32(),
    "sfixed32": pa.int32(),
    "int64": pa.int64(),
    "sint64": pa.int64(),
    "sfixed64": pa.int64(),
    "uint32": pa.uint32(),
    "fixed32": pa.uint32(),
    "uint64": pa.uint64(),
    "fixed64": pa.uint64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "enum": pa.string(),
}
_KINDS: Final = {
    1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 6: "fixed64", 7: "fixed32",
    8: "bool", 9: "string", 10: "message", 11: "message", 12: "bytes", 13: "uint32", 14: "enum",
    15: "sfixed32", 16: "sfixed64", 17: "sint32", 18: "sint64",
}  # fmt: skip
"""The types that the numbers in descriptors stand for."""
TIMESTAMP: Final = "google.protobuf.Timestamp"
DURATION: Final = "google.protobuf.Duration"
_WRAPPERS: Final = re.compile(
    r"google\.protobuf\.(Double|Float|U?Int64|U?Int32|Bool|String|Bytes)Value"
)


class Unfit(Exception):
    """Raised if a message has no form as these columns; the text gives the reason."""


def kind_of(field: Any) -> str:
    """Return the type of a field by the name that it has in a schema; `message` for a group, too."""
    return _KINDS[field.type]


def is_map(field: Any) -> bool:
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)


def is_wrapper(field: Any) -> bool:
    """Return True for a message of one value, which stands for the value or null."""
    kind = field.message_type
    return kind is not None and _WRAPPERS.fullmatch(kind.full_name) is not None


def is_repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def load_files(descriptor: bytes) -> list[Any]:
    """Return the files of a FileDescriptorSet, as `protoc --descriptor_set_out` writes it.

    Raises:
        UsageError: it is none.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.message import DecodeError

    try:
        files = list(FileDescriptorSet.FromString(descriptor).file)
    except DecodeError:
        files = []
    if not files or not all(each.name for each in files):
        raise UsageError(
            "the descriptor is no FileDescriptorSet of Protobuf",
            fix="protoc --include_imports --descriptor_set_out=order.pb order.proto",
        )
    return files


def make_pool(files: Sequence[Any]) -> Any:
    """Return a pool with the types of these files, and with those that Protobuf brings.

    Raises:
        UsageError: a file is missing, or they contradict each other.
    """
    from google.protobuf import (
        any_pb2,
        descriptor_pb2,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        struct_pb2,
        timestamp_pb2,
        wrappers_pb2,
    )
    from google.protobuf.descriptor_pool import DescriptorPool

    left = {each.name: each for each in files}
    for module in (
        *(any_pb2, descriptor_pb2, duration_pb2, empty_pb2, field_mask_pb2),
        *(struct_pb2, timestamp_pb2, wrappers_pb2),
    ):
        brought = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(brought)
        left.setdefault(brought.name, brought)
    pool, done = DescriptorPool(), set[str]()
    while left:
        ready = [each for each in left.values() if done.issuperset(each.dependency)]
        if not ready:
            missing = (
                {name for each in left.values() for name in each.dependency} - done - set(left)
            )
            raise UsageError(
                f"the descriptor lacks files that it imports files=`{', '.join(sorted(missing))}`",
                fix="protoc --include_imports",
            )
        for each in ready:
            try:
                pool.Add(each)
                pool.FindFileByName(each.name)
            except Exception as error:
                raise UsageError(
                    f"the descriptor is damaged file=`{each.name}`: {error}", fix="make it again"
                ) from error
            done.add(each.name)
            del left[each.name]
    return pool


def find_message(files: Sequence[Any], name: str) -> Any:
    """Return the descriptor of the message with this full name.

    Raises:
        UsageError: there is none.
    """
    pool = make_pool(files)
    try:
        return pool.FindMessageTypeByName(name)
    except KeyError:
        known = [found for each in files for found in _names(each)]
        raise UsageError(
            f"the descriptor has no such message message=`{name}`",
            fix=suggest(name, known, "messages"),
        ) from None


def _names(file: Any) -> Iterator[str]:
    for each in file.message_type:
        yield f"{file.package}.{each.name}" if file.package else each.name


# -- schemas of a registry --------------------------------------------------------------------------


def file_of(text: str) -> Any | None:
    """Return the file that a registered schema has in base64; None: it is a text of Protobuf."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    try:
        return FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, DecodeError):
        return None


def name_at(text: str, indexes: Sequence[int]) -> str | None:
    """Return the full name of the message at these indexes of a registered schema; None: none is there.

    The first index counts the messages of the file, and each further one those in the message before.
    """
    file = file_of(text)
    package, messages = (
        _outline(text) if file is None else (file.package, _nested(file.message_type))
    )
    names = [package] if package else []
    for index in indexes:
        if not 0 <= index < len(messages):
            return None
        name, messages = messages[index]
        names.append(name)
    return ".".join(names) if indexes else None


def indexes_in(text: str, name: str) -> list[int] | None:
    """Return the indexes of the message with this full name; the inverse of `name_at`."""
    file = file_of(text)
    package, messages = (
        _outline(text) if file is None else (file.package, _nested(file.message_type))
    )
    return _search(messages, f"{package}." if package else "", name)


def _search(messages: Sequence[tuple[str, Any]], prefix: str, name: str) -> list[int] | None:
    for index, (own, inside) in enumerate(messages):
        if prefix + own == name:
            return [index]
        found = _search(inside, f"{prefix}{own}.", name)
        if found is not None:
            return [index, *found]
    return None


def _nested(messages: Sequence[Any]) -> list[tuple[str, Any]]:
    return [
        (each.name, _nested(each.nested_type)) for each in messages if not each.options.map_entry
    ]


_TOKEN: Final = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[\w.]+|[{};=]""", re.DOTALL
)


def _outline(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return the package and the messages of a schema in text, each with those that are in it."""
    tokens = [each for each in _TOKEN.findall(text) if not each.startswith(("//", "/*", '"', "'"))]
    package = ""
    top: list[tuple[str, Any]] = []
    stack: list[list[tuple[str, Any]]] = [top]
    start = True
    for place, token in enumerate(tokens):
        following = tokens[place + 1] if place + 1 < len(tokens) else ""
        if token == "package" and start and len(stack) == 1:
            package = following
        elif token == "{":
            # The words since the last statement tell what the block is.
            words = _statement(tokens, place)
            inside: list[tuple[str, Any]] = []
            if words[:1] == ["message"] and len(words) == 2:
                stack[-1].append((words[1], inside))
            elif "group" in words and "=" in words:
                stack[-1].append((words[words.index("group") + 1], inside))
            elif words[:1] == ["oneof"]:
                inside = stack[-1]  # a group in it belongs to the message
            stack.append(inside)
        elif token == "}" and len(stack) > 1:
            stack.pop()
        start = token in "{};"
    return package, top


def _statement(tokens: Sequence[str], place: int) -> list[str]:
    first = place
    while first and tokens[first - 1] not in "{};":
        first -= 1
    return list(tokens[first:place])


# -- columns ----------------------------------------------------------------------------------------


def columns_of(descriptor: Any) -> pa.Schema:
    """Return the columns that a message makes.

    Raises:
        UsageError: a field has no type of column.
    """
    try:
        return pa.schema(_fields(descriptor, ()))
    except Unfit as error:
        raise UsageError(f"the columns do not follow from the message: {error}") from None


def _fields(descriptor: Any, inside: tuple[str, ...]) -> list[pa.Field]:
    if descriptor.full_name in inside:
        raise Unfit(f"the message `{descriptor.full_name}` contains itself")
    if not descriptor.fields:
        raise Unfit(f"the message `{descriptor.full_name}` has no fields")
    within = (*inside, descriptor.full_name)
    return [pa.field(each.name, _type_of(each, within)) for each in descriptor.fields]


def _type_of(field: Any, inside: tuple[str, ...]) -> pa.DataType:
    if is_map(field):
        key, value = field.message_type.fields
        return pa.map_(value_type(key, inside), value_type(value, inside))
    kind = value_type(field, inside)
    return pa.list_(kind) if is_repeated(field) else kind


def value_type(field: Any, inside: tuple[str, ...] = ()) -> pa.DataType:
    """Return the type of column for one value of a field.

    Raises:
        Unfit: there is none.
    """
    kind = field.message_type
    if kind is None:
        return _PLAIN[kind_of(field)]
    if kind.full_name == TIMESTAMP:
        return pa.timestamp("ns", "UTC")
    if kind.full_name == DURATION:
        return pa.duration("ns")
    if is_wrapper(field):
        return value_type(kind.fields[0])
    return pa.struct(_fields(kind, inside))


def check_fits(field: Any, kind: pa.DataType, path: str) -> None:
    """Check that a field can become a column of this type.

    Raises:
        Unfit: it cannot.
    """
    is_a = pa.types
    if is_map(field):
        key, value = field.message_type.fields
        fits = bool(is_a.is_map(kind))
        if fits:
            check_fits(key, kind.key_type, path)
            check_fits(value, kind.item_type, path)
    elif is_repeated(field):
        fits = bool(is_a.is_list(kind) or is_a.is_large_list(kind))
        if fits:
            check_value_fits(field, kind.value_type, f"{path}[]")
    else:
        check_value_fits(field, kind, path)
        fits = True
    if not fits:
        raise Unfit(
            f"`{path}` is a {'map' if is_map(field) else 'list'}, and does not fit into {kind}"
        )


def check_value_fits(field: Any, kind: pa.DataType, path: str) -> None:
    """Check one value of a field; see `check_fits`."""
    is_a = pa.types
    message = field.message_type
    if message is not None and is_a.is_struct(kind):
        for at in range(kind.num_fields):
            inner = kind.field(at)
            found = message.fields_by_name.get(inner.name)
            if found is None:
                raise Unfit(f"the message `{message.full_name}` has no field `{path}.{inner.name}`")
            check_fits(found, inner.type, f"{path}.{inner.name}")
        fits = kind.num_fields > 0
    elif message is not None and message.full_name == TIMESTAMP:
        fits = bool(is_a.is_timestamp(kind) and kind.tz is not None)
    elif message is not None and message.full_name == DURATION:
        fits = bool(is_a.is_duration(kind))
    elif message is not None and not is_wrapper(field):
        fits = False
    else:
        natural = value_type(field)
        number = is_a.is_integer(kind)
        if field.enum_type is not None:
            fits = number or kind in (pa.string(), pa.large_string())
        elif is_a.is_integer(natural):
            fits = number or kind in (pa.float32(), pa.float64())
        else:
            fits = (
                kind
                in {
                    pa.bool_(): (pa.bool_(),),
                    pa.float32(): (pa.float32(), pa.float64()),
                    pa.float64(): (pa.float64(),),
                    pa.string(): (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()),
                    pa.binary(): (pa.binary(), pa.large_binary()),
                }[natural]
            )
    if not fits:
        name = message.full_name if message is not None else kind_of(field)
        raise Unfit(f"`{path}` is {name} in Protobuf, and does not fit into {kind}")
