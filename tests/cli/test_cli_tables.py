"""Tables print what they are given: brackets in types and names are no styles."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from headgate.runtime.cli import listing, live
from headgate.runtime.cli.console import print_table
from headgate.runtime.cli.progress import VertexView


def test_a_type_with_a_unit_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("state", "value"), [("seen", "at timestamp[us, tz=UTC]")])
    assert "at timestamp[us, tz=UTC]" in capsys.readouterr().out


def test_a_jobs_name_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    row: dict[str, Any] = {
        "name": "job[red]",
        "status": "RUNNING",
        "uptime_ms": 0,
        "parallelism": 1,
        "restarts": 0,
        "last_checkpoint": None,
        "cluster": "tcp:[::1]:6379 [dev]",
        "pid": 1,
    }
    listing._print_jobs([row])
    printed = capsys.readouterr().out
    assert "job[red]" in printed
    assert "[dev]" in printed


def test_below_the_jobs_it_says_who_is_slow(capsys: pytest.CaptureFixture[str]) -> None:
    row: dict[str, Any] = {
        "name": "clicks",
        "status": "RUNNING",
        "uptime_ms": 0,
        "parallelism": 1,
        "restarts": 0,
        "last_checkpoint": None,
        "cluster": "local",
        "pid": 1,
        "backpressure": [{"sentence": "`a` waits for `b[0]`"}, {"sentence": "`c` waits"}],
    }
    listing._print_jobs([row])
    below = capsys.readouterr().out.splitlines()[2:]
    assert below == ["clicks: `a` waits for `b[0]`", "clicks: `c` waits"]


def test_a_vertex_name_is_printed_whole() -> None:
    table, written = Table(), io.StringIO()
    vertex = VertexView("window[red]", 1, 0, 0, 0.0, 0.0, 0, 0, 0, 0, None, None)
    table.add_row(*live._cells(vertex))
    Console(file=written, width=120).print(table)
    assert "window[red]" in written.getvalue()
