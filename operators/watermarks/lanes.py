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
class Lane:
    """Event time of one split.

    Attributes:
        active_at_s: when it last brought a record, or first could have.
        due: the watermark that its generator had reached at the restored checkpoint, not yet
            announced.
    """

    generator: WatermarkGenerator
    active_at_s: float
    watermark: int = WATERMARK_MIN
    idle: bool = False
    due: int = WATERMARK_MIN

    def rise(self, watermark: int | None) -> None:
        """Advance to `watermark`; never go back."""
        if watermark is not None and watermark > self.watermark:
            self.watermark = watermark

    def ask(self) -> None:
        """Advance to the generator's watermark."""
        self.rise(self.reached)
        self.due = WATERMARK_MIN

    @property
    def reached(self) -> int:
        """The watermark that the records so far allow, announced or not."""
        asked = self.generator.on_interval()
        return max(self.watermark, self.due, WATERMARK_MIN if asked is None else asked)


@final
class Slowest(NamedTuple):
    """The split that holds back the watermark of its subtask."""

    split: str
    watermark: int
    queued: bool = False


@final
class Lanes:
    """All splits of one subtask.

    `wait_for_queued`: no watermark until the last of them is being read.
    """

    def __init__(
        self, make: Callable[[], WatermarkGenerator], now_s: float, wait_for_queued: bool = False
    ) -> None:
        self._make = make
        self._wait_for_queued = wait_for_queued
        self._restored: dict[str, int] = {}
        self._due: dict[str, int] = {}
        """The due watermarks by split: see `Lane.due`."""
        self._lanes: dict[str, Lane] = {WHOLE: Lane(make(), now_s)}
        self._queued: dict[str, None] = {}
        """The splits that the reader has not reached, in order: they are never idle."""
        self._told = False
        self._ended = WATERMARK_MIN
        """The furthest watermark of an ended split."""
        self._ended_last = WATERMARK_MIN
        """The watermark of the split that ended last."""
        self._passed = WATERMARK_MIN
        """The watermark agreed between splits that were read one after the other."""

    def open(self, split: str, queued: bool, now_s: float) -> None:
        """Add a split to wait for."""
        if not self._told:
            self._told = True
            del self._lanes[WHOLE]
        if queued and split not in self._restored and split not in self._due:
            self._queued[split] = None
        else:
            self._lanes[split] = self._lane(split, now_s)

    def restore(self, splits: Mapping[str, int], due: Mapping[str, int]) -> None:
        """Restore the watermarks of splits that were being read. Call this before any other method.

        Args:
            splits: the watermarks they had announced.
            due: the watermarks their records allowed beyond that.
        """
        self._restored, self._due = dict(splits), dict(due)
        for split, lane in self._lanes.items():
            self._go_on(split, lane)

    def _lane(self, split: str, now_s: float) -> Lane:
        lane = Lane(self._make(), now_s)
        self._go_on(split, lane)
        return lane

    def _go_on(self, split: str, lane: Lane) -> None:
        lane.rise(self._restored.pop(split, None))
        lane.due = max(lane.due, self._due.pop(split, WATERMARK_MIN))

    def end(self, split: str) -> None:
        """End a split, which no longer holds back the watermark."""
        self._queued.pop(split, None)
        lane = self._lanes.pop(split, None)
        if lane is None:
            return
        lane.ask()
        self._ended = max(self._ended, lane.watermark)
        if not self._lanes and not self._wait_for_queued:
            # Small splits begin and end between two ticks, so they are never seen being read. The
            # time that this one and the one before it agree on counts: the next may be behind this
            # one's end.
            self._passed = max(self._passed, min(self._ended_last, lane.watermark))
        self._ended_last = lane.watermark

    def see(self, split: str, times: Timestamps, latest: int) -> bool:
        """Observe records of a split, `latest` the greatest of their times.

        Return True if its watermark is to be sent at once.
        """
        lane = self._lanes.get(split)
        if lane is None:
            self._queued.pop(split, None)
            lane = self._lanes[split] = self._lane(split, 0.0)
        lane.idle = False
        if isinstance(lane.generator, BoundedGenerator):
            lane.generator.on_latest(latest)
            return False
        watermark = lane.generator.on_batch(times)
        lane.rise(watermark)
        return watermark is not None

    def touch(self, split: str, now_s: float) -> None:
        """Note that the work on records of a split ended now."""
        self._lanes[split].active_at_s = now_s

    def tick(self) -> None:
        """Advance all splits to their generators' watermarks."""
        for lane in self._lanes.values():
            lane.ask()

    def silence(self, now_s: float, longest_s: float, paused: Set[str]) -> None:
        """Mark splits idle that were silent for `longest_s`; splits in `paused` are not silent."""
        for split, lane in self._lanes.items():
            if split in paused:
                lane.active_at_s = now_s
            elif now_s - lane.active_at_s >= longest_s:
                lane.idle = True

    @property
    def reached(self) -> int:
        """The watermark that follows from all splits; WATERMARK_MIN: none yet."""
        slowest = self.slowest
        if slowest is not None:
            return max(slowest.watermark, self._passed)
        # None is active: as far as any has come, as in the valve when all channels are idle or have
        # ended. With a queue the reader will reach the next in a moment.
        ended = WATERMARK_MIN if self._queued else self._ended
        return max([ended, self._passed, *(lane.watermark for lane in self._lanes.values())])

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
        active = (Slowest(name, lane.watermark) for name, lane in self._active())
        return min(active, key=lambda each: each.watermark, default=None)

    @property
    def watermarks(self) -> dict[str, int]:
        """Return the watermarks of the splits being read that have one."""
        lanes = self._lanes.items()
        return {name: lane.watermark for name, lane in lanes if lane.watermark > WATERMARK_MIN}

    @property
    def due(self) -> dict[str, int]:
        """Return, for splits being read, the watermarks that their records allow beyond those announced."""
        found = {name: lane.reached for name, lane in self._lanes.items()}
        return {name: due for name, due in found.items() if due > self._lanes[name].watermark}

    @property
    def none_is_read(self) -> bool:
        """True if the reader is between two splits, or at the end of the last."""
        return not self._lanes

    def above(self, limit: int) -> frozenset[str]:
        """Return the splits being read whose watermark is above `limit`."""
        return frozenset(name for name, lane in self._lanes.items() if lane.watermark > limit)

    def _active(self) -> Iterator[tuple[str, Lane]]:
        return ((name, lane) for name, lane in self._lanes.items() if not lane.idle)

    def counts(self) -> tuple[int, int, int]:
        """Return (splits being read, those of them that are idle, splits queued)."""
        idle = sum(lane.idle for lane in self._lanes.values())
        return len(self._lanes), idle, len(self._queued)
