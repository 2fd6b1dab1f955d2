"""The example of a connector of one's own passes the conformance kit, as its page says."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "connector"
LINES_MAX = 150

globals().update(
    {
        name: made
        for name, made in runpy.run_path(str(EXAMPLE / "test_sqlite_table.py")).items()
        if name.startswith("test_")
    }
)


def test_it_is_short() -> None:
    lines = (EXAMPLE / "sqlite_table.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < LINES_MAX
