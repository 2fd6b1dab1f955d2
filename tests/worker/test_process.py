"""Settings of worker processes, in a process of their own: they are the interpreter's."""

from __future__ import annotations

import subprocess
import sys

from headgate.runtime.cluster.process import SWITCH_INTERVAL_S

CODE = """
import sys
from headgate.runtime.cluster.process import tune_process
before = sys.getswitchinterval()
tune_process()
print(before, sys.getswitchinterval())
"""


def test_threads_beside_a_function_that_computes_wait_less_than_python_lets_them() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before_s, after_s = map(float, done.stdout.split())
    assert after_s == SWITCH_INTERVAL_S
    assert after_s <= before_s / 10
