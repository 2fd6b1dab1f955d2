"""The fields that several connectors have in a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ..api.manifest.fields import Field, Items, TextKind

PASSWORD: Final = Field(
    TextKind(), "the password, or `file:/path` or `env:NAME`, read on each machine"
)
TLS: Final[Mapping[str, Field]] = {
    "ca": Field(TextKind(), "with TLS: the file of the authorities to trust; those of the system"),
    "certificate": Field(TextKind(), "with TLS: the file with the certificate of the client"),
    "key": Field(TextKind(), "with TLS: the file with its key"),
}
DELIMITER: Final = Field(TextKind(r"[^\n]", "one character"), "of csv")


def metadata_field(kinds: Iterable[str], meaning: str) -> Field:
    """Return the field with the columns of metadata.

    Args:
        kinds: what they may hold.
        meaning: of the field.
    """
    known = tuple(kinds)
    columns = TextKind("|".join(known), f"one of {', '.join(known)}")
    return Field(Items(TextKind(), columns), meaning)
