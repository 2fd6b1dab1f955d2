"""Calls of process functions under an error policy: a failed call leaves no changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ...errors import HeadgateError
from ...state.keyed.undo import UndoLog
from ..base import OperatorContext, Output
from ..elements import ObjectBatch
from ..functions.dead_letters import DeadLetters
from ..functions.user_code import user_error, user_failures
from ..per_record.base import UserFunction
from .emitter import Emitter

R = TypeVar("R")


class Attempts:
    """The calls of one operator subtask whose policy is not to fail at once.

    Attributes:
        undo: records the changes of state and timers of a call.
    """

    def __init__(
        self,
        user: UserFunction,
        undo: UndoLog,
        emitter: Emitter,
        context: OperatorContext,
        output: Output,
    ) -> None:
        self.undo = undo
        self._user = user
        self._emitter = emitter
        self._letters = DeadLetters(user.step, user.origin, user.on_error)
        if user.on_error.then != "fail":
            self._letters.open(context, output)

    def call(self, function: Callable[[], R], cause: Any) -> tuple[R | None, BaseException | None]:
        """Return what `function` returns for `cause`, or the error of its last attempt with no changes.

        After an error the current key is undefined.

        Raises:
            HeadgateError: the function raised one, to which no policy applies.
            UserCodeError: it raised after a change that cannot be undone.
        """
        attempts, failure = self._user.on_error.retries + 1, None
        for _ in range(attempts):
            self.undo.begin()
            self._emitter.hold()
            try:
                made = function()
            except HeadgateError:
                raise
            except user_failures() as error:
                if self.undo.final:
                    raise user_error(self._user.step, self._user.origin, cause, error) from error
                self.undo.roll_back()
                self._emitter.take_back()
                failure = error
            else:
                self.undo.keep()
                self._emitter.release()
                return made, None
        return None, failure

    def give_up(self, cause: Any, key: Any, time: int | None, error: BaseException) -> None:
        """Make a dead letter of a record or timer whose last attempt failed.

        Raises:
            UserCodeError: the policy is to fail.
        """
        if self._user.on_error.then == "fail":
            raise user_error(self._user.step, self._user.origin, cause, error) from error
        times = None if time is None else np.array([time], np.int64)
        self._letters.take(ObjectBatch([cause], times), [error], [key])

    def check(self, made: list[Any]) -> list[Any]:
        """Raise RowMismatch if a result does not fit the columns of `into`."""
        if self._user.into is not None and made:
            self._user.columns(made, None)
        return made
