"""Charts of the benchmarks as SVG, drawn by matplotlib: bars, or lines over a few labels."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from math import floor, log10

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

_COLOURS = ("#3465a4", "#cc7722", "#4e9a06", "#a40000", "#75507b")
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "headgate", "font.size": 9}
"""Text stays text, and the same figures make the same file."""


def bars(
    title: str,
    unit: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    log: bool = False,
) -> Figure:
    """Draw one bar per group and series."""
    figure, axes = _axes(title, unit, groups, log)
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        shift = (number - (len(series) - 1) / 2) * width
        places = [group + shift for group in range(len(groups))]
        axes.bar(places, values, 0.9 * width, color=_COLOURS[number], label=name)
    return _with_legend(figure, axes)


def lines(
    title: str,
    unit: str,
    xs: Sequence[str],
    series: Mapping[str, Sequence[float]],
    log: bool = False,
) -> Figure:
    """Draw one line per series; the distances between the labels on the x-axis are equal."""
    figure, axes = _axes(title, unit, xs, log)
    for number, (name, values) in enumerate(series.items()):
        axes.plot(range(len(xs)), values, "o-", color=_COLOURS[number], markersize=4, label=name)
    axes.set_xlim(-0.5, len(xs) - 0.5)
    return _with_legend(figure, axes)


def svg(figure: Figure) -> str:
    """Return the chart as the text of an SVG file."""
    text = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _axes(title: str, unit: str, labels: Sequence[str], log: bool) -> tuple[Figure, Axes]:
    with rc_context(_STYLE):
        figure = Figure(figsize=(6.7, 3.4), layout="constrained")
        axes = figure.subplots()
    axes.set_title(f"{title}, {unit}", fontsize=10)
    axes.set_xticks(range(len(labels)), labels)
    axes.tick_params(length=0)
    axes.grid(axis="y", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "left", "right"]].set_visible(False)
    if log:
        axes.set_yscale("log")
        axes.tick_params(which="minor", length=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return figure, axes


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    # The data limits of a logarithmic axis hold positive values only.
    least = axes.dataLim.minposy
    axes.set_ylim(bottom=10 ** floor(log10(least)) if axes.get_yscale() == "log" else 0)
    figure.legend(loc="outside lower center", ncols=len(_COLOURS), frameon=False)
    return figure
