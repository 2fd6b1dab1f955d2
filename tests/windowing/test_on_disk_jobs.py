"""Windows and keys on disk, and keys that expire, in whole jobs: crashes and rescales."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import json_source, parquet_sink
from headgate.operators.aggregation.spilling_group import SpillingGroup
from headgate.operators.joins.spilling import SpillingPaneRows, SpillingSide
from headgate.operators.windows.counts import SpillingCounts
from headgate.operators.windows.panes.spilling import SpillingPanes
from headgate.operators.windows.sessions.operator import SpillingSessions
from headgate.testing import harness

T0 = datetime(2026, 3, 1, 12, tzinfo=UTC)
BACKENDS = ["hashmap", "rocksdb"]


class Bid(msgspec.Struct, frozen=True):
    item: str
    price: int
    at: datetime


def job_of(make: Any, backend: str, parallelism: int) -> hg.Job:
    options = {"state.backend.type": backend, "taskmanager.memory.managed.size": "1mb"}
    job = hg.Job("bids", parallelism=parallelism, options=options)
    job.checkpoint(every="1h", storage="s3://lake/checkpoints")
    bids = job.read(json_source("in/*.json", Bid), name="bids")
    result = make(bids.event_time("at", max_out_of_order="10s"))
    result.write(parquet_sink("out", guarantee="exactly_once"), name="out")
    return job


def sliding(bids: Any) -> Any:
    windows = bids.key_by("item").window(hg.sliding("40s", "10s", allowed_lateness="20s"))
    return windows.agg(n=hg.count(), total=hg.sum("price"), last=hg.last("price"), name="sums")


def sessions(bids: Any) -> Any:
    windows = bids.key_by("item").window(hg.session("5s"))
    return windows.agg(n=hg.count(), total=hg.sum("price"), last=hg.last("price"), name="sums")


def counted(bids: Any) -> Any:
    """The order in which records of a key come is not defined, so results only have their number."""
    return bids.key_by("item").window(hg.count_window(4)).agg(n=hg.count(), name="sums")


def whole(bids: Any) -> Any:
    windows = bids.key_by("item").window(hg.global_window())
    return windows.agg(n=hg.count(), total=hg.sum("price"), name="sums")


def joined(bids: Any) -> Any:
    """Each bid with the bids on the same item of the ten seconds before it, or alone."""
    keyed = bids.key_by("item")
    other = bids.select("item", "price", "at").event_time("at", max_out_of_order="10s")
    pairs = keyed.join(
        other.key_by("item"), within=("-10s", "-1s"), how="left", suffix="_before", name="sums"
    )
    return pairs.select("item", "price", "price_before")


def in_windows(bids: Any) -> Any:
    """Each bid with all bids on the same item in the same window."""
    windows = bids.key_by("item").window(hg.sliding("20s", "10s", allowed_lateness="10s"))
    other = bids.select("item", "price", "at").event_time("at", max_out_of_order="10s")
    pairs = windows.join(other.key_by("item"), how="left", suffix="_other", name="sums")
    return pairs.select("item", "price", "price_other")


def priced(bids: Any) -> Any:
    """Each bid with the newest bid on the same item up to its time."""
    other = bids.select("item", "price", "at").event_time("at", max_out_of_order="10s")
    pairs = bids.key_by("item").join_as_of(
        other.key_by("item"), how="left", suffix="_before", name="sums"
    )
    return pairs.select("item", "price", "price_before")


def results(make: Any, backend: str, parallelism: int) -> list[str]:
    with harness(job_of(make, backend, parallelism)) as h:
        for step in range(30):
            # More keys as time goes on, so that subtasks move to disk between checkpoints.
            keys = range(2 ** min(step, 11))
            h.push(
                "bids",
                *(
                    Bid(f"i{k}", k * step, T0 + timedelta(seconds=4 * step - k * step % 7))
                    for k in keys
                ),
            )
            if step % 5 == 1:
                h.checkpoint()
            if step % 10 == 4:
                h.crash()
            if step in (9, 17):
                h.rescale(3 if step == 9 else 2)
        h.end()
        return sorted(map(repr, h.drain("out")))


@pytest.mark.parametrize(
    ("make", "kind", "rows_min"),
    [
        (sliding, SpillingPanes, 5_000),
        (sessions, SpillingSessions, 5_000),
        (counted, SpillingCounts, 5_000),
        (whole, SpillingGroup, 2_000),
        (joined, SpillingSide, 5_000),
        (priced, SpillingSide, 5_000),
        (in_windows, SpillingPaneRows, 5_000),
    ],
)
def test_state_on_disk_survives_crashes_and_rescales(
    make: Any, kind: Any, rows_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    active, snapshot = [], kind.snapshot

    def noted(on_disk: Any, *rest: Any) -> Any:
        active.append(on_disk)
        return snapshot(on_disk, *rest)

    monkeypatch.setattr(kind, "snapshot", noted)
    found = results(make, "rocksdb", 2)
    assert len({id(one) for one in active}) > 2
    assert len(found) > rows_min
    assert found == results(make, "hashmap", 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_expire_survive_crashes_and_rescales(backend: str) -> None:
    """A key that has had no record for a minute begins again, whatever happened in between."""

    def make(bids: Any) -> Any:
        sums = bids.key_by("item").agg(
            total=hg.sum("price"), at=hg.last("at"), name="sums", ttl="1m"
        )
        return sums.key_by("item").reduce(
            lambda a, b: type(b)(b.item, max(a.total, b.total), b.at), name="highest", ttl="1m"
        )

    expected: dict[tuple[str, datetime], int] = {}
    used: dict[str, tuple[datetime, int]] = {}
    with harness(job_of(make, backend, 2)) as h:
        for step in range(40):
            item, at = f"i{step % 5}", T0 + timedelta(seconds=step)
            last, total = used.get(item, (h.now, 0))
            total = total if h.now - last < timedelta(minutes=1) else 0
            used[item] = (h.now, total + 1)
            expected[item, at] = total + 1
            h.push("bids", Bid(item, 1, at))
            h.settle()
            if step % 6 == 1:
                h.checkpoint()
            if step % 6 == 2:
                h.checkpoint()
                h.crash()
            if step in (13, 29):
                h.rescale(3 if step == 13 else 1)
            # Each key comes every 50 s, and after the eleventh and the 23rd step too late.
            h.advance_time("40s" if step in (11, 23) else "10s")
        h.end()
        found = {(row["item"], row["at"]): row["total"] for row in h.drain("out")}
    assert found == expected
    assert max(expected.values()) < 8
