"""Pictures of dashboards, drawn by matplotlib, and not by Grafana, from the data of a Prometheus.

Tests call `draw` if `HEADGATE_DASHBOARD_PICTURES` names a directory; `make dashboards` does so.
"""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable, Sequence
from math import ceil, isfinite
from pathlib import Path
from typing import Any, Final, TypeAlias

from headgate.k8s.monitoring.evaluate import filled
from headgate.k8s.monitoring.grafana import Board, Panel, expanded
from headgate.tests.support.prometheus import Prometheus

VARIABLE: Final = "HEADGATE_DASHBOARD_PICTURES"
SECONDS: Final = 60
"""The period that a picture shows."""
LINES_NAMED_MAX: Final = 7
"""Series of a panel with their names; further ones are drawn without."""
NAME_MAX: Final = 34
Points: TypeAlias = list[tuple[float, float]]
Series: TypeAlias = list[tuple[str, Points]]
"""Points in time, in seconds before the end of the picture, by the name of their series."""
_COLUMNS: Final = 3
_INK: Final = "#30343b"
_FAINT: Final = "#8a9099"
_COLOURS: Final = (
    "#3366cc", "#d9822b", "#2e9e5b", "#c23b3b", "#7e57c2", "#00838f", "#a1887f", "#c2185b",
    "#789262", "#5c6bc0",
)  # fmt: skip


def wanted() -> Path | None:
    """Return the directory of the pictures; None if none are wanted."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def recorded(prometheus: Prometheus, board: Board, job_name: str) -> list[Series]:
    """Return the series of each panel of a dashboard, over the last `SECONDS`."""
    end = time.time()
    return [_series(prometheus, panel, job_name, end) for panel in board.panels]


def draw(board: Board, shown: Sequence[Series], directory: Path) -> None:
    """Write the picture of a dashboard with the series of its panels."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = board.panels
    rows = ceil(len(panels) / _COLUMNS)
    figure = pyplot.figure(figsize=(15, 0.7 + 2.9 * rows), facecolor="white")
    figure.suptitle(
        f"{board.title}: {board.description}", x=0.02, ha="left", fontsize=14, color=_INK
    )
    for number, (panel, series) in enumerate(zip(panels, shown, strict=True)):
        axes = figure.add_subplot(rows, _COLUMNS, number + 1)
        axes.set_title(panel.title, loc="left", fontsize=10, color=_INK)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(labelsize=7, colors=_FAINT)
        _DRAWN.get(panel.type, _lines)(axes, panel, series)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()), h_pad=1.6)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{board.uid}.png"
    figure.savefig(path, dpi=84)
    pyplot.close(figure)
    _with_few_colours(path)


def _with_few_colours(path: Path) -> None:
    from PIL import Image

    with Image.open(path) as image:
        image.convert("RGB").quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)


def _series(prometheus: Prometheus, panel: Panel, job_name: str, end: float) -> Series:
    """Return all series of a panel, by the names that the panel gives them."""
    made: Series = []
    for query in panel.queries:
        asked = filled(expanded(query.expression), namespace=".*", job_name=job_name, interval="5s")
        for one in prometheus.query_range(asked, end - SECONDS, end, 1):
            points = [(at - end, float(value)) for at, value in one["values"]]
            points = [(at, value) for at, value in points if isfinite(value)]
            if points:
                made.append((_name(query.legend, one["metric"]), points))
    return sorted(made)


def _name(legend: str, labels: dict[str, str]) -> str:
    for label in set(labels) | set(_named(legend)):
        legend = legend.replace(f"{{{{{label}}}}}", labels.get(label, ""))
    return textwrap.shorten(legend, NAME_MAX, placeholder="…") or "value"


def _named(legend: str) -> Sequence[str]:
    return [part.partition("}}")[0] for part in legend.split("{{")[1:]]


def _lines(axes: Any, panel: Panel, series: Series) -> None:
    if not series:
        return _nothing(axes, panel)
    for number, (name, points) in enumerate(series):
        label = name if number < LINES_NAMED_MAX else None
        axes.plot(*zip(*points, strict=True), lw=1.1, color=_COLOURS[number % 10], label=label)
    axes.set_xlim(-SECONDS, 0)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#e6e8eb", lw=0.6)
    axes.xaxis.set_major_formatter(lambda at, _: f"{at:.0f} s")
    axes.yaxis.set_major_formatter(lambda value, _: _text(value, panel.unit))
    title = f"and {len(series) - LINES_NAMED_MAX} more" if len(series) > LINES_NAMED_MAX else None
    axes.legend(
        fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.05), title=title,
        title_fontsize=7, labelcolor=_INK,
    )  # fmt: skip
    return None


def _numbers(axes: Any, panel: Panel, series: Series) -> None:
    """Draw the last value of each series in large type."""
    if not series:
        return _nothing(axes, panel)
    axes.axis("off")
    for number, (name, points) in enumerate(series):
        at = (number + 0.5) / len(series)
        shown = _text(points[-1][1], panel.unit)
        axes.text(at, 0.55, shown, ha="center", fontsize=17, color=_COLOURS[0])
        axes.text(at, 0.33, name, ha="center", fontsize=7, color=_FAINT)
    return None


def _table(axes: Any, panel: Panel, series: Series) -> None:
    """Draw a line with the last value of each series."""
    if not series:
        return _nothing(axes, panel)
    axes.axis("off")
    for number, (name, points) in enumerate(series[:10]):
        height = 0.9 - 0.1 * number
        axes.text(0.02, height, name, fontsize=8, color=_INK)
        axes.text(0.98, height, _text(points[-1][1], panel.unit), fontsize=8, ha="right")
    return None


def _timeline(axes: Any, panel: Panel, series: Series) -> None:
    """Draw a bar for each series where it has a value."""
    if not series:
        return _nothing(axes, panel)
    for number, (_, points) in enumerate(series):
        spans = [(at - 1, 1.05) for at, _ in points]
        axes.broken_barh(spans, (number + 0.1, 0.8), color=_COLOURS[number % 10])
    axes.set_xlim(-SECONDS, 0)
    axes.xaxis.set_major_formatter(lambda at, _: f"{at:.0f} s")
    axes.set_yticks([n + 0.5 for n in range(len(series))], [name for name, _ in series])
    return None


def _nothing(axes: Any, panel: Panel) -> None:
    axes.axis("off")
    said = f"no data: {panel.needs}" if panel.needs else "no data"
    axes.text(0.5, 0.5, textwrap.fill(said, 44), ha="center", fontsize=8, color=_FAINT)


_DRAWN: Final[dict[str, Callable[[Any, Panel, Series], None]]] = {
    "stat": _numbers,
    "table": _table,
    "state-timeline": _timeline,
}
_PREFIXES: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_RATES: Final = ("rps", "cps", "ops", "reqps")
_AFTER: Final = {
    "s": " s",
    "bytes": "B",
    "Bps": "B/s",
    "rps": "/s",
    "cps": "/s",
    "ops": "/s",
    "reqps": "/s",
}


def _text(value: float, unit: str) -> str:
    """Return a short text for a value with its unit."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s" and 0 < value < 1:
        return f"{1000 * value:.3g} ms"
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.3g} {prefix}{_AFTER.get(unit, '').strip()}"
    return f"{value:.3g}{_AFTER.get(unit, '')}"
