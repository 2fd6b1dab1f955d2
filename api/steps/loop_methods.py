"""The stream methods that make loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...operators.durations import Duration
from ...operators.expressions.expressions import ExpressionLike
from ...operators.origin import capture_origin
from ..required_name import named
from ..stream_base import StreamBase

if TYPE_CHECKING:
    from ..stream import Stream

T = TypeVar("T")
U = TypeVar("U")
_STATE = "records under way in the loop are stored under this name"


class Loops(StreamBase[T], Generic[T]):
    """Steps that feed records back."""

    @named("iteration", _STATE)
    def iterate(
        self,
        body: Callable[[Stream[T]], tuple[StreamBase[T], Stream[U]]],
        *,
        name: str,
        wait: Duration = "0s",
        parallelism: int | None = None,
    ) -> Stream[U]:
        """Add a loop: `body(stream) -> (feedback, output)`; records of `feedback` go back into `stream`.

        It ends when the inputs have ended and no records are in flight in it any more.

        Args:
            body: called once, now, to build the steps of the loop.
            name: the address of the state.
            wait: the loop ends only after it was empty for this long.
            parallelism: of both ends of the loop.
        """
        from .loops import add_iterate

        origin = capture_origin()
        return add_iterate(self, body, name=name, wait=wait, parallelism=parallelism, origin=origin)

    @named("iteration", _STATE)
    def iterate_rounds(
        self,
        body: Callable[[Stream[T]], tuple[StreamBase[T], Stream[U]]],
        *,
        name: str,
        max_rounds: int,
        while_any: ExpressionLike | Callable[[T], Any] | None = None,
        parallelism: int | None = None,
    ) -> Stream[U]:
        """Add a loop in rounds, for input that ends: the feedback of one round is the input of the next.

        Event time in the loop is the number of the round, from 0; when a round is over in all
        subtasks, it is the watermark. The loop ends after a round without feedback, or as
        `while_any` or `max_rounds` say; then the feedback of the last round is dropped.

        Args:
            body: called once, now, to build the steps of the loop.
            name: the address of the state.
            max_rounds: the most rounds.
            while_any: there is another round only if this holds for some record of the feedback.
            parallelism: of both ends of the loop.
        """
        from .loops import add_rounds

        origin = capture_origin()
        return add_rounds(
            self,
            body,
            name=name,
            max_rounds=max_rounds,
            while_any=while_any,
            parallelism=parallelism,
            origin=origin,
        )
