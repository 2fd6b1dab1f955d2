"""Event time per split, and the watermark of the subtask: the minimum of its active splits.

A split counts from the moment it is being read, before its first record, so that nothing is late
because splits are read in turn. A split in a queue counts from the moment the reader reaches it,
or, if requested, at once. It stops counting when it ends, and while it is idle. All this is about
the splits of one reader; across subtasks `runtime/task/valve.py` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple, final

from ..elements import WATERMARK_MIN, Timestamps
from ..splits import WHOLE
from .generators import BoundedGenerator, WatermarkGenerator


@final
@dataclass(slots=True)
class SplitProgress:
    """Event time of one split.

    Attributes:
        active_at_s: when it last brought a record; before its first record, when it could first have.
        due: the watermark that its generator had reached at the restored checkpoint, not yet
            announced.
    """

    generator: WatermarkGenerator
    active_at_s: float
    watermark: int = WATERMARK_MIN
    idle: bool = False
    due: int = WATERMARK_MIN

    def advance_to(self, watermark: int | None) -> None:
        """Advance to `watermark`; never go back."""
        if watermark is not None and watermark > self.watermark:
            self.watermark = watermark

    def advance(self) -> None:
        """Advance to the generator's watermark."""
        self.advance_to(self.reached)
        self.due = WATERMARK_MIN

    @property
    def reached(self) -> int:
        """The watermark that the records so far allow, announced or not."""
        found = self.generator.on_interval()
        return max(self.watermark, self.due, WATERMARK_MIN if found is None else found)


@final
class Slowest(NamedTuple):
    """The split that holds back the watermark of its subtask."""

    split: str
    watermark: int
    queued: bool = False


@final
class SplitWatermarks:
    """The event times of all splits of one subtask.

    With `wait_for_queued` there is no watermark until the last of them is being read.
    """

    def __init__(
        self, make: Callable[[], WatermarkGenerator], now_s: float, wait_for_queued: bool = False
    ) -> None:
        self._make = make
        self._wait_for_queued = wait_for_queued
        self._restored: dict[str, int] = {}
        self._due: dict[str, int] = {}
        """The due watermarks by split: see `SplitProgress.due`."""
        self._splits: dict[str, SplitProgress] = {WHOLE: SplitProgress(make(), now_s)}
        self._queued: dict[str, None] = {}
        """The splits that the reader has not reached, in order: they are never idle."""
        self._splits_announced = False
        self._ended = WATERMARK_MIN
        """The furthest watermark of an ended split."""
        self._ended_last = WATERMARK_MIN
        """The watermark of the split that ended last."""
        self._passed = WATERMARK_MIN
        """The watermark agreed between splits that were read one after the other."""

    def open(self, split: str, queued: bool, now_s: float) -> None:
        """Add a split to wait for."""
        if not self._splits_announced:
            self._splits_announced = True
            del self._splits[WHOLE]
        if queued and split not in self._restored and split not in self._due:
            self._queued[split] = None
        else:
            self._splits[split] = self._new_progress(split, now_s)

    def restore(self, splits: Mapping[str, int], due: Mapping[str, int]) -> None:
        """Restore the watermarks of splits that were being read. Call this before any other method.

        Args:
            splits: the watermarks they had announced.
            due: the watermarks their records allowed beyond that.
        """
        self._restored, self._due = dict(splits), dict(due)
        for split, progress in self._splits.items():
            self._restore_split(split, progress)

    def _new_progress(self, split: str, now_s: float) -> SplitProgress:
        progress = SplitProgress(self._make(), now_s)
        self._restore_split(split, progress)
        return progress

    def _restore_split(self, split: str, progress: SplitProgress) -> None:
        progress.advance_to(self._restored.pop(split, None))
        progress.due = max(progress.due, self._due.pop(split, WATERMARK_MIN))

    def end(self, split: str) -> None:
        """End a split, which no longer holds back the watermark."""
        self._queued.pop(split, None)
        progress = self._splits.pop(split, None)
        if progress is None:
            return
        progress.advance()
        self._ended = max(self._ended, progress.watermark)
        if not self._splits and not self._wait_for_queued:
            # Small splits begin and end between two ticks, so they are never seen being read. The
            # time that this one and the one before it agree on counts: the next may be behind this
            # one's end.
            self._passed = max(self._passed, min(self._ended_last, progress.watermark))
        self._ended_last = progress.watermark

    def observe(self, split: str, times: Timestamps, latest: int) -> bool:
        """Observe records of a split, `latest` the greatest of their times.

        Return True if its watermark is to be sent at once.
        """
        progress = self._splits.get(split)
        if progress is None:
            self._queued.pop(split, None)
            progress = self._splits[split] = self._new_progress(split, 0.0)
        progress.idle = False
        if isinstance(progress.generator, BoundedGenerator):
            progress.generator.on_latest(latest)
            return False
        watermark = progress.generator.on_batch(times)
        progress.advance_to(watermark)
        return watermark is not None

    def mark_active(self, split: str, now_s: float) -> None:
        """Note that the work on records of a split ended now."""
        self._splits[split].active_at_s = now_s

    def advance(self) -> None:
        """Advance all splits to their generators' watermarks."""
        for progress in self._splits.values():
            progress.advance()

    def mark_idle(self, now_s: float, longest_s: float, paused: Set[str]) -> None:
        """Mark splits idle that were silent for `longest_s`; splits in `paused` are not silent."""
        for split, progress in self._splits.items():
            if split in paused:
                progress.active_at_s = now_s
            elif now_s - progress.active_at_s >= longest_s:
                progress.idle = True

    @property
    def reached(self) -> int:
        """The watermark that follows from all splits; WATERMARK_MIN: none yet."""
        slowest = self.slowest
        if slowest is not None:
            return max(slowest.watermark, self._passed)
        # None is active: as far as any has come, as in the valve when all channels are idle or have
        # ended. With a queue the reader will reach the next in a moment.
        ended = WATERMARK_MIN if self._queued else self._ended
        return max(
            [ended, self._passed, *(progress.watermark for progress in self._splits.values())]
        )

    @property
    def slowest(self) -> Slowest | None:
        """Return the split that the others wait for; None if all are idle or have ended."""
        if self._queued and self._wait_for_queued:
            return Slowest(next(iter(self._queued)), WATERMARK_MIN, queued=True)
        return self._slowest_being_read

    @property
    def being_read(self) -> int | None:
        """Return the least watermark of active splits that are being read.

        WATERMARK_MIN: the reader is on its way to the next in the queue; None: there is none.
        """
        slowest = self._slowest_being_read
        if slowest is not None:
            return slowest.watermark
        return WATERMARK_MIN if self._queued else None

    @property
    def _slowest_being_read(self) -> Slowest | None:
        active = (Slowest(name, progress.watermark) for name, progress in self._active())
        return min(active, key=lambda each: each.watermark, default=None)

    @property
    def watermarks(self) -> dict[str, int]:
        """Return the watermarks of the splits being read that have one."""
        splits = self._splits.items()
        return {
            name: progress.watermark
            for name, progress in splits
            if progress.watermark > WATERMARK_MIN
        }

    @property
    def due(self) -> dict[str, int]:
        """Return the watermarks of splits being read that their records allow, where not yet announced."""
        found = {name: progress.reached for name, progress in self._splits.items()}
        return {name: due for name, due in found.items() if due > self._splits[name].watermark}

    @property
    def none_is_read(self) -> bool:
        """True if the reader is between two splits, or at the end of the last."""
        return not self._splits

    def above(self, limit: int) -> frozenset[str]:
        """Return the splits being read whose watermark is above `limit`."""
        return frozenset(
            name for name, progress in self._splits.items() if progress.watermark > limit
        )

    def _active(self) -> Iterator[tuple[str, SplitProgress]]:
        return ((name, progress) for name, progress in self._splits.items() if not progress.idle)

    def counts(self) -> tuple[int, int, int]:
        """Return (splits being read, those of them that are idle, splits queued)."""
        idle = sum(progress.idle for progress in self._splits.values())
        return len(self._splits), idle, len(self._queued)
