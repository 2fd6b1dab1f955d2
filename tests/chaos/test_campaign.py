"""The rig itself, and a list of troubles that nothing else here brings about, one after the other."""

from __future__ import annotations

import asyncio
import datetime as dt
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from headgate.tests.chaos.campaign import RAY, STATE, Campaign, Record
from headgate.tests.chaos.flights import Verdict, verdict, write_years
from headgate.tests.chaos.processes import Sample
from headgate.tests.chaos.report import grown, markdown, succeeded

KINDS = (
    "kill -9 the command",
    "kill -9 the raylet",
    "SIGTERM a worker",
    "worker asleep, beyond the timeout",
    "worker asleep while the coordinator dies",
    "kill -9 coordinator and workers",
    "kills during restore",
    "kill in the commit window",
)


@pytest.fixture
def work() -> Iterator[Path]:
    """A directory with a short path, since Unix sockets lie below it."""
    directory = Path(tempfile.mkdtemp(prefix="hg-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


def answer(flights: Path) -> pl.DataFrame:
    return (
        pl.read_parquet(flights / "*.parquet")
        .group_by("origin", window_start="time_hour")
        .agg(
            flights=pl.len(),
            mean_delay=pl.col("dep_delay").mean(),
            worst_delay=pl.col("dep_delay").max(),
        )
        .sort("window_start", "origin")
    )


def test_the_verdict(tmp_path: Path) -> None:
    flights, results = tmp_path / "flights", tmp_path / "results"
    count = write_years(flights, 400_000)
    results.mkdir()
    right = answer(flights)
    years = right["window_start"].dt.epoch("s").max() - right["window_start"].dt.epoch("s").min()
    assert dt.timedelta(seconds=years) > dt.timedelta(days=729)
    right.write_parquet(results / "1.parquet")
    assert verdict(flights, results) == Verdict(count, len(right), lost=0, doubled=0, wrong=0)
    first, second, third = right["flights"][:3].to_list()
    pl.concat([right[1:], right[1:2]]).with_columns(
        flights=pl.when(pl.int_range(pl.len()) == 1).then(third - 1).otherwise("flights"),
        worst_delay=pl.when(pl.int_range(pl.len()) == 7).then(9999).otherwise("worst_delay"),
    ).write_parquet(results / "1.parquet")
    found = verdict(flights, results)
    assert (found.lost, found.doubled, found.wrong) == (first + 1, second, 1)


def test_growth_is_told() -> None:
    record = Record(seed=1, minutes=2.0, began_s=0.0, ended_s=100.0)
    for second in range(100):
        at_s = float(second)
        memory, descriptors = (200 + 2 * second) << 20, 50 + second % 7
        record.samples.append(Sample(at_s, "worker", 1, 20.0, memory, descriptors))
        record.samples.append(Sample(at_s, "worker", 2, 1.0, 0, 9999))  # too young to count
        record.files.append((at_s, {RAY: second, STATE: 30 + 2 * second}))
    assert grown(record) == ["memory, worker", STATE]
    told = markdown(record)
    assert "| memory, worker | MB | 274 | 374 | GROWS |" in told
    assert f"| {STATE} | files | 104 | 204 | GROWS |" in told
    assert "* not flat: memory, worker" in told
    assert not succeeded(record)


@pytest.mark.ray
@pytest.mark.chaos
@pytest.mark.timeout(2400)
def test_troubles_one_after_the_other(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(work / "run"))
    # There is input for several times the minutes that the troubles take on an idle machine.
    campaign = Campaign(
        work, seed=3, minutes=9.0, pause_s=1.0, bound_s=600.0, kinds=KINDS, slower=3.0
    )
    try:
        record = asyncio.run(campaign.run())
    finally:
        campaign.kill_all()
    told = (work / "log.jsonl").read_text()
    assert record.broken == [], told
    assert record.verdict is not None
    assert record.verdict.flights > 0
    assert record.verdict.exact, (record.verdict, told)
    assert [trouble.kind for trouble in record.troubles] == ["the start", *KINDS]
    assert [trouble.runs for trouble in record.troubles] == [0, 1, 1, 0, 0, 0, 0, 0, 0]
