"""`headgate explain --mermaid`: the plan as a flowchart."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.runtime.cli.app import app

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


def test_a_notebook_draws_the_plan() -> None:
    job = hg.Job("drawn")
    rows = job.read(from_list([], schema={"k": "string"}), name="rows")
    unfinished = job._repr_markdown_()
    assert unfinished.startswith("```\nJob drawn:")
    assert "it cannot run yet" in unfinished
    rows.write(collect(guarantee="none"), name="out")
    drawn = job._repr_markdown_()
    assert drawn.startswith("```mermaid\nflowchart LR\n")
    assert "rows" in drawn
