"""Sources that make their records, and sources around other ones, as cases of the conformance kit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headgate.connectors import (
    generator,
    hybrid_source,
    nexmark,
    numbers,
    pattern,
    sequence,
    throttle,
    with_position,
)
from headgate.operators.source import Source
from headgate.testing.connectors import Case, Feature, SourceCase, open_reader, records_of
from headgate.tests.support.connector_cases import JsonSource, Rows

SPLITS = 3


class Made(SourceCase):
    """A source whose records follow from their numbers; the place is how many there are."""

    features = frozenset({Feature.LAG})

    @contextmanager
    def place(self) -> Iterator[list[Any]]:
        yield []

    def put(self, place: list[Any], records: Sequence[Any]) -> None:
        place.extend(records)


class GeneratorCase(Made):
    """Generated columns."""

    def records(self) -> list[Any]:
        return [{"id": n, "name": f"name {n}"} for n in range(12)]

    def source(self, place: list[Any]) -> Source:
        fields = {"id": sequence(), "name": pattern(prefix="name ")}
        return generator(fields, rows=len(place), batch_rows=1, splits=SPLITS)


class NumbersCase(Made):
    """Generated objects."""

    def records(self) -> list[Any]:
        return list(range(12))

    def source(self, place: list[Any]) -> Source:
        return numbers(len(place), batch_rows=1, splits=SPLITS)


class NexmarkCase(Made):
    """Bids, which are compared with those that are read at once."""

    def records(self) -> list[Any]:
        source = nexmark("bid", events=12, splits=1)
        batch = open_reader(source, source.splits(1)).poll()
        assert batch is not None
        return records_of(batch)

    def source(self, place: list[Any]) -> Source:
        return nexmark("bid", events=len(place), batch_rows=1, splits=SPLITS)


class PositionCase(GeneratorCase):
    """Generated columns in one split, with the position of each."""

    def records(self) -> list[Any]:
        return [
            {**record, "position": {"split": "split 0", "offset": record["id"]}}
            for record in super().records()
        ]

    def source(self, place: list[Any]) -> Source:
        fields = {"id": sequence(), "name": pattern(prefix="name ")}
        return with_position(generator(fields, rows=len(place), batch_rows=1, splits=1))


class ThrottledCase(JsonSource):
    """Files of JSON, at a rate that holds up nothing."""

    def files(self, place: Path, **options: Any) -> Source:
        return throttle(super().files(place, **options), 1e6)


class HybridCase(Rows, SourceCase):
    """Files of JSON, and then those of another directory."""

    features = JsonSource.features

    def __init__(self) -> None:
        self._history, self._live = JsonSource(), JsonSource()

    @contextmanager
    def place(self) -> Iterator[tuple[Path, Path]]:
        with tempfile.TemporaryDirectory() as history, tempfile.TemporaryDirectory() as live:
            yield Path(history), Path(live)

    def put(self, place: tuple[Path, Path], records: Sequence[Any]) -> None:
        """Append to the history, unless something has gone to the live source; half goes there."""
        history, live = place
        half = 0 if any(live.iterdir()) else len(records) // 2
        self._history.put(history, records[:half])
        self._live.put(live, records[half:])

    def put_bad(self, place: tuple[Path, Path]) -> None:
        self._live.put_bad(place[1])

    def source(self, place: tuple[Path, Path]) -> Source:
        return hybrid_source(self._history.source(place[0]), self._live.source(place[1]))

    def tolerant(self, place: tuple[Path, Path], on_bad_record: str) -> Source:
        history, live = (
            each.tolerant(path, on_bad_record)
            for each, path in zip((self._history, self._live), place, strict=True)
        )
        return hybrid_source(history, live)

    def mistakes(self, place: tuple[Path, Path]) -> Mapping[str, tuple[Source, str]]:
        history, live = self._history.source(place[0]), self._live.source(place[1])
        (wrong, reason), *_ = self._history.mistakes(place[0]).values()
        return {
            "no history": (hybrid_source(wrong, live), reason),
            "nothing behind the history": (hybrid_source(history, wrong), reason),
        }


MADE: dict[str, type[Case]] = {
    "generator": GeneratorCase,
    "numbers": NumbersCase,
    "nexmark": NexmarkCase,
    "with_position": PositionCase,
    "throttle": ThrottledCase,
    "hybrid_source": HybridCase,
}
