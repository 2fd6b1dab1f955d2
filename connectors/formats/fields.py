"""Formats of messages as a manifest names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ...api.manifest.fields import Anything, Choice, Field, OneOf, Section, Table
from ...errors import UsageError
from ...operators.suggestions import suggest
from .avro import avro_format
from .format import Format

_SECTION: Final = Section(
    "format",
    {
        "avro": Field(
            Section(
                "avro",
                {"schema": Field(Anything(), "the schema of Avro, as YAML or as a text of JSON")},
            ),
            "messages of Avro",
        ),
    },
)
_MAKERS: Final[Mapping[str, Callable[..., Format]]] = {"avro": avro_format}


def format_field(names: tuple[str, ...]) -> Field:
    """Return the field `format` of a connector that knows these formats by name."""
    return Field(OneOf(_SECTION, Choice(names)), "of the values; json")


def read_format(given: Any) -> Any:
    """Return the format that a field `format` has, as connectors take it.

    Raises:
        UsageError: it is not exactly one, or its fields do not go together.
    """
    if not isinstance(given, Mapping):
        return given
    if len(given) != 1:
        raise UsageError(
            f"a format is exactly one found=`{', '.join(given)}`",
            fix=suggest("avro", list(_MAKERS), "formats"),
        )
    ((name, fields),) = given.items()
    return _MAKERS[name](**(fields.values if isinstance(fields, Table) else fields))
