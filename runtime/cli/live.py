"""Shows a run on a terminal: a table that stays at the bottom, and events that scroll above it."""

from __future__ import annotations

import json
import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..control.job_client import PublishedEvent
from .progress import RunProgress, VertexView, attempt_of, short

REFRESHES_PER_SECOND = 4
_COLOURS = {"RUNNING": "green", "FINISHED": "green", "FAILING": "red", "FAILED": "red"}
_SHOWN_ABOVE = frozenset(
    {
        "start",
        "restored",
        "failure",
        "fallback",
        "restart",
        "stuck",
        "takeover",
        "waiting",
        "output",
        "stopping",
        "leaving",
        "savepoint",
        "disposed",
        "dropped",
        "rescaling",
        "rescaled",
    }
)
"""Events that get a line; the others only change the table."""


class LiveReporter:
    """A `rich` Live on stderr."""

    def __init__(self, job: str, console: Console | None = None) -> None:
        self.progress = RunProgress()
        self._job = job
        self._status = "starting"
        self._console = console or Console(stderr=True, highlight=False)
        # What sinks print goes above the table; into a pipe it must go untouched.
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )

    def __enter__(self) -> LiveReporter:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def event(self, event: PublishedEvent) -> None:
        """Take the event into the table, or print it above."""
        body = json.loads(event.body)
        if event.kind == "progress":
            self.progress.update(body, _now_ms(), time.monotonic())
            return
        if event.kind == "status":
            self._status = body["status"]
        if event.kind == "restoring":
            self._status = f"RESTORING {body['percent']}%"
        failed = event.kind == "checkpoint" and body.get("status") == "FAILED"
        if event.kind in _SHOWN_ABOVE or failed:
            style = "red" if failed or event.kind == "failure" else ""
            self.note(event.text, style="yellow" if event.kind in ("dropped", "waiting") else style)

    def note(self, text: str, style: str = "") -> None:
        """A line above the table."""
        stamp = time.strftime("%H:%M:%S")
        self._console.print(Text(f"{stamp} {text}", style=style), soft_wrap=True)

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
        table.add_column("vertex", no_wrap=True, overflow="ellipsis", min_width=8)
        for title in ("×", "in", "in/s", "out", "out/s", "busy", "full", "idle", "backpr.", "lag"):
            table.add_column(title, justify="right", no_wrap=True)
        for vertex in self.progress.vertices:
            table.add_row(*_cells(vertex))
        header = self._header()
        if not self.progress.vertices:
            return Group(header)
        causes = (Text(sentence) for sentence in self.progress.backpressure)
        return Group(header, table, *causes)

    def _header(self) -> Text:
        progress = self.progress
        header = Text(no_wrap=True, overflow="ellipsis")
        header.append(f"{self._job} ", style="bold")
        header.append(self._status, style=_COLOURS.get(self._status, "yellow"))
        header.append(f"  attempt {attempt_of(progress.attempt)}, restarts {progress.restarts}")
        if progress.checkpoint:
            age = short(max(0, _now_ms() - progress.checkpoint_at_ms))
            header.append(
                f"  checkpoint {progress.checkpoint} ({progress.checkpoint_ms} ms, {age} ago)"
            )
        return header


def _cells(vertex: VertexView) -> list[str | Text]:
    pressed = Text(
        _percent(vertex.backpressured), style="red" if vertex.backpressured > 500 else ""
    )
    return [
        Text(vertex.name),  # brackets in it are no markup
        str(vertex.parallelism),
        f"{vertex.records_in:,}",
        f"{vertex.in_per_second:,.0f}",
        f"{vertex.records_out:,}",
        f"{vertex.out_per_second:,.0f}",
        _percent(vertex.busy),
        Text(_percent(vertex.full), style="yellow" if vertex.full > 500 else ""),
        _percent(vertex.idle),
        pressed,
        vertex.time_text,
    ]


def _percent(ms_per_second: int) -> str:
    return f"{ms_per_second / 10:.0f}%"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
