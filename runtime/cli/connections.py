"""Asks the services of all sources and sinks of a job whether it could use them: `validate --connect`."""

from __future__ import annotations

import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from ...errors import HeadgateError
from ...operators.clock import SystemClock
from .console import say

if TYPE_CHECKING:
    from ...operators.graph import Node
    from ...operators.sink import Sink
    from ...operators.source import Source
    from ..job import Job


@dataclass
class _Answer:
    """The answer for one source or sink.

    Attributes:
        found: what was found there; None: nothing was found yet.
        error: the reason why it cannot be used.
    """

    found: str | None = None
    error: HeadgateError | None = None


def print_connections(job: Job, timeout_s: float) -> bool:
    """Print a line for each source and sink of a job; return True if all can be used.

    All are asked at the same time, in threads. A library may not let its thread end in time, so the threads
    do not keep the process alive.

    Args:
        job: has no mistakes.
        timeout_s: the longest time to wait for all of them.
    """
    from ..job import runnable

    inside = runnable(job)
    asked: list[tuple[str, Node, threading.Thread, _Answer]] = []
    for node in inside.graph.nodes:
        for kind, connector in (("source", node.source), ("sink", node.sink)):
            if connector is not None:
                answer = _Answer()
                thread = threading.Thread(
                    target=_ask, args=(connector, inside.options, answer), daemon=True
                )
                thread.start()
                asked.append((f"{kind} `{node.name}`", node, thread, answer))
    clock = SystemClock()
    deadline = clock.monotonic() + timeout_s
    good = True
    for name, node, thread, answer in asked:
        thread.join(max(0.0, deadline - clock.monotonic()))
        if answer.error is None and answer.found is None:
            answer.error = HeadgateError(
                f"there was no answer within {timeout_s:g} s",
                fix="check the address and the firewalls; --connect-timeout waits longer",
            )
        if answer.error is None:
            typer.echo(
                f"ok: {name}: {answer.found or 'nothing to connect to'}, at {node.origin.location}"
            )
        else:
            good = False
            error = answer.error
            say(f"error: {name}: {_placed(error, node.origin.location)}")
    return good


def _placed(error: HeadgateError, where: str) -> str:
    """Return the text of an error with the place of the step, unless the error names another place.

    A place may be followed by the text of the line, which may have a password in it.
    """
    own = error.where.partition("  ")[0]
    return str(HeadgateError(error.message, where=own or where, fix=error.fix))


def _ask(connector: Source | Sink, options: dict[str, str], answer: _Answer) -> None:
    """Ask one service; runs in a thread."""
    from ...operators.connections import check_connection

    try:
        answer.found = check_connection(connector, options)
    except HeadgateError as error:
        answer.error = error
    except Exception as error:
        # Its text may have a secret, as the connector did not expect this error.
        last = traceback.extract_tb(error.__traceback__)[-1]
        answer.error = HeadgateError(
            f"the check of the connection failed with {type(error).__name__} in "
            f"{last.filename}:{last.lineno}",
            fix="this is a mistake in the connector; please report it to its author",
        )
