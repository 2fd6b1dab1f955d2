"""Temporary directories of processes that are killed do not stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from headgate.operators.private_directory import own_directory

HOLDS = """
import sys, time
from pathlib import Path
from headgate.operators.private_directory import own_directory
with own_directory(Path(sys.argv[1]), "hg-test-") as directory:
    (directory / "socket").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_a_killed_process_is_swept_up_after_by_the_next(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    left = Path(holder.stdout.readline().strip())
    with own_directory(tmp_path, "hg-test-") as directory:
        assert sorted(tmp_path.iterdir()) == sorted([left, directory])
    assert list(tmp_path.iterdir()) == [left]
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    assert (left / "socket").exists()
    with own_directory(tmp_path, "hg-test-") as directory:
        assert list(tmp_path.iterdir()) == [directory]


def test_what_has_no_lock_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "hg-test-other").mkdir()
    with own_directory(tmp_path, "hg-test-"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["hg-test-other"]
