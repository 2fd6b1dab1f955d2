"""Watermark generators derive watermarks from event times; those of users are guarded."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, final

import numpy as np

from ...errors import UserCodeError
from ..elements import WATERMARK_MIN, Timestamps
from ..functions.user_code import user_failures
from ..origin import Origin
from ..time_range import INSTANT_MAX_MS


class WatermarkGenerator:
    """Generates watermarks; one per split. Subclass it for a rule of your own.

    A watermark `t` (ms since 1970 UTC) means that no more records at `t` or before are expected.
    Watermarks that go back are ignored. The attributes of a generator are not state: a new one is
    made for each attempt.
    """

    def on_batch(self, times: Timestamps) -> int | None:
        """Observe the event times of one batch, at least one, int64 ms, in order of arrival.

        Results must not depend on the batch boundaries. Return a watermark to send directly after
        the batch, or None.
        """
        return None

    def on_interval(self) -> int | None:
        """Return the current watermark, or None if it has not changed.

        Called every `pipeline.auto-watermark-interval`, after a number of records at full speed,
        at checkpoints, and when the split has ended. With windows in later steps it is also called up
        to ten times per interval, to find out whether one has ended. So it must not count its calls.
        """
        return None


@final
class BoundedGenerator(WatermarkGenerator):
    """Generates the latest time seen - bound - 1 ms."""

    def __init__(self, bound_ms: int) -> None:
        self._bound_ms = bound_ms
        self._latest = WATERMARK_MIN

    def on_batch(self, times: Timestamps) -> int | None:
        self.on_latest(int(times.max()))
        return None

    def on_latest(self, latest: int) -> None:
        """Observe a batch whose greatest time is already known."""
        self._latest = max(self._latest, latest)

    def on_interval(self) -> int | None:
        if self._latest == WATERMARK_MIN:
            return None
        return max(self._latest - self._bound_ms - 1, WATERMARK_MIN)


def guarded(
    make: Callable[[], WatermarkGenerator], step: str, origin: Origin
) -> Callable[[], WatermarkGenerator]:
    """Return a function that makes generators for `step`, guarding those of users."""

    def make_one() -> WatermarkGenerator:
        generator = _call(step, origin, make)
        if isinstance(generator, BoundedGenerator):
            return generator
        if not isinstance(generator, WatermarkGenerator):
            raise UserCodeError(
                f"the strategy of `{step}` made no generator type=`{type(generator).__name__}`",
                where=str(origin),
                fix="make a subclass of hg.WatermarkGenerator",
            )
        return _Guarded(generator, step, origin)

    return make_one


@final
class _Guarded(WatermarkGenerator):
    def __init__(self, generator: WatermarkGenerator, step: str, origin: Origin) -> None:
        self._generator = generator
        self._step = step
        self._origin = origin

    def on_batch(self, times: Timestamps) -> int | None:
        return self._checked(_call(self._step, self._origin, self._generator.on_batch, times))

    def on_interval(self) -> int | None:
        return self._checked(_call(self._step, self._origin, self._generator.on_interval))

    def _checked(self, result: Any) -> int | None:
        if result is None:
            return None
        whole = isinstance(result, int | np.integer) and not isinstance(result, bool)
        if whole and WATERMARK_MIN <= result <= INSTANT_MAX_MS:
            return int(result)
        raise UserCodeError(
            f"the watermark generator of `{self._step}` returned {result!r}, "
            f"which is not a watermark",
            where=str(self._origin),
            fix="return None, or int milliseconds since 1970 UTC, at most those of the year 9999",
        )


def _call(step: str, origin: Origin, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except user_failures() as error:
        raise UserCodeError(
            f"the watermark generator of `{step}` raised {type(error).__name__}: {error}",
            where=str(origin),
            detail="".join(traceback.format_exception(error)),
        ) from error
