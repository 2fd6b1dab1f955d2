"""Load a Python file that no import reaches, such as an example."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load(path: Path, name: str = "") -> Any:
    """Execute the file, and return it as a new module.

    Args:
        path: The file.
        name: Its name in `sys.modules`, by which pickles find what the module defines. The default is
        the name of the directory followed by that of the file.
    """
    name = name or f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
