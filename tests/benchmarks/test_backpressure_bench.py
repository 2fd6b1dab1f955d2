"""The benchmark of backpressure: its jobs, the figures it takes from checkpoints, and its charts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import headgate

BENCHMARKS = Path(headgate.__file__).parent / "benchmarks"
NAMES = ("backpressure_job", "checkpoint_figures", "metering", "charts")


@pytest.fixture(scope="module")
def bench() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import backpressure_job
        import charts
        import checkpoint_figures
        import metering

        yield SimpleNamespace(
            job=backpressure_job, figures=checkpoint_figures, metering=metering, charts=charts
        )
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("records", ["columns", "objects"])
def test_the_job_sees_every_record(bench: Any, records: str, tmp_path: Path) -> None:
    storage = str(tmp_path / "checkpoints")
    job = bench.job.make_job(
        f"bp-{records}", records, 0.0, storage, {}, rows=5_000, metered=str(tmp_path)
    )
    job.run()
    assert bench.metering.read_marks(str(tmp_path)).rows_out >= 4_900  # few keys come twice


def checkpoint(alignments: list[int], duration: int) -> dict[str, Any]:
    subtasks = [
        {
            "task": f"step {index // 2}",
            "index": index % 2,
            "start_delay": 10 * index,
            "async_duration": index,
            "alignment": {"duration": alignment},
        }
        for index, alignment in enumerate(alignments)
    ]
    sizes = {"persisted_data": 5, "checkpointed_size": 6, "state_size": 7}
    return {"end_to_end_duration": duration, "subtasks": subtasks, **sizes}


def test_figures_are_those_of_the_slowest_subtask(bench: Any) -> None:
    rows = [checkpoint([0, 4, 9, 3], 100), checkpoint([0, 4, 9, 3], 300), checkpoint([0] * 4, 200)]
    found = bench.figures.summary(rows)
    assert (found.count, found.end_to_end, found.end_to_end_p99) == (3, 200, 300)
    assert (found.start_delay, found.async_part) == (30, 3)
    assert (found.alignment, found.path_alignment) == (9, 4 + 9)
    assert (found.in_flight_bytes, found.new_bytes, found.state_bytes) == (5, 6, 7)


def test_no_checkpoint_makes_no_figures(bench: Any) -> None:
    assert bench.figures.summary([]).count == 0


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("chart", ["bars", "lines"])
def test_charts_are_well_formed_and_higher_is_more(bench: Any, chart: str, log: bool) -> None:
    draw = getattr(bench.charts, chart)
    figure = draw("a < b", "ms", ["x", "y", "z"], {"one & only": [0.0, 3.0, 4_000.0]}, log=log)
    drawn = ElementTree.fromstring(bench.charts.svg(figure))
    axes = figure.axes[0]
    if chart == "bars":
        places = [axes.transData.transform((0, each.get_height()))[1] for each in axes.patches]
    else:
        places = [y for _, y in axes.transData.transform(axes.lines[0].get_xydata())]
    assert places == sorted(places)
    assert len(set(places)) == 3 if not log else len(set(places)) >= 2
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b, ms", "one & only", "x", "y", "z"} <= set(texts)
