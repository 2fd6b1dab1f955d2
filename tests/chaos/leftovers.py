"""Files that the processes of a job leave in its temporary directory, now that all are gone."""

from __future__ import annotations

from pathlib import Path

from headgate.operators.private_directory import LOCK_FILE, own_directory
from headgate.runtime.worker.local_directories import LocalDirectories


def left_in(temporary: Path) -> list[Path]:
    """Files that another run in the same directory would not delete either."""
    for prefix in ("hg-worker-", "hg-ray-"):
        with own_directory(temporary, prefix):
            pass
    LocalDirectories([temporary], "last").close()
    files = [path for path in temporary.rglob("*") if not path.is_dir()]
    # The failures of jobs that have ended are kept on purpose, for `headgate history`.
    kept = [path for path in files if path.name.startswith("ended-") and path.suffix == ".json"]
    return [path for path in files if path.name != LOCK_FILE and path not in kept]
