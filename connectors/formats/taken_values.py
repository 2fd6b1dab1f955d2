"""The values of messages that a reader takes a few hundred at a time, to decode many of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, overload

_LINE_BREAK: Final = b"\n"


class TakenValues(Sequence[bytes | None]):
    """Values in the order in which they were taken.

    Values for a decoder of lines are joined into a text when the next ones come. A client makes an object
    of each value. Those that are let go so soon are still in the caches of the core, and the client makes
    the next ones in the same memory. To decode 32,768 values that had been objects until then took half as
    long again.
    """

    def __init__(self, *, lines: bool) -> None:
        """No value is taken yet.

        Args:
            lines: the values are for a decoder that reads lines.
        """
        self._lines = lines
        """False as well if a value is no line: it is missing, or has a line break."""
        self._texts: list[bytes] = []
        """The first values, each with a line break behind it."""
        self._joined = 0
        """The number of values in `_texts`."""
        self._values: list[bytes | None] = []
        """The values behind those."""

    @classmethod
    def of_all(cls, parts: Sequence[TakenValues]) -> TakenValues:
        """Return the values of several behind each other."""
        taken = cls(lines=all(each._lines for each in parts))
        if any(each._texts for each in parts) and all(each._join() for each in parts):
            taken._texts = [text for each in parts for text in each._texts]
            taken._joined = sum(each._joined for each in parts)
        else:
            taken._values = [value for each in parts for value in each]
        return taken

    def add(self, values: Iterable[bytes | None]) -> None:
        """Take further values."""
        self._join()
        self._values += values

    def cut(self, count: int) -> None:
        """Forget the values from number `count` on."""
        del self._separate()[count:]

    def text(self) -> bytes | None:
        """Return all values as lines of one text, or None if they are few, or no lines."""
        return b"".join(self._texts) if self._texts and self._join() else None

    def __len__(self) -> int:
        return self._joined + len(self._values)

    def __iter__(self) -> Iterator[bytes | None]:
        return iter(self._separate())

    @overload
    def __getitem__(self, index: int) -> bytes | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes | None]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._separate()[index]

    def _join(self) -> bool:
        """Join the values that are not joined yet; return False if one of them is no line."""
        if self._values and self._lines:
            texts: list[Any] = [*self._values, b""]
            try:
                text = _LINE_BREAK.join(texts)
            except TypeError:  # a value is missing
                text = b""
            self._lines = text.count(_LINE_BREAK) == len(self._values)
            if self._lines:
                self._texts.append(text)
                self._joined += len(self._values)
                self._values = []
        return not self._values

    def _separate(self) -> list[bytes | None]:
        """Return all values one by one; they stay so."""
        if self._texts:
            self._values = [*b"".join(self._texts).split(_LINE_BREAK)[:-1], *self._values]
            self._texts, self._joined, self._lines = [], 0, False
        return self._values
