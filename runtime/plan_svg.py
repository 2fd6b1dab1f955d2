"""The plan of a job as a drawing (SVG), for `headgate explain --svg`, notebooks and pages.

Each vertex is a box with its steps in it, each exchange a line with its partitioning. The layout is in
layers, as Sugiyama, Tagawa and Toda draw hierarchical graphs (IEEE Transactions on Systems, Man, and
Cybernetics, 1981): a vertex is in the column behind all vertices that it reads from, and within a column
the vertices are in the order of the mean place of those before them, which keeps crossings few.

Text is monospaced, so that widths are known without a font. The drawing has the color of the text around
it: it is legible on light and dark pages, and needs no style sheet.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import msgspec

from .explain import describe_partitioning, in_group
from .plan import JobSpec, PhysicalPlan, Vertex

CHARACTER = 7.2
"""The width of a character at the font size, px: 0.6 em, as in nearly all monospaced fonts."""
FONT = 12
LINE = 18
PADDING = 10
GAP = 24
MARGIN = 8
LONGEST = 48
"""Longer texts are cut, in characters."""


class _Box(msgspec.Struct):
    """A vertex with its place, px: `x` and `y` are those of the upper left corner."""

    title: str
    lines: list[str]
    """A line for each step."""
    x: float = 0
    y: float = 0

    @property
    def width(self) -> float:
        longest = max(map(len, (self.title, *self.lines)))
        return longest * CHARACTER + 2 * PADDING

    @property
    def height(self) -> float:
        return (len(self.lines) + 1) * LINE + PADDING

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


class _Arrow(msgspec.Struct, frozen=True):
    source: int
    target: int
    label: str
    back: bool = False


def svg_plan(spec: JobSpec) -> str:
    """The plan of a job as one `<svg>` element, which may stand in a page or in a file of its own."""
    plan = spec.plan
    boxes = {vertex.id: _box(vertex) for vertex in plan.vertices}
    arrows = list(_arrows(plan))
    _place(boxes, arrows)
    loops = sum(arrow.back for arrow in arrows)
    width = max((box.x + box.width for box in boxes.values()), default=0.0) + MARGIN
    bottom = max((box.y + box.height for box in boxes.values()), default=0.0)
    height = bottom + loops * (LINE + GAP) + MARGIN
    title = escape(f"The plan of job {spec.name}")
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" fill="none" stroke="currentColor" '
        f'font-family="ui-monospace, monospace" font-size="{FONT}">',
        f"<title>{title}</title>",
    ]
    for arrow in arrows:
        if arrow.back:
            bottom += LINE + GAP
        drawn += _draw_arrow(boxes[arrow.source], boxes[arrow.target], arrow, bottom)
    for box in boxes.values():
        drawn += _draw_box(box)
    return "\n".join([*drawn, "</svg>"])


def _box(vertex: Vertex) -> _Box:
    subtasks = "subtask" if vertex.parallelism == 1 else "subtasks"
    lines, above = [], vertex.head.name
    for node in vertex.nodes:
        state = " [state]" if node.stateful else ""
        inner = [
            i for i in node.inputs if i.node in vertex.nodes and (i.side or i.node.name != above)
        ]
        reads = "".join(f" <- {i.node.name}" + (f".{i.side}" if i.side else "") for i in inner)
        lines.append(_cut(f"{node.name} ({node.kind}){state}{reads}"))
        above = node.name
    return _Box(f"{vertex.parallelism} {subtasks}{in_group(vertex)}", lines)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _arrows(plan: PhysicalPlan) -> Iterator[_Arrow]:
    for vertex in plan.vertices:
        for edge in plan.outputs_of(vertex):
            side = f", {edge.side}" if edge.side else ""
            label = _cut(describe_partitioning(edge.partitioning) + side)
            yield _Arrow(edge.source, edge.target, label)
    for loop in plan.loops:
        yield _Arrow(loop.tail, loop.head, "begin of the loop", back=True)


def _place(boxes: dict[int, _Box], arrows: list[_Arrow]) -> None:
    """Give each box its place: columns from left to right, gaps as wide as the labels between them."""
    columns = _columns(boxes, arrows)
    x = float(MARGIN)
    for column in range(max(columns.values(), default=-1) + 1):
        here = [id_ for id_ in boxes if columns[id_] == column]
        here.sort(key=lambda id_: (_wanted(id_, boxes, arrows), id_))
        y = float(MARGIN)
        for id_ in here:
            boxes[id_].x, boxes[id_].y = x, y
            y += boxes[id_].height + GAP
        labels = (len(a.label) for a in arrows if not a.back and a.source in here)
        gap = max(labels, default=0) * CHARACTER + 2 * GAP
        x += max(boxes[id_].width for id_ in here) + gap


def _columns(boxes: dict[int, _Box], arrows: list[_Arrow]) -> dict[int, int]:
    """The column of each vertex: one more than the last of those that it reads from."""
    columns = dict.fromkeys(boxes, 0)
    for _ in boxes:
        for arrow in arrows:
            if not arrow.back:
                columns[arrow.target] = max(columns[arrow.target], columns[arrow.source] + 1)
    return columns


def _wanted(id_: int, boxes: dict[int, _Box], arrows: list[_Arrow]) -> float:
    """The mean place of the vertices that this one reads from; 0 for a source."""
    before = [boxes[a.source].middle for a in arrows if a.target == id_ and not a.back]
    return sum(before) / len(before) if before else 0.0


def _draw_box(box: _Box) -> list[str]:
    x, y = box.x, box.y
    drawn = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="4"/>',
        _text(x + PADDING, y + LINE, box.title, weight="bold"),
    ]
    for number, text in enumerate(box.lines, start=2):
        drawn.append(_text(x + PADDING, y + number * LINE, text))
    return drawn


def _draw_arrow(source: _Box, target: _Box, arrow: _Arrow, bottom: float) -> list[str]:
    """A line with its head and label; one that leads back runs below all boxes, at `bottom`."""
    x1, y1 = source.x + source.width, source.middle
    x2, y2 = target.x, target.middle
    if arrow.back:
        path = (
            f"M {x1:.1f} {y1:.1f} h {GAP / 2} V {bottom:.1f} "
            f"H {x2 - MARGIN / 2:.1f} V {y2:.1f} H {x2:.1f}"
        )
        at = (x1 + x2) / 2, bottom - 5
    else:
        bend = (x2 - x1) / 2
        path = (
            f"M {x1:.1f} {y1:.1f} C {x1 + bend:.1f} {y1:.1f} "
            f"{x2 - bend:.1f} {y2:.1f} {x2 - 6:.1f} {y2:.1f} H {x2:.1f}"
        )
        at = (x1 + x2) / 2, (y1 + y2) / 2 - 5
    dashes = ' stroke-dasharray="4 3"' if arrow.back else ""
    head = f"M {x2 - 6:.1f} {y2 - 4:.1f} L {x2:.1f} {y2:.1f} L {x2 - 6:.1f} {y2 + 4:.1f} z"
    return [
        f'<path d="{path}"{dashes}/>',
        f'<path d="{head}" fill="currentColor"/>',
        _text(*at, arrow.label, anchor="middle"),
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="currentColor" stroke="none">{escape(text)}</text>'
    )
