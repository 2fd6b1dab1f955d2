"""Chains of bases and deltas (state/chain.py): right rows, few files, few bytes."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from headgate.state.chain import (
    PROBE_EVERY,
    Chain,
    ChainBook,
    ChainedFile,
    ChainPlan,
    Written,
    extend,
    may_continue,
    plan,
    restored_chain,
)
from headgate.state.snapshot import StateHandle, state_info

KEYS = 10_000
KEY = ("count", "table")


def handle(rows, kind="delta", *, inline=False):
    return StateHandle(
        state="table",
        kind=kind,
        size_bytes=20 * rows,
        checksum="",
        rows=rows,
        inline=b"" if inline else None,
        file=None if inline else "chk/1-1/f",
    )


class Table:
    """A model of a keyed table: when each key last changed, and the chain that the policy made."""

    def __init__(self, rows=KEYS, files_max=20):
        self.changed = dict.fromkeys(range(rows), 1)
        self.epoch, self.files_max = 1, files_max
        self.chain = extend(Chain(), ChainPlan(), handle(rows, "table"), 1)
        self.contents = [self.rows_since(None)]
        self.written, self.kinds = [], []

    def rows_since(self, since):
        return {k: e for k, e in self.changed.items() if since is None or e > since}

    def checkpoint(self, keys):
        self.epoch += 1
        self.changed.update(dict.fromkeys(keys, self.epoch))
        planned = plan(self.chain, self.epoch, self.files_max)
        rows = self.rows_since(planned.since)
        self.contents = [*self.contents[: planned.keep], *([rows] if rows else [])]
        kind = "table" if planned.since is None else "delta"
        self.chain = extend(
            self.chain, planned, handle(len(rows), kind) if rows else None, self.epoch
        )
        self.written.append(len(rows))
        self.kinds.append(kind)

    def restored(self):
        merged = {}
        for part in self.contents:
            merged.update(part)
        return merged


def run(table, checkpoints, keys_of):
    for number in range(checkpoints):
        table.checkpoint(keys_of(number))
        assert len(table.chain.links) <= table.files_max
        assert len(table.chain.links) == len(table.contents)
        assert table.restored() == table.changed
        deltas = sum(link.handle.rows for link in table.chain.links[1:])
        assert deltas < 2.1 * len(table.changed), "a restore reads a few times the state at most"


def spread(number):
    """One per cent of the keys, as different from those before as can be: the worst case."""
    return range(number * 100 % KEYS, number * 100 % KEYS + 100)


@pytest.mark.parametrize("pattern", ["spread", "random", "hot"])
def test_one_percent_of_changes_costs_at_most_three_percent_of_bytes(pattern):
    rng = random.Random(5)
    keys_of = {
        "spread": spread,
        "random": lambda _: rng.sample(range(KEYS), 100),
        "hot": lambda _: range(100),
    }[pattern]
    table = Table()
    run(table, 1000, keys_of)
    # Rows of a delta may take more bytes than those of a base, without exceeding 3 %.
    assert sum(table.written) / 1000 <= 0.028 * KEYS
    assert "delta" in table.kinds


@pytest.mark.parametrize("files_max", [2, 3, 8, 16, 40])
@pytest.mark.parametrize("share", [5, 20, 100, 2000])
def test_the_bounds_hold_for_any_length_of_chain_and_share_of_changes(files_max, share):
    rng = random.Random(files_max * share)
    run(Table(1000, files_max), 150, lambda _: rng.sample(range(1000), min(share // 2, 900)))


def test_rare_changes_are_merged_logarithmically_often():
    """0.1 % per checkpoint: no base for long, and a row is rewritten a few times only."""
    table = Table()
    run(table, 1000, lambda n: range(n * 10 % KEYS, n * 10 % KEYS + 10))
    assert table.kinds.count("table") <= 2
    assert sum(table.written) <= 1000 * 10 * 4 + 2 * KEYS


def test_a_delta_reaches_back_over_the_fewest_that_keep_sizes_falling():
    links = [ChainedFile(handle(100_000, "table"), 1)]
    links += [ChainedFile(handle(rows), i + 2) for i, rows in enumerate([900, 400, 60, 50])]
    assert plan(Chain(tuple(links)), 6, files_max=6) == ChainPlan(5, 5)
    # New 50 + 50 = 100 > 60; with the 60 it is 160 <= 400.
    assert plan(Chain(tuple(links)), 6, files_max=5) == ChainPlan(3, 3)


def test_a_merge_a_little_larger_than_the_one_before_leaves_it_alone():
    links = [
        ChainedFile(handle(100_000, "table"), 1),
        ChainedFile(handle(180), 2),
        ChainedFile(handle(100), 3),
    ]
    assert plan(Chain(tuple(links)), 4, files_max=3) == ChainPlan(2, 2)
    links[1] = ChainedFile(handle(150), 2)
    assert plan(Chain(tuple(links)), 4, files_max=3) == ChainPlan(1, 1)


def test_nothing_changed_writes_nothing_and_is_covered():
    table = Table()
    table.checkpoint([1])
    table.checkpoint([])
    assert table.written == [1, 0]
    assert len(table.chain.links) == 2
    assert plan(table.chain, 4, 20).since == 3


@pytest.mark.parametrize(
    ("chain", "epoch"),
    [
        (Chain(), 2),
        (Chain((ChainedFile(handle(10, "table", inline=True), 1),)), 2),
        (Chain((ChainedFile(handle(10, "table"), 1),)), 1),
        (Chain((ChainedFile(handle(10, "table"), 1),)), 0),
        (Chain((ChainedFile(handle(10, "table"), 0),)), 2),
        (Chain((ChainedFile(handle(10, "table"), 1), ChainedFile(handle(10), 2))), 3),
    ],
)
def test_everything_is_written_where_a_delta_is_impossible_or_does_not_pay(chain, epoch):
    assert plan(chain, epoch, 20) == ChainPlan()


def test_a_table_that_turns_over_is_written_in_full_until_it_calms_down():
    table = Table(1000)
    run(table, 40, lambda _: range(1000))
    assert table.kinds.count("table") >= 40 * (PROBE_EVERY - 1) / (PROBE_EVERY + 1)
    table.kinds.clear()
    run(table, 40, lambda _: range(5))
    assert table.kinds.count("table") <= PROBE_EVERY + 1


def test_a_restored_chain_is_continued_and_its_files_are_never_merged_across():
    old = [handle(1000, "table"), handle(10), handle(10)]
    chain = restored_chain(old)
    assert chain.handles == tuple(old)
    assert plan(chain, 2, 20) == ChainPlan(3, 1)
    chain = extend(chain, ChainPlan(3, 1), handle(10), 2)
    assert plan(chain, 3, 4) == ChainPlan(3, 1), "only behind what was restored"
    assert plan(restored_chain(old), 2, 3) == ChainPlan(), "no room, and no cut to name"
    assert plan(restored_chain([]), 2, 3) == ChainPlan()


def written(base, *links):
    return Written(base, {KEY: Chain(tuple(links))})


def test_only_what_a_barrier_may_name_is_kept():
    book = ChainBook()
    first, second = ChainedFile(handle(100, "table"), 1), ChainedFile(handle(1), 2)
    book.acknowledged(1, written(0, first))
    book.completed(1)
    assert book.base(1).chains[KEY].links == (first,)
    book.acknowledged(2, written(1, first, second))
    book.completed(2)
    # A barrier that was triggered before 2 completed may still be on its way, and names 1.
    assert book.base(1).chains[KEY].links == (first,)
    assert book.base(2).chains[KEY].links == (first, second)
    assert book.base(1) == Written(), "barriers name their bases in order"
    book.acknowledged(3, written(2, first, second))
    book.forget(3)
    assert book.base(3) == Written(), "aborted"
    assert book.base(0) == Written()


def test_tables_are_told_the_oldest_cut_that_may_still_be_named():
    book, told = ChainBook(), []
    base, new_base = ChainedFile(handle(100, "table"), 1), ChainedFile(handle(100, "table"), 4)

    def take(id_, base_id, epoch, *links):
        book.base(base_id)
        book.taken(id_, base_id, {KEY: (epoch, told.append)})
        book.acknowledged(id_, written(base_id, *links))

    take(1, 0, 1, base)
    book.completed(1)
    assert told == [1]
    take(2, 1, 2, base, ChainedFile(handle(1), 2))
    take(3, 1, 3, base, ChainedFile(handle(1), 3))
    book.forget(2)
    book.completed(3)
    assert told == [1, 1], "a merge may reach back to the base"
    take(4, 3, 4, new_base)
    book.completed(4)
    assert told[2:] == [1], "a barrier on its way may name checkpoint 3, whose base is old"
    take(5, 4, 5, new_base, ChainedFile(handle(1), 5))
    book.completed(5)
    assert told[3:] == [4]
    book.completed(5)
    assert len(told) == 4, "each cut is confirmed once"


def test_tables_without_deltas_are_told_their_own_cut():
    book, told = ChainBook(), []
    book.taken(1, 0, {KEY: (7, told.append)})
    book.acknowledged(1, written(0, ChainedFile(handle(5, "table", inline=True), 7)))
    book.completed(1)
    assert told == [7]


def test_what_a_checkpoint_builds_on_that_is_being_written_is_not_forgotten():
    """Three at once, the first without a base: others complete while a thread still reads what changed."""
    book, told = ChainBook(), []
    tables = [ChainedFile(handle(100, "table"), epoch) for epoch in range(1, 6)]
    for id_ in (1, 2, 3):
        book.base(0)
        book.taken(id_, 0, {KEY: (id_, told.append)})
        book.acknowledged(id_, written(0, tables[id_ - 1]))
    book.completed(1)
    book.completed(2)
    assert book.base(2).chains[KEY].links == (tables[1],)
    book.taken(4, 2, {KEY: (4, told.append)})
    book.completed(3)
    assert told == [1, 2, 2], "checkpoint 4 asks for what changed since 2"
    assert book.base(3).chains[KEY].links == (tables[2],)
    book.taken(5, 3, {KEY: (5, told.append)})
    book.acknowledged(4, written(2, tables[1], ChainedFile(handle(1), 4)))
    book.acknowledged(5, written(3, tables[4]))
    book.completed(4)
    book.completed(5)
    assert told[3:] == [2, 2], "a barrier on its way may name 4, whose base is 2"


def test_a_chain_goes_on_only_while_the_state_is_described_the_same():
    long = pa.schema([("key", pa.int64())])
    info = state_info("count", "window", long, ("key",))
    assert may_continue(info, state_info("count", "window", long, ("key",), ttl_ms=5))
    assert may_continue(None, None)
    assert not may_continue(None, info)
    for other in (
        state_info("count", "window", pa.schema([("key", pa.int32())]), ("key",)),
        state_info("count", "window", None, ("key",)),
        state_info("count", "window", long, ("key",), version=2),
        state_info("count", "window", long, ("key", "ns")),
        state_info("count", "value", long, ("key",)),
    ):
        assert not may_continue(info, other)
