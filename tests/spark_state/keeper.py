"""A job with every kind of keyed state, under a test's hands, and how its state is read."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.runtime.offline.scan import Query, StateScan
from headgate.runtime.offline.snapshot import Snapshot, open_snapshot
from headgate.testing import Harness

KEPT = Path(__file__).parents[1] / "compat" / "v0.1" / "canonical" / "savepoint"


class Account(msgspec.Struct):
    """A value with fields."""

    spent: Decimal
    label: str | None = None


class Keeper(hg.KeyedProcess[str, Any, Any]):
    """Keeps what comes, and tells it when asked with the amount None."""

    total = hg.ValueState[int](default=0)
    account = hg.ValueState[Account]()
    amounts = hg.ListState[int]()
    by_kind = hg.MapState[str, float]()
    lasting = hg.ValueState[int](default=0, ttl="1d")
    seen = hg.OperatorListState[str]()

    def on_record(self, record: Any, ctx: hg.Context[str]) -> Iterator[Any]:
        if record["amount"] is None:
            account = self.account.get()
            yield (
                ctx.key,
                self.total.get(),
                None if account is None else (str(account.spent), account.label),
                self.amounts.get(),
                dict(sorted(self.by_kind.items())),
                self.lasting.get(),
            )
            return
        amount, kind = record["amount"], record["kind"]
        if not self.total.exists():
            self.seen.add(ctx.key)
        self.total.set(self.total.get() + amount)
        self.account.set(Account(Decimal(self.total.get()) / 4, kind))
        self.amounts.update([*self.amounts.get()[-2:], amount])
        self.by_kind.put(kind, (self.by_kind.get(kind) or 0.0) + amount)
        self.lasting.set(amount)
        if amount == 0:
            self.total.clear()
        ctx.processing_time.after("20s", tag="soon")

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Any]:
        yield (ctx.key, "timer", timer.tag)


def keeper_job(parallelism: int = 2, max_parallelism: int | None = 16) -> hg.Job:
    """The job of `Keeper`; its checkpoints keep all tables in files."""
    job = hg.Job("keeper", parallelism=parallelism, max_parallelism=max_parallelism)
    job.options["execution.checkpointing.data-inline-threshold"] = "0b"
    events = job.read(from_list([]), name="events")
    kept = events.key_with(lambda record: record["key"]).process(Keeper(), name="keep")
    kept.write(collect(guarantee="none"), name="out")
    return job


def event(key: str, amount: int | None, kind: str = "a") -> dict[str, Any]:
    return {"key": key, "amount": amount, "kind": kind}


def ask(running: Harness, keys: list[str]) -> list[Any]:
    """Return the state of the job, key by key."""
    running.drain("out")
    running.push("events", [event(key, None) for key in keys])
    return sorted(running.drain("out"))


def checkpoints_of(running: Harness, directory: Path) -> str:
    """The checkpoint storage of a harness, as a job's directory of checkpoints."""
    for name, data in running._run._objects.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return str(directory)


def read(snapshot: Snapshot | str, operator: str, state: str, **query: Any) -> list[dict[str, Any]]:
    """All rows of a state, as the core reads them."""
    if isinstance(snapshot, str):
        snapshot = open_snapshot(snapshot, {})
    return rows_of(StateScan(snapshot, Query(operator, state, **query)))


def rows_of(scan: StateScan) -> list[dict[str, Any]]:
    tables = [table for share in scan.shares() for table in scan.read(share)]
    found: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist() if tables else []
    return found
