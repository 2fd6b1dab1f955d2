"""The way of a barrier in ARCHITECTURE.md, file by file, is the way that it takes."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.operators.elements import CheckpointBarrier
from headgate.runtime.control.messages import CheckpointAcked, SubtaskAck, TriggerCheckpoint
from headgate.runtime.protocol.joblog import CheckpointEntry

ROOT = Path(hg.__file__).parent
FILES_MAX = 25
CARRIED = (CheckpointBarrier, CheckpointAcked, CheckpointEntry, SubtaskAck, TriggerCheckpoint)
"""The forms that a checkpoint has on its way from the coordinator to the sinks, and back into the log."""
ASIDE = {
    "runtime/coordinator/placement.py": "says whether an acknowledgement is of the present attempt",
    "state/sealed.py": "encodes the entry of the log",
}
"""Files that a checkpoint passes as well, and that nobody needs to open: the reason for each."""


def road() -> list[str]:
    """The files of the table, in their order."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.partition("### The whole way, file by file\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|") and ".py" in line]
    return [file for row in rows for file in re.findall(r"`([\w/]+\.py)`", row)]


class Visited:
    """The files of headgate in which functions were called, and those that were given a checkpoint."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self.given: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{ROOT}/"):
            return
        self.called.add(code.co_filename)
        if code.co_filename in self.given:
            return
        count = code.co_argcount + code.co_kwonlyargcount
        values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        if any(isinstance(value, CARRIED) for value in values):
            self.given.add(code.co_filename)


def test_the_way_of_a_barrier_is_the_one_that_is_described(tmp_path: Path) -> None:
    files = road()
    assert len(files) == len(set(files)) <= FILES_MAX
    assert [file for file in files if not (ROOT / file).is_file()] == []

    rows = collect(guarantee="exactly_once")
    job = hg.Job("road", parallelism=2)
    job.checkpoint(every="10s", storage=str(tmp_path))
    numbers = job.read(from_list(list(range(100)), batch_rows=10), name="in")
    keyed = numbers.key_with(lambda number: number % 3)
    keyed.reduce(lambda a, b: a + b, name="sums").write(rows, name="out")
    visited = Visited()
    threading.setprofile(visited)
    sys.setprofile(visited)
    try:
        job.run()  # the last checkpoint is taken behind the last record
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert len(rows.rows) == 100
    given = {str(Path(name).relative_to(ROOT)) for name in visited.given}
    called = {str(Path(name).relative_to(ROOT)) for name in visited.called}
    assert sorted(given - set(files) - ASIDE.keys()) == []
    assert files[0] == "__init__.py"  # it may have given its names to an earlier test
    assert [file for file in files[1:] if file not in called] == []
