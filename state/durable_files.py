"""Local files and directories that outlive a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: str | Path) -> None:
    """Write a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(directory: Path) -> None:
    """Make a directory like `mkdir -p`, each of its parts durable in its own parent."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync(path.parent)
