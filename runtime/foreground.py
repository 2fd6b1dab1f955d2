"""Runs a job to its end in the thread that asks for it, and lets signals stop it."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable

from .control.interrupts import Interrupts
from .control.job_client import Event
from .job_spec import JobSpec
from .protocol.job_result import JobOutcome


def run_in_foreground(
    spec: JobSpec, cluster: str, on_event: Callable[[Event], None] | None
) -> JobOutcome:
    """Run the job. Ctrl-C and SIGTERM stop it with a final checkpoint, unless the program handles them.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C a second time, or before the job had begun.
        HeadgateError: as `launch` raises it.
    """
    from .cluster.launch import launch

    if not _signals_are_free():
        return asyncio.run(launch(spec, cluster, on_event=on_event))
    outcome = asyncio.run(_run(spec, cluster, on_event))
    if outcome is None:
        raise KeyboardInterrupt
    return outcome


def _signals_are_free() -> bool:
    """True in the main thread of a program that has set no handlers of its own."""
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )


async def _run(
    spec: JobSpec, cluster: str, on_event: Callable[[Event], None] | None
) -> JobOutcome | None:
    """How the job ended; None: the user wanted it to end at once."""
    from .cluster.launch import launch

    interrupts = Interrupts(
        _say, checkpoints=spec.checkpoint is not None, hands_over=spec.outside_run
    )
    with interrupts:
        try:
            outcome = await launch(
                spec,
                cluster,
                on_event=on_event,
                on_listening=interrupts.listening,
                on_connected=interrupts.connected,
            )
        except asyncio.CancelledError:
            if not interrupts.cancelled:
                raise
            return None
    return None if interrupts.cancelled and outcome.status == "CANCELED" else outcome


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
