"""Scans of state at a subtask: each keeps its place, and is read one slice at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from itertools import islice
from typing import Any, Final

from ...operators.base import Operator
from ...operators.clock import Clock
from ...operators.queries import TooLarge, to_json
from ...operators.selections import Selection
from ...state.keyed.keys import encode_key
from ...state.queryable import KeyScan
from ..control.messages import ScanState, StateAnswer, StateOutcome
from ..task.subtask import Subtask

_AT_ONCE: Final = 128
"""The keys whose values are read together."""
_LOOKED_AT: Final = 16
"""A slice looks at this many times the keys that it may have."""


class _Scan:
    """One scan at one subtask."""

    def __init__(self, keys: KeyScan) -> None:
        self._keys = keys
        self._of_pieces = (key for piece in keys.pieces for key in piece)
        self._next: list[Any] = []
        self.over: asyncio.TimerHandle | None = None

    def take(self, count: int) -> list[Any]:
        """Return the next keys; none at the end."""
        taken = self._next[:count]
        self._next = self._next[count:]
        return [*taken, *islice(self._of_pieces, count - len(taken))]

    def put_back(self, keys: list[Any]) -> None:
        """Let these keys come again."""
        self._next = [*keys, *self._next]

    def close(self) -> None:
        """End the scan."""
        if self.over is not None:
            self.over.cancel()
        self._keys.close()


class OpenScans:
    """The scans of the subtasks of a worker. All but `drop` runs in their mailboxes, or puts mail there."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[tuple[Subtask, int], _Scan] = {}

    def read(self, asked: ScanState, subtask: Subtask, operator: Operator) -> StateAnswer:
        """Read one slice.

        Raises:
            NotKept: the values at the checkpoint are not known here.
            TooLarge: one value has more than `bytes_max` bytes.
            HeadgateError: a value cannot be read.
        """
        place = (subtask, asked.scan)
        scan = self._open.get(place)
        if scan is None:
            if not asked.begins:
                return StateAnswer(query=asked.query, outcome=StateOutcome.SCAN_OVER)
            scan = self._open[place] = _Scan(operator.scan(asked.state, asked.checkpoint_id))
        if scan.over is not None:
            scan.over.cancel()
        loop = asyncio.get_running_loop()
        scan.over = loop.call_later(asked.idle_ms / 1000, self._end_later, place)
        try:
            answer = self._slice(asked, scan, operator) if asked.rows_max else _nothing(asked)
        except BaseException:
            self._end(place)
            raise
        if not answer.more:
            self._end(place)
        return answer

    def _slice(self, asked: ScanState, scan: _Scan, operator: Operator) -> StateAnswer:
        deadline = self._clock.monotonic() + asked.slice_ms / 1000
        selection = Selection.decode(asked.keys)
        keys: list[bytes] = []
        values: list[bytes] = []
        left, looked_at, more = asked.bytes_max, 0, True
        while more and len(keys) < asked.rows_max and looked_at < _LOOKED_AT * asked.rows_max:
            taken = scan.take(min(_AT_ONCE, asked.rows_max - len(keys)))
            more, looked_at = bool(taken), looked_at + len(taken)
            chosen = list(filter(selection.has, taken))
            read = operator.query_many(asked.state, chosen, asked.checkpoint_id)
            for place, (key, value) in enumerate(zip(chosen, read, strict=True)):
                try:
                    data = to_json(value, left)
                except TooLarge:
                    if not keys:
                        raise
                    scan.put_back(chosen[place:])
                    return _answer(asked, keys, values, more=True)
                if data:
                    keys.append(encode_key(key))
                    values.append(data)
                    left -= len(data)
            if self._clock.monotonic() >= deadline:
                break
        return _answer(asked, keys, values, more=more)

    def end(self, number: int) -> None:
        """End a scan at all subtasks."""
        for subtask, each in list(self._open):
            if each == number:
                self._end_later((subtask, each))

    def drop(self, subtasks: Collection[Subtask] | None) -> None:
        """Forget the scans of subtasks that are about to be dropped; None: of all."""
        for place in list(self._open):
            if subtasks is None or place[0] in subtasks:
                self._end(place)

    def _end_later(self, place: tuple[Subtask, int]) -> None:
        """End a scan in the mailbox of its subtask, between two batches."""
        if (scan := self._open.pop(place, None)) is not None:
            place[0].put_mail(scan.close)

    def _end(self, place: tuple[Subtask, int]) -> None:
        scan = self._open.pop(place, None)
        if scan is not None:
            scan.close()


def _nothing(asked: ScanState) -> StateAnswer:
    return _answer(asked, [], [], more=True)


def _answer(asked: ScanState, keys: list[bytes], values: list[bytes], *, more: bool) -> StateAnswer:
    return StateAnswer(
        query=asked.query,
        outcome=StateOutcome.READ,
        keys=tuple(keys),
        values=tuple(values),
        more=more,
    )
