"""Guards a user's generator: its errors name the user's line, and its results are checked."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, final

import numpy as np

from ...errors import UserCodeError
from ..elements import WATERMARK_MIN, Timestamps
from ..functions.user_code import FAILURES
from ..origin import Origin
from ..time_range import INSTANT_MAX_MS
from .generators import BoundedGenerator, WatermarkGenerator


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
    except FAILURES as error:
        raise UserCodeError(
            f"the watermark generator of `{step}` raised {type(error).__name__}: {error}",
            where=str(origin),
            detail="".join(traceback.format_exception(error)),
        ) from error
