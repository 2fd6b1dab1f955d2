"""Workers of one machine that come and go at the same moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headgate.operators.private_directory import keep_newest
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


def test_a_directory_may_go_between_two_looks_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = LocalDirectories([tmp_path], "leaving")
    is_dir, found = Path.is_dir, []

    def leave_behind(path: Path) -> bool:
        answer = is_dir(path)
        if path.name.startswith("leaving"):
            found.append(answer)
            leaving.close()
        return answer

    monkeypatch.setattr(Path, "is_dir", leave_behind)
    coming = LocalDirectories([tmp_path], "coming")
    assert found == [True]
    coming.close()


def test_files_that_others_delete_meanwhile_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.log" for number in range(5)]
    for number, path in enumerate(paths):
        path.touch()
        os.utime(path, (number, number))
    stat = Path.stat

    def delete_before(path: Path, **options: Any) -> os.stat_result:
        if path == paths[1]:
            path.unlink(missing_ok=True)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", delete_before)
    keep_newest(tmp_path, "*.log", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.log", "4.log"]
