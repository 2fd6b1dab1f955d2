"""The local directory of one subtask: state that lies in files, and files on their way to the store."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from ..protocol import names


class SubtaskDirectory:
    """A directory that exists from its first use until `delete`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers = itertools.count()

    def of_operator(self, operator: str) -> Path:
        """The directory that belongs to an operator alone."""
        return self._made(self.path / names.local_dir(operator))

    def temporary_file(self) -> Path:
        """A path nobody uses, in a directory that exists; whoever asked removes the file. Any thread."""
        return self._made(self.path / "transfers") / f"{next(self._numbers)}"

    def delete(self) -> None:
        """Remove everything. Blocking; what cannot be removed now is swept when a worker starts."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _made(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        return path
