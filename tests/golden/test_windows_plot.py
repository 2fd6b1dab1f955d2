"""Goal: the example that draws windows over time draws each window of the job where it lies."""

from __future__ import annotations

import importlib.util
from datetime import UTC, datetime
from pathlib import Path

from matplotlib.dates import num2date

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "windows_plot.py"


def test_each_window_is_a_step(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("windows_plot", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    windows = example.windows_of(rows=1_500)
    assert sum(window["visits"] for window in windows) == 1_500
    figure = example.draw(windows)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"/", "/search", "/cart"}
    starts = [num2date(at) for at in lines["/"].get_xdata(orig=False)]
    assert starts == [datetime(2026, 5, 1, 8, minute, tzinfo=UTC) for minute in (0, 10, 20, 30)]
    for page, line in lines.items():
        counts = {w["window_start"]: w["visits"] for w in windows if w["page"] == page}
        assert list(line.get_ydata())[:3] == [counts[start] for start in sorted(counts)]
    figure.savefig(tmp_path / "windows.svg")
    assert "<svg" in (tmp_path / "windows.svg").read_text()
