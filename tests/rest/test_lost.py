"""Goal: samples of dropped records say where and why, and show values only if the job allows it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import Pause, blackhole, from_list, json_source
from headgate.operators.elements import ObjectBatch
from headgate.operators.lost_records import AT_ONCE_MAX, TEXT_MAX, Samples
from headgate.tests.rest.conftest import serving


def check(row: Any) -> bool:
    if row.n == 7:
        raise ValueError(f"the secret of {row.user}")
    return True


def lossy_job(folder: Path, **options: str) -> hg.Job:
    """Drops an unreadable record, a failed one, and a late one."""
    lines = [f'{{"user": "u{n}", "n": {n}}}' for n in range(10)]
    lines[3] = '{"user": "unreadable'
    folder.mkdir()
    (folder / "a.json").write_text("\n".join(lines) + "\n")
    job = hg.Job("lossy", parallelism=1, options=options)
    schema = {"user": "string", "n": "int64"}
    job.read(json_source(str(folder), schema, on_bad_record="drop"), name="in").filter(
        check, name="check", on_error="drop"
    ).write(blackhole(), name="out")
    early = [{"user": f"u{n}", "ts": n * 60_000} for n in range(10)]
    rows = [*early, Pause("100ms"), {"user": "u-late", "ts": 0}]
    (
        job.read(from_list(rows, schema={"user": "string", "ts": "int64"}), name="clicks")
        .event_time("ts", max_out_of_order="0s")
        .key_by("user")
        .window(hg.tumbling("1m"))
        .agg(n=hg.count(), name="windows")
        .write(blackhole(), name="windows out")
    )
    return job


@pytest.mark.parametrize("values", ["false", "true"])
def test_samples_of_dropped_records(lab: Any, tmp_path: Path, values: str) -> None:
    found: dict[str, Any] = {}

    async def script(running: Any) -> None:
        async with serving(running) as api, api.client() as client:
            while len((told := await client.lost()).records) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            found.update({each.kind: each for each in told.records}, told=told)

    job = lossy_job(tmp_path / "in", **{"headgate.rest.lost-values": values})
    lab.run(job, script)
    told, shown = found["told"], values == "true"
    assert (told.kept, told.values) == (20, shown)
    assert {(each.step, each.kind, each.count) for each in told.dropped} == {
        ("in", "unreadable", 1),
        ("check", "failed", 1),
        ("windows", "late", 1),
    }
    late, failed, unreadable = found["late"], found["failed"], found["unreadable"]
    assert (late.step, late.event_time) == ("windows", 0)
    assert late.watermark > 60_000
    assert failed.error == ("ValueError: the secret of u7" if shown else "ValueError")
    assert failed.position.startswith("in ")
    assert failed.position.split(" ")[-1].isdigit()
    assert "a.json" in unreadable.position
    if shown:
        assert "'user': 'u-late'" in late.value
        assert "'user': 'u7'" in failed.value
        assert unreadable.value == '{"user": "unreadable'
        assert unreadable.error
    else:
        assert {late.value, failed.value, unreadable.value} == {None}
        assert unreadable.error == ""
        assert "secret" not in str(told)


def test_no_samples_on_demand(lab: Any, tmp_path: Path) -> None:
    async def script(running: Any) -> None:
        async with serving(running) as api, api.client() as client:
            while len((told := await client.lost()).dropped) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (told.records, told.kept) == ([], 0)

    lab.run(lossy_job(tmp_path / "in", **{"headgate.rest.lost-records": "0"}), script)


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_samples_are_bounded() -> None:
    samples = Samples("step", values=True)
    samples.add_rows("late", ObjectBatch([Mute(), "x" * 10_000, *range(100)]))
    samples.add_rows("late", ObjectBatch([1]))
    samples.add_rows("failed", ObjectBatch([1]), [ValueError("e" * 10_000)])
    *late, failed = samples.take()
    assert len(late) == AT_ONCE_MAX
    assert late[0].value == "<Mute without a text: RuntimeError>"
    assert len(late[1].value or "") == len(failed.error) == TEXT_MAX
    assert samples.take() == ()
    samples.add_rows("late", ObjectBatch([1]))
    assert [each.value for each in samples.take()] == ["1"]
