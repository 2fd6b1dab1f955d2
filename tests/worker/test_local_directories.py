"""Workers of one machine that come and go at the same moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.runtime.worker import local_directories
from headgate.runtime.worker.local_directories import LocalDirectories


def test_a_worker_starts_while_another_one_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = LocalDirectories([tmp_path], "leaving")
    lock = local_directories.take_lock

    def leave_before(path: Path, *, wait: bool) -> int | None:
        if not wait:
            leaving.close()  # its directory was found, and is no more
        return lock(path, wait=wait)

    monkeypatch.setattr(local_directories, "take_lock", leave_before)
    coming = LocalDirectories([tmp_path], "coming")
    assert coming.subtask(1, 0, 0).of_operator("count").is_dir()
    coming.close()
