"""The life cycle of function objects: `open` before the first record, `close` at the end, a copy
per subtask.

They may also have `finish`, whose results are emitted at the end of the input, and methods for
checkpoint notices.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import HeadgateError, PlanError
from ...state.keyed.descriptors import StateDescriptor
from ..base import Operator, OperatorContext, OperatorFactory
from ..elements import Batch, ColumnBatch, ObjectBatch
from ..origin import Origin
from ..rows import PER_RECORD_ROWS, RowMismatch, to_columns
from ..schema import difference
from .checks import is_async
from .user_code import bad_result, user_error, user_failures

FINISH: Final = "finish"
_CHECKPOINTS: Final = ("on_checkpoint_complete", "on_checkpoint_aborted")
_METHODS: Final = {"open": (None,), "close": (), FINISH: (), **dict.fromkeys(_CHECKPOINTS, (0,))}
"""The methods of a function object, each with sample arguments of its call."""
_NO_OBJECTS = (type, FunctionType, BuiltinFunctionType, MethodType)


class CopiedFunction:
    """The life cycle of one subtask's copy of a function object."""

    def __init__(
        self, function: Any, step: str, origin: Origin, results: FinishResults | None
    ) -> None:
        self._function, self._step, self._origin = function, step, origin
        self._results = results
        self._opened = False
        self._completed = 0

    async def open(self, context: OperatorContext) -> None:
        """Call its `open(ctx)`, and await it if it is a coroutine function.

        Raises:
            UserCodeError: it raised.
        """
        await self._call("open", context)
        self._opened = True

    async def close(self) -> None:
        """Call its `close()`, once and only if it was opened.

        Raises:
            UserCodeError: it raised.
        """
        if self._opened:
            self._opened = False
            await self._call("close")

    @property
    def finishes(self) -> bool:
        """True if the function has a `finish`."""
        return hasattr(self._function, FINISH)

    async def finish(self, emit: Callable[[Batch], None], time: int) -> None:
        """Call its `finish()` and emit the results.

        Args:
            emit: takes the results.
            time: the event time of the results in a stream that has event time, ms.

        Raises:
            UserCodeError: it raised, or its results do not fit the step.
        """
        assert self._results is not None  # checked when the step was added
        made = await self._call(FINISH, collect=True)
        for batch in self._results.batches(made, time, self._step, self._origin):
            emit(batch)

    async def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Tell the function that a checkpoint is durable: each at most once, and in order.

        Raises:
            UserCodeError: it raised.
        """
        if checkpoint_id > self._completed:
            self._completed = checkpoint_id
            await self._call("on_checkpoint_complete", checkpoint_id)

    async def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Tell the function that a checkpoint will never complete.

        Raises:
            UserCodeError: it raised.
        """
        await self._call("on_checkpoint_aborted", checkpoint_id)

    async def _call(self, name: str, *arguments: Any, collect: bool = False) -> Any:
        method = getattr(self._function, name, None)
        if method is None:
            return None
        try:
            made = method(*arguments)
            if inspect.isasyncgen(made):
                return [item async for item in made]
            if inspect.isawaitable(made):
                made = await made
            # A generator runs here, so that its errors are the user's.
            return list(made) if collect and inspect.isgenerator(made) else made
        except HeadgateError:
            raise
        except user_failures() as error:
            raise user_error(self._step, self._origin, None, error) from error


class FinishResults(msgspec.Struct, frozen=True):
    """The results of a step, for those of `finish`. Picklable.

    Attributes:
        schema: the columns; None: Python objects.
        timed: they have event times.
        whole: `finish` makes record batches, not records.
    """

    schema: pa.Schema | None
    timed: bool
    whole: bool = False

    def batches(self, made: Any, time: int, step: str, origin: Origin) -> Iterator[Batch]:
        """Yield the results as batches, all with one event time.

        Raises:
            UserCodeError: they do not fit the step.
        """
        if made is None:
            return
        if self.whole and isinstance(made, pa.RecordBatch):
            made = [made]
        if isinstance(made, str | bytes | dict) or not isinstance(made, Iterable):
            problem = f"returned one {type(made).__name__} from finish"
            raise bad_result(step, origin, made, problem, fix="return a list, or yield")
        items = list(made)
        try:
            found = map(self._checked, items) if self.whole else self._of_records(items)
            for data in found:
                rows = len(data) if isinstance(data, list) else data.num_rows
                times = np.full(rows, time, np.int64) if self.timed else None
                yield (
                    ObjectBatch(data, times) if isinstance(data, list) else ColumnBatch(data, times)
                )
        except RowMismatch as error:
            problem = f"{error} (in finish)"
            raise bad_result(step, origin, items[error.index], problem) from error

    def _of_records(self, records: list[Any]) -> Iterator[pa.RecordBatch | list[Any]]:
        for low in range(0, len(records), PER_RECORD_ROWS):
            some = records[low : low + PER_RECORD_ROWS]
            yield some if self.schema is None else to_columns(some, self.schema)

    def _checked(self, data: Any) -> pa.RecordBatch:
        assert self.schema is not None
        if not isinstance(data, pa.RecordBatch):
            raise RowMismatch(f"returned a {type(data).__name__}, not a pyarrow.RecordBatch", 0)
        if problem := difference(self.schema, data.schema):
            raise RowMismatch(f"returned other columns than promised: {problem}", 0)
        return data.select(self.schema.names).cast(self.schema)


class OwnFunction:
    """A factory of operators, each with its own copy of the step's function object."""

    def __init__(
        self,
        factory: OperatorFactory,
        function: Any,
        step: str,
        origin: Origin,
        results: FinishResults | None,
    ) -> None:
        self._factory, self._function = factory, function
        self._step, self._origin, self._results = step, origin, results

    def __call__(self) -> Operator:
        # They are copied together, so that the function inside the factory is the one that is
        # opened.
        factory, function = copy.deepcopy((self._factory, self._function))
        operator: Operator = factory()
        operator.function_life = CopiedFunction(function, self._step, self._origin, self._results)
        operator.emits_at_end = operator.function_life.finishes
        return operator


def has_life(function: object) -> bool:
    """Return True for function objects with a method that is called besides the records."""
    if isinstance(function, _NO_OBJECTS):
        return False
    return any(callable(getattr(function, name, None)) for name in _METHODS)


def with_life(
    factory: OperatorFactory,
    function: object,
    step: str,
    origin: Origin,
    results: FinishResults | None,
) -> OperatorFactory:
    """Wrap `factory` so that each subtask gets a copy of a function object with a life cycle.

    That is an object with `open`, `close`, `finish` or methods for checkpoints.

    Args:
        factory: makes the operators of the step.
        function: the user's.
        step: its name, for errors.
        origin: the user's line.
        results: the results of the step; None: its function may have no `finish`.

    Raises:
        PlanError: one of these methods cannot be called, or the class declares state.
    """
    while isinstance(function, partial):
        function = function.func
    _refuse_state(function, origin)
    if not has_life(function):
        return factory
    check_life(function, origin)
    if results is None and hasattr(function, FINISH):
        raise PlanError(
            f"finish of `{type(function).__name__}` would never be called: this step makes a result of "
            "each record only",
            where=str(origin),
            fix="add a map or a process function with finish after it",
        )
    return OwnFunction(factory, function, step, origin, results)


def _refuse_state(function: object, origin: Origin) -> None:
    """Refuse declared state that would not be kept, without any warning."""
    kind = type(function)
    for base in kind.__mro__:
        for attribute, value in vars(base).items():
            if isinstance(value, StateDescriptor):
                raise PlanError(
                    f"`{kind.__name__}.{attribute}` declares state, and functions of map, filter and the "
                    "like keep none: it would be in no checkpoint",
                    where=str(origin),
                    fix=f"derive {kind.__name__} from hg.Process (without a key) or hg.KeyedProcess and "
                    "call .process(...)",
                )


def check_life(function: object, origin: Origin, *, may_await: bool = True) -> None:
    """Raise PlanError if one of its life-cycle methods cannot be called with its arguments."""
    for name, arguments in _METHODS.items():
        method = getattr(function, name, None)
        if method is None:
            continue
        if not may_await and is_async(method):
            raise PlanError(
                f"{name} of `{type(function).__name__}` is a coroutine function, which is not awaited here",
                where=str(origin),
                fix="make it a plain function",
            )
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            raise PlanError(
                f"{name} of `{type(function).__name__}` cannot be called: {error}",
                where=str(origin),
                fix="write def open(self, ctx), with the context of the subtask; def close(self); "
                "def finish(self); def on_checkpoint_complete(self, checkpoint_id)",
            ) from None
