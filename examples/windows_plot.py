"""Windows over time as a picture: visits per page and ten minutes of a morning, drawn by matplotlib.

    python examples/windows_plot.py windows.svg

It needs matplotlib (`pip install matplotlib`). A window is drawn as a step, where it lies in event
time; so the picture is the same however fast the job was.
"""

import sys
from collections import defaultdict
from datetime import UTC, timedelta

from matplotlib.dates import DateFormatter
from matplotlib.figure import Figure

import headgate as hg
from headgate.connectors import collect, generator

WINDOW = timedelta(minutes=10)
FIELDS = {
    "page": {"kind": "choice", "values": ["/", "/search", "/cart"]},
    "at": {"kind": "timestamp", "every": "1s", "start": "2026-05-01T08:00:00Z"},
}


def windows_of(rows: int) -> list[dict[str, object]]:
    """Run the job over this number of visits, and return its windows."""
    found = collect(guarantee="none")
    job = hg.Job("visits")
    visits = job.read(generator(FIELDS, rows=rows), name="visits").event_time(
        "at", max_out_of_order="1s"
    )
    counts = (
        visits.key_by("page").window(hg.tumbling(WINDOW)).agg(visits=hg.count(), name="per-page")
    )
    counts.write(found, name="out")
    job.run()
    return list(found.rows)


def draw(windows: list[dict[str, object]]) -> Figure:
    """Draw a line of steps for each page."""
    by_page = defaultdict(list)
    for window in windows:
        by_page[window["page"]].append((window["window_start"], window["visits"]))
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for page, counted in sorted(by_page.items()):
        counted.sort()
        times = [start for start, _ in counted]
        axes.step(
            [*times, times[-1] + WINDOW],
            [*(n for _, n in counted), counted[-1][1]],
            where="post",
            label=page,
        )
    axes.set(title="Visits in windows of ten minutes", ylabel="visits per window")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M", tz=UTC))
    axes.legend(frameon=False, ncols=3)
    return figure


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else "windows.svg"
    draw(windows_of(rows=3 * 3600)).savefig(target)
    print(f"wrote {target}")
