"""Goal: Ctrl-C ends a command that waits, whichever thread gets the signal and whenever it comes.

Method: a process whose main thread waits for nothing in its loop, while another thread takes the signal.
For Python that is the same as a signal which comes right before the loop begins to wait.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

from headgate.runtime.cli.foreground import run_until_interrupted
from headgate.tests.support.threads import begun

WAIT_S = 60.0
PROGRAM = """
import asyncio, os, signal, sys, threading, time
from headgate.runtime.cli.foreground import run_until_interrupted
from headgate.tests.support.threads import begun

def interrupt():
    time.sleep(0.3)  # by now the loop waits; if it does not, the test proves less and still passes
    os.kill(os.getpid(), signal.SIGINT)

async def wait():
    try:
        await asyncio.Event().wait()
    finally:
        print("closed", flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=interrupt, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # of this thread only
try:
    run_until_interrupted(wait())
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_signal_that_another_thread_gets_ends_the_wait() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stdout) == (130, "closed\n"), done.stderr


def test_it_runs_in_any_thread() -> None:

    async def answer() -> int:
        await asyncio.sleep(0)
        return 3

    assert begun(lambda: run_until_interrupted(answer())).result() == 3
    assert run_until_interrupted(answer()) == 3
