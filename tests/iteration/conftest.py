"""Whole jobs run in the lab of tests/integration."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parents[1] / "integration" / "conftest.py"
_spec = importlib.util.spec_from_file_location("integration_conftest", _PATH)
assert _spec is not None
assert _spec.loader is not None
_integration = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _integration
_spec.loader.exec_module(_integration)
lab = _integration.lab
faults = _integration.faults
trouble = _integration.trouble
