"""Drawings of a plan: `headgate explain --mermaid`, `--svg`, and what notebooks show."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import headgate as hg
from headgate.connectors import collect, from_list, generator
from headgate.runtime.cli.app import app
from headgate.runtime.job import runnable
from headgate.runtime.plan_svg import svg_plan

SVG = "{http://www.w3.org/2000/svg}"

JOB = """
import headgate as hg
from headgate.connectors import collect, from_list

job = hg.Job("drawn", parallelism=2)
rows = job.read(from_list([], schema={"k": "string", "at": "int64"}), name="rows")
timed = rows.filter("k <> \\'\\'", name="named").event_time("at", name="times")
counts = timed.key_by("k").window(hg.tumbling("1m")).agg(n=hg.count(), name="counts")
counts.write(collect(guarantee="none"), name="out")
counts.late.write(collect(guarantee="none"), name="late")
"""


def test_the_plan_is_drawn_with_every_step_and_exchange(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    result = CliRunner().invoke(app, ["explain", str(tmp_path / "job.py"), "--mermaid"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "flowchart LR"
    assert re.search(r'v\d+n\d+\["named<br>filter"\]', result.output)
    assert " -#gt; " in result.output, "what means something to Mermaid is written as an entity"
    assert re.search(r'v\d+n\d+\[\("counts<br>window"\)\]', result.output)
    assert any(re.fullmatch(r'  v\d+ -- "hash\(k\)" --> v\d+', line) for line in lines)
    assert any('-- "late" -->' in line for line in lines)
    opened = sum(line.startswith("  subgraph ") for line in lines)
    assert opened == lines.count("  end") > 1


def test_the_plan_is_drawn_as_svg(tmp_path: Path) -> None:
    (tmp_path / "drawn_as_svg.py").write_text(JOB)
    result = CliRunner().invoke(app, ["explain", str(tmp_path / "drawn_as_svg.py"), "--svg"])
    assert result.exit_code == 0, result.output
    drawing = ElementTree.fromstring(result.output)
    texts = [text.text or "" for text in drawing.iter(f"{SVG}text")]
    assert "named (filter)" in texts
    assert "late (sink) [state] <- counts.late" in texts
    assert "hash(k)" in texts
    boxes = [
        [float(rect.attrib[name]) for name in ("x", "y", "width", "height")]
        for rect in drawing.iter(f"{SVG}rect")
    ]
    assert len(boxes) == 2
    assert boxes[0][0] + boxes[0][2] < boxes[1][0], "exchanges lead to the right"
    right, bottom = float(drawing.attrib["width"]), float(drawing.attrib["height"])
    assert all(x + w <= right and y + h <= bottom for x, y, w, h in boxes)


def test_a_loop_leads_back_below_all_boxes() -> None:
    job = hg.Job("loops")
    rows = job.read(from_list([{"n": 3}], schema={"n": "int64"}), name="rows")

    def body(stream: hg.Stream[Any]) -> tuple[hg.Stream[Any], hg.Stream[Any]]:
        less = stream.select("n - 1 AS n", name="less").rebalance()
        return less.filter("n > 0", name="again"), less.filter("n <= 0", name="done")

    rows.iterate(body, name="loop").write(collect(guarantee="none"), name="out")
    drawing = ElementTree.fromstring(svg_plan(runnable(job).spec()))
    dashed = [path for path in drawing.iter(f"{SVG}path") if "stroke-dasharray" in path.attrib]
    assert len(dashed) == 1
    lowest = max(
        float(r.attrib["y"]) + float(r.attrib["height"]) for r in drawing.iter(f"{SVG}rect")
    )
    level = re.search(r" V ([\d.]+) H", dashed[0].attrib["d"])
    assert level
    assert lowest < float(level[1]) < float(drawing.attrib["height"])


def test_one_drawing_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "drawn_twice.py").write_text(JOB)
    both = ["explain", str(tmp_path / "drawn_twice.py"), "--svg", "--mermaid"]
    result = CliRunner().invoke(app, both)
    assert result.exit_code != 0
    assert "two forms of one plan" in str(result.exception or result.output)


def test_a_notebook_draws_the_plan() -> None:
    job = hg.Job("drawn")
    rows = job.read(from_list([], schema={"k": "string"}), name="rows")
    unfinished = job._repr_html_()
    assert unfinished.startswith("<pre>Job drawn:")
    assert "it cannot run yet" in unfinished
    rows.write(collect(guarantee="none"), name="out")
    drawn = job._repr_html_()
    assert "<svg " in drawn
    assert "rows (source)" in drawn


def test_a_notebook_shows_streams_and_outcomes_as_tables() -> None:
    job = hg.Job("shown")
    sink = collect(guarantee="none")
    rows = job.read(from_list([{"k": "a"}], schema={"k": "string"}), name="rows")
    rows.write(sink, name="out")
    assert '<th style="text-align: left">k</th><td style="text-align: left">string</td>' in (
        rows._repr_html_()
    )
    outcome = job.run()._repr_html_()
    assert "FINISHED" in outcome
    assert "duration" in outcome


def test_a_notebook_shows_what_is_in_a_savepoint(tmp_path: Path) -> None:
    job = hg.Job("saved")
    fields = {"k": {"kind": "choice", "values": ["<a>"]}, "n": "sequence"}
    rows = job.read(generator(fields, rate=1_000), name="in")
    sums = rows.key_by("k").agg(total=hg.sum("n"), name="sums")
    sums.write(collect(guarantee="none"), name="out")
    with job.start() as running:
        states: list[Any] = []
        while not any(each.rows for each in states if each.operator == "sums"):
            address = running.savepoint(tmp_path)
            states = list(hg.inspect_savepoint(address).states)
        running.cancel()

    async def in_a_loop() -> hg.SavepointInfo:
        return hg.inspect_savepoint(address)

    found = asyncio.run(in_a_loop())
    assert (found.kind, found.job, found.address) == ("savepoint", "saved", address)
    (state,) = [each for each in found.states if each.operator == "sums"]
    assert (state.parallelism, dict(state.keys), state.rows) == (1, {"k": "string"}, 1)
    assert "total" in state.values
    assert found.size_bytes >= state.size_bytes > 0
    shown = found._repr_html_()
    assert f"Savepoint {found.checkpoint} of job saved" in shown
    assert "k string" in shown
    with pytest.raises(hg.errors.StateError):
        hg.inspect_savepoint(tmp_path / "nothing")
