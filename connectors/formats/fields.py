"""Formats of messages as a manifest names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ...api.manifest.fields import (
    Anything,
    BooleanKind,
    ChoiceKind,
    Field,
    IntegerKind,
    OneOf,
    Section,
    Table,
    TextKind,
    duration,
    size,
)
from ...errors import UsageError
from ...operators.suggestions import suggest
from .avro import avro_format
from .format import Format
from .json import json_format
from .protobuf import protobuf_format
from .schema_registry import schema_registry

_REGISTRY: Final = Section(
    "registry",
    {
        "url": Field(TextKind(), "its address; several with commas", required=True),
        "username": Field(TextKind(), "for basic authentication"),
        "password": Field(TextKind(), "`file:/path` or `env:NAME`, read on the worker"),
        "token": Field(TextKind(), "for bearer authentication, in the same forms"),
        "ca": Field(TextKind(), "a file with the certificates to trust"),
        "certificate": Field(TextKind(), "a file with the certificate of the client"),
        "key": Field(TextKind(), "a file with the key of the certificate"),
        "timeout": Field(duration(), "for one request; 5s"),
        "patience": Field(duration(), "how long requests are tried again; 30s"),
        "cached": Field(IntegerKind(1), "the most schemas that a subtask keeps; 1000"),
        "responseMax": Field(size(), "the most bytes of an answer; 4mb"),
        "autoRegister": Field(BooleanKind(), "true: a sink registers its schema"),
    },
)
_SECTION: Final = Section(
    "format",
    {
        "avro": Field(
            Section(
                "avro",
                {
                    "schema": Field(Anything(), "the schema of Avro, as YAML or as a text of JSON"),
                    "registry": Field(_REGISTRY, "of the schemas of messages"),
                },
            ),
            "messages of Avro",
        ),
        "json": Field(
            Section(
                "json", {"registry": Field(_REGISTRY, "of the schemas of messages", required=True)}
            ),
            "objects of JSON with a schema registry",
        ),
        "protobuf": Field(
            Section(
                "protobuf",
                {
                    "message": Field(
                        TextKind(), "the full name of the message, such as `shop.Order`"
                    ),
                    "descriptor": Field(
                        TextKind(),
                        "a file with a FileDescriptorSet, which is read with the manifest",
                    ),
                    "registry": Field(_REGISTRY, "of the schemas of messages"),
                },
            ),
            "messages of Protobuf",
        ),
    },
)
_NAMES: Final = {"responseMax": "response_max", "autoRegister": "auto_register"}
_MAKERS: Final[Mapping[str, Callable[..., Format]]] = {
    "avro": avro_format,
    "json": json_format,
    "protobuf": protobuf_format,
}


def format_field(names: tuple[str, ...], default: str = "json") -> Field:
    """Return the field `format` of a connector that knows these formats by name."""
    return Field(OneOf(_SECTION, ChoiceKind(names)), f"of the values; {default}")


def with_format(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a connector, in which the field `format` has become a format.

    Raises:
        UsageError: it is not exactly one, or its fields do not go together.
    """
    given = arguments.get("format")
    if not isinstance(given, Mapping):
        return dict(arguments)
    if len(given) != 1:
        raise UsageError(
            f"a format is exactly one found=`{', '.join(given)}`",
            fix=suggest("avro", list(_MAKERS), "formats"),
        )
    ((name, fields),) = given.items()
    known = fields.values if isinstance(fields, Table) else dict(fields)
    if "registry" in known:
        registry = known["registry"].values
        named = {_NAMES.get(each, each): value for each, value in registry.items()}
        known = {**known, "registry": schema_registry(**named)}
    return {**arguments, "format": _MAKERS[name](**known)}
