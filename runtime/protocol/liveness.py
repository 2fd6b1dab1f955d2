"""Detects workers that stopped responding, and jobs in which nothing moves any more."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

from ...errors import check
from .ids import WorkerId


@final
class HeartbeatMonitor:
    """Declares a worker lost after `timeout_ms` without a sign of life.

    `tick` must be called every `interval_ms`. If it comes later, this process itself stalled, with
    beats waiting unread: the extra time is not counted against any worker.
    """

    def __init__(self, interval_ms: int, timeout_ms: int) -> None:
        check(
            0 < interval_ms < timeout_ms,
            "the heartbeat timeout must be longer than the interval",
            interval_ms=interval_ms,
            timeout_ms=timeout_ms,
        )
        self._interval_ms = interval_ms
        self._timeout_ms = timeout_ms
        self._heard_ms: dict[WorkerId, int] = {}
        self._ticked_ms: int | None = None

    def watch(self, worker: WorkerId, now_ms: int) -> None:
        """Expect beats of this worker from now on."""
        if not self._heard_ms:
            # none was watched, so the time before does not count as a stall
            self._ticked_ms = now_ms
        self._heard_ms[worker] = now_ms

    def forget(self, worker: WorkerId) -> None:
        """Stop expecting beats: the worker was stopped, or its death is already known."""
        self._heard_ms.pop(worker, None)

    def silent_ms(self, worker: WorkerId, now_ms: int) -> int:
        """Return the time since the last heartbeat of a worker, ms; 0: it is not watched."""
        return max(0, now_ms - self._heard_ms.get(worker, now_ms))

    def beat(self, worker: WorkerId, now_ms: int) -> None:
        """Note a sign of life of a worker; ignored unless it is watched (a zombie may still beat)."""
        if worker in self._heard_ms:
            self._heard_ms[worker] = max(now_ms, self._heard_ms[worker])

    def tick(self, now_ms: int) -> list[WorkerId]:
        """Return the workers lost by now, each reported once, in order of name."""
        if self._ticked_ms is None:
            return []
        overslept_ms = now_ms - self._ticked_ms - self._interval_ms
        if overslept_ms > 0:
            for worker, heard_ms in self._heard_ms.items():
                self._heard_ms[worker] = min(now_ms, heard_ms + overslept_ms)
        self._ticked_ms = max(now_ms, self._ticked_ms)
        lost = sorted(
            worker
            for worker, heard_ms in self._heard_ms.items()
            if now_ms - heard_ms >= self._timeout_ms
        )
        for worker in lost:
            del self._heard_ms[worker]
        return lost


@final
class StallMonitor:
    """Reports when nothing has changed for `timeout_ms` although there was work.

    `look` must be called every `interval_ms`. At most twice that counts of the time between two
    looks: if it was longer, this process itself stood still.
    """

    def __init__(self, timeout_ms: int, interval_ms: int) -> None:
        check(timeout_ms > 0, "a stall must last", timeout_ms=timeout_ms)
        self._timeout_ms = timeout_ms
        self._step_max_ms = 2 * interval_ms
        self._mark: Hashable = None
        self._looked_ms: int | None = None
        self._stood_ms = 0

    def look(self, now_ms: int, mark: Hashable, *, pending: bool) -> bool:
        """Return True once there was no progress for too long; the time then starts again.

        Args:
            now_ms: the time.
            mark: changes with any progress.
            pending: there is work; without it, standing still is normal.
        """
        looked_ms, self._looked_ms = self._looked_ms, now_ms
        if looked_ms is None or not pending or mark != self._mark:
            self._mark, self._stood_ms = mark, 0
            return False
        self._stood_ms += max(0, min(now_ms - looked_ms, self._step_max_ms))
        if self._stood_ms < self._timeout_ms:
            return False
        self._stood_ms = 0
        return True
