"""The base of readers that read through another one."""

from __future__ import annotations

from collections.abc import Mapping

from ..operators.source import SourceReader


class ForwardingReader(SourceReader):
    """Forwards calls to another reader.

    A subclass implements `open`, `add_splits`, `poll`, `wait`, `finished` and `snapshot`.
    """

    def __init__(self, reader: SourceReader) -> None:
        self._reader = reader
        self.can_pause_splits = reader.can_pause_splits

    def lag_records(self) -> Mapping[str, int] | None:
        return self._reader.lag_records()

    def lag_bytes(self) -> int | None:
        return self._reader.lag_bytes()

    def lag_s(self) -> float | None:
        return self._reader.lag_s()

    def pause_splits(self, splits: frozenset[str]) -> None:
        self._reader.pause_splits(splits)

    def begin_checkpoint(self, checkpoint_id: int) -> None:
        self._reader.begin_checkpoint(checkpoint_id)

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._reader.on_checkpoint_complete(checkpoint_id)

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._reader.on_checkpoint_aborted(checkpoint_id)

    def close(self) -> None:
        self._reader.close()
