"""The local directory of one subtask: state in files, and files to be uploaded."""

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
        """Return the private directory of an operator."""
        return self._made(self.path / names.local_dir(operator))

    def temporary_file(self) -> Path:
        """Return an unused path in an existing directory; the caller removes the file.

        For any thread.
        """
        return self._made(self.path / "transfers") / f"{next(self._numbers)}"

    def delete(self) -> None:
        """Remove everything. Blocking; leftovers are swept when a worker starts."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _made(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        return path
