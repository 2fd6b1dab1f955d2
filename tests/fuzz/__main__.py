"""`python -m headgate.tests.fuzz`: run the targets in turn until the time is over.

Cases run in a child process for each target, because a finding may be a crash or a hang. Before each case
the child writes its seed, so the parent knows which case it was. Whether a case hangs is told from the CPU
time of the child, not from the clock: on a machine with much to do a case may take any time, and so may the
start of the child.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import pkgutil
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

import headgate.tests.fuzz as home

CASE_CPU_S_MAX = 60.0
"""A case that uses more CPU time hangs. The slowest ones use about a second."""
LOOK_EVERY_S = 10.0
IDLE_LOOKS_MAX = 12
"""A child that used no CPU time in this number of looks in a row waits for something that never comes."""
IDLE_CPU_S = 0.01
STACK_S = 10.0
"""A child that hangs has this time to say where."""
CASES_PER_CHILD = 500
FINDINGS_MAX = 10


def targets() -> list[str]:
    """The names of all targets."""
    names = (module.name for module in pkgutil.iter_modules(home.__path__))
    return sorted(n for n in names if not n.startswith(("_", "test_", "support")))


def load(target: str) -> Callable[[random.Random], None]:
    """The function that runs one case of `target`."""
    run: Callable[[random.Random], None] = importlib.import_module(f"{home.__name__}.{target}").run
    return run


@dataclass
class Findings:
    """The cases that were run, and the findings."""

    cases: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)

    def add(self, target: str, seed: int, what: str) -> None:
        """Note a finding, and print how to run its case again."""
        self.found.append(target)
        print(f"\nFINDING in {target}, seed {seed}:\n{what.rstrip()}")
        print(
            f"once more: python -m headgate.tests.fuzz --target {target} --case {seed}", flush=True
        )


def run_child(target: str, first: int, count: int, findings: Findings) -> int:
    """Run cases `first` to `first + count - 1`; returns the number of the next case to run."""
    command = [sys.executable, "-m", home.__name__, "--target", target]
    child = subprocess.Popen(
        [*command, "--child", str(first), str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: queue.Queue[str | None] = queue.Queue()
    thread = threading.Thread(target=_read, args=(child, lines), daemon=True)
    thread.start()
    case, output = first, []
    patience = Patience(cpu_seconds(child.pid))
    hangs = ""
    try:
        while not hangs:
            try:
                line = lines.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                hangs = patience.look(cpu_seconds(child.pid))
                continue
            if line is None:
                break
            if line.startswith("case "):
                case, output = int(line.split()[1]), []
                patience.begin(cpu_seconds(child.pid))
                findings.cases[target] += 1
            else:
                output.append(line)
        if hangs:
            child.send_signal(signal.SIGABRT)  # it writes its stack, and dies
            thread.join(STACK_S)
    finally:
        child.kill()
        code = child.wait()
        thread.join()
    if hangs:
        rest = [line for line in iter(lines.get, None) if line is not None]
        findings.add(target, case, f"{hangs}\n{''.join(output)}{''.join(rest)}")
        return case + 1
    if code == 0:
        return first + count
    findings.add(target, case, f"the process ended with {code}\n{''.join(output[-60:])}")
    return case + 1


def cpu_seconds(pid: int) -> float:
    """The CPU time that a process has used."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


class Patience:
    """Tells a case that hangs from one that is slow, by the CPU time that its process has used."""

    def __init__(self, used: float) -> None:
        """`used`: CPU time so far, in seconds, as everywhere here."""
        self._idle = 0
        self._last = used
        self._began: float | None = None
        """Used when the case began; None: the process is only starting, which is no case."""

    def begin(self, used: float) -> None:
        """A case begins."""
        self._idle = 0
        self._last = self._began = used

    def look(self, used: float) -> str:
        """Called when nothing was heard for `LOOK_EVERY_S`; returns why the case hangs, if it does."""
        self._idle = self._idle + 1 if used - self._last < IDLE_CPU_S else 0
        self._last = used
        if self._began is not None and used - self._began > CASE_CPU_S_MAX:
            return f"no end within {CASE_CPU_S_MAX:.0f} s of CPU time"
        if self._idle >= IDLE_LOOKS_MAX:
            return f"no CPU time used for {IDLE_LOOKS_MAX * LOOK_EVERY_S:.0f} s: it waits"
        return ""


def _read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


def child(target: str, first: int, count: int) -> None:
    """The child: run the cases one after the other; the first finding ends it."""
    faulthandler.enable(sys.stdout)
    run = load(target)
    for seed in range(first, first + count):
        print(f"case {seed}", flush=True)
        one(run, target, seed)


def one(run: Callable[[random.Random], None], target: str, seed: int) -> None:
    """One case; exits with 1 if it is a finding."""
    try:
        run(random.Random(f"{target} {seed}"))
    except Exception:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(1)


def main() -> int:
    """Parse the arguments, and run."""
    parser = argparse.ArgumentParser("python -m headgate.tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="number of the first case (default: 1)")
    parser.add_argument("--target", choices=targets(), help="only this one (default: all in turn)")
    parser.add_argument("--case", type=int, help="run one case in this process; needs --target")
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.target, *arguments.child)
        return 0
    if arguments.case is not None:
        if arguments.target is None:
            parser.error("--case needs --target")
        one(load(arguments.target), arguments.target, arguments.case)
        print("no finding")
        return 0
    return fuzz(arguments.seconds, arguments.seed, arguments.target)


def fuzz(seconds: float, seed: int, only: str | None) -> int:
    """Run targets in turn; returns the exit code."""
    names = [only] if only else targets()
    began, findings = time.monotonic(), Findings()
    following = dict.fromkeys(names, seed)
    share = dict.fromkeys(names, 0.0)
    while (spent := time.monotonic() - began) < seconds and len(findings.found) < FINDINGS_MAX:
        target = min(names, key=lambda name: share[name])  # each gets the same time
        following[target] = run_child(target, following[target], CASES_PER_CHILD, findings)
        share[target] += time.monotonic() - began - spent
        done = ", ".join(f"{name} {findings.cases[name]:,}" for name in names)
        print(f"{time.monotonic() - began:6.0f} s: {done}", flush=True)
    counted = Counter(findings.found)
    for name in names:
        last = following[name] - 1
        print(
            f"{name}: {findings.cases[name]:,} cases, seeds {seed} to {last}, "
            f"{counted[name]} findings, {share[name]:.0f} s"
        )
    return 1 if findings.found else 0


if __name__ == "__main__":
    sys.exit(main())
