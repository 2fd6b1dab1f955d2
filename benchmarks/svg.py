"""Small charts as SVG text: bars or lines over a linear or logarithmic scale. Nothing to install."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 60
_COLOURS = ("#3465a4", "#cc7722", "#4e9a06", "#a40000", "#75507b")


class _Axis:
    """The vertical one."""

    def __init__(self, values: Sequence[float], log: bool) -> None:
        self._log = log
        top, least = max(values, default=1.0), min((v for v in values if v > 0), default=1.0)
        if log:
            self.low = 10 ** math.floor(math.log10(least))
            self.high = max(10 * self.low, 10 ** math.ceil(math.log10(max(top, least))))
            decades = round(math.log10(self.high / self.low))
            self.ticks = [self.low * 10**n for n in range(decades + 1)]
        else:
            step = 10 ** math.floor(math.log10(top)) if top > 0 else 1.0
            self.low, self.high = 0.0, math.ceil(max(top, 1e-9) / step) * step
            self.ticks = [self.high * n / 4 for n in range(5)]

    def at(self, value: float) -> float:
        value = max(value, self.low)
        if self._log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = value / self.high
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


def _frame(title: str, unit: str, axis: _Axis) -> list[str]:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 18, f"{title}, {unit}"),
    ]
    for tick in axis.ticks:
        y = axis.at(tick)
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="#ddd" fill="none"/>'
            + _text(_LEFT - 6, y + 4, f"{tick:,.10g}", "end")
        )
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        x = _LEFT + number * (WIDTH - _LEFT - _RIGHT) / max(1, len(names))
        parts.append(
            f'<rect x="{x:.0f}" y="{HEIGHT - 22}" width="12" height="12" fill="{_COLOURS[number]}"/>'
        )
        parts.append(_text(x + 18, HEIGHT - 12, name, "start"))
    return parts


def bars(
    title: str,
    unit: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    log: bool = False,
) -> str:
    """One bar per group and series."""
    axis = _Axis([value for values in series.values() for value in values], log)
    parts = _frame(title, unit, axis)
    room = (WIDTH - _LEFT - _RIGHT) / max(1, len(groups))
    width = 0.8 * room / max(1, len(series))
    for column, group in enumerate(groups):
        left = _LEFT + column * room + 0.1 * room
        parts.append(_text(_LEFT + (column + 0.5) * room, HEIGHT - _BOTTOM + 16, group))
        for number, values in enumerate(series.values()):
            y = axis.at(values[column])
            parts.append(
                f'<rect x="{left + number * width:.1f}" y="{y:.1f}" width="{0.9 * width:.1f}" '
                f'height="{HEIGHT - _BOTTOM - y:.1f}" fill="{_COLOURS[number]}"/>'
            )
    return "\n".join([*parts, *_legend(list(series)), "</svg>\n"])


def lines(
    title: str,
    unit: str,
    xs: Sequence[str],
    series: Mapping[str, Sequence[float]],
    log: bool = False,
) -> str:
    """One line per series; the xs stand at equal distances."""
    axis = _Axis([value for values in series.values() for value in values], log)
    parts = _frame(title, unit, axis)
    room = (WIDTH - _LEFT - _RIGHT) / max(1, len(xs))
    centres = [_LEFT + (number + 0.5) * room for number in range(len(xs))]
    parts += [_text(x, HEIGHT - _BOTTOM + 16, label) for x, label in zip(centres, xs, strict=True)]
    for number, values in enumerate(series.values()):
        points = " ".join(f"{x:.1f},{axis.at(v):.1f}" for x, v in zip(centres, values, strict=True))
        colour = _COLOURS[number]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{x:.1f}" cy="{axis.at(v):.1f}" r="3" fill="{colour}"/>'
            for x, v in zip(centres, values, strict=True)
        ]
    return "\n".join([*parts, *_legend(list(series)), "</svg>\n"])
