"""Whole jobs run in the lab of tests/integration, on the paced source of tests/incremental."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(__file__).parents[1] / "incremental" / "conftest.py"
_spec = importlib.util.spec_from_file_location("incremental_conftest", _PATH)
assert _spec is not None
assert _spec.loader is not None
_incremental = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _incremental
_spec.loader.exec_module(_incremental)
lab = _incremental._integration.lab
faults = _incremental._integration.faults
trouble = _incremental._integration.trouble


@pytest.fixture
def paced() -> Any:
    return _incremental.Paced
