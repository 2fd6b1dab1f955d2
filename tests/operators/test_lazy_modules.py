"""Polars is loaded in the middle of a job, and changes nothing of the process."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from headgate.operators.functions.user_code import is_failure
from headgate.tests.support.commands import ended_with

HANDLED = """
import ctypes
import signal
import sys
import threading

native = ctypes.pythonapi.PyOS_getsig
native.restype = ctypes.c_void_p
signal.signal(signal.SIGINT, lambda number, frame: None)
before = native(signal.SIGINT)

from headgate.operators.lazy_modules import pl

assert "polars" not in sys.modules
if sys.argv[1] == "main":
    pl.DataFrame
else:
    thread = threading.Thread(target=lambda: pl.DataFrame)
    thread.start()
    thread.join()
assert "polars" in sys.modules
assert native(signal.SIGINT) == before, "Polars ends its queries with KeyboardInterrupt"
"""


@pytest.mark.parametrize("thread", ["main", "another"])
def test_ctrl_c_stays_with_a_program_that_handles_it(thread: str) -> None:
    """Else a job that is stopped with Ctrl-C ends at once, if a query of Polars runs just then."""
    done = subprocess.run([sys.executable, "-c", HANDLED, thread], capture_output=True, text=True)
    ended_with(done, 0)


def test_an_exception_is_told_right_while_another_thread_imports_polars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A module that is being imported is there, and has no names yet."""
    monkeypatch.setitem(sys.modules, "polars.exceptions", ModuleType("polars.exceptions"))
    assert is_failure(ValueError())
    assert not is_failure(KeyboardInterrupt())
