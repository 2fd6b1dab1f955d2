"""The JSON schema of manifests with its repeated parts written once, as definitions.

A connector may stand in several places, such as the two sources of a hybrid one, and some fields, such as
the credentials of Kafka, belong to several connectors. The schema would be more than twice as long if they
were written out each time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeAlias

Schema: TypeAlias = dict[str, Any]

CHARACTERS_MIN: Final = 240
"""A shorter part is written out wherever it is needed: a reference would hardly be shorter."""


def with_definitions(schema: Schema) -> Schema:
    """Return an equivalent schema, in which the parts that it has several times are in `$defs`.

    A definition has the name of the field in which its part is first met, with a number if that is taken.
    The descriptions of fields stand beside the references.
    """
    uses: Counter[str] = Counter()
    names: dict[str, str] = {}
    definitions: dict[str, Schema] = {}

    def counted(part: Schema, field: str) -> Schema:
        text = _text(part)
        uses[text] += 1
        # The parts of equal parts are written only once, too, so they count once.
        return _mapped(part, field, counted) if uses[text] == 1 else part

    def written(part: Schema, field: str) -> Schema:
        text = _text(part)
        if uses[text] < 2 or len(text) < CHARACTERS_MIN:
            return _mapped(part, field, written)
        if text not in names:
            names[text] = _free(field, definitions)
            definitions[names[text]] = {}  # the name is taken, also while the parts are written
            definitions[names[text]] = _mapped(part, field, written)
        return {"$ref": f"#/$defs/{names[text]}"}

    _mapped(schema, "", counted)
    made = _mapped(schema, "", written)
    return {**made, "$defs": dict(sorted(definitions.items()))}


def _mapped(schema: Schema, field: str, change: Callable[[Schema, str], Schema]) -> Schema:
    """Return a schema with its parts changed, each without its description, which stays.

    Args:
        schema: has the parts.
        field: the name of the field that it describes.
        change: gets a part and the name of its field.
    """

    def changed(part: Schema, name: str) -> Schema:
        rest = {key: value for key, value in part.items() if key != "description"}
        kept = {key: value for key, value in part.items() if key == "description"}
        return {**change(rest, name), **kept}

    made = dict(schema)
    for key, value in schema.items():
        if key == "properties":
            made[key] = {name: changed(part, name) for name, part in value.items()}
        elif key == "anyOf":
            made[key] = [changed(part, field) for part in value]
        elif key in ("additionalProperties", "propertyNames", "items") and isinstance(value, dict):
            made[key] = changed(value, field)
    return made


def _text(schema: Schema) -> str:
    return json.dumps(schema, sort_keys=True)


def _free(field: str, taken: dict[str, Schema]) -> str:
    """Return the name of a field, with a number if it is taken."""
    name, number = field, 1
    while name in taken:
        number += 1
        name = f"{field}{number}"
    return name
