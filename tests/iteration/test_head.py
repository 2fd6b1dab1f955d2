"""The head of a loop by hand: what its checkpoints hold, what heads cut at different moments agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headgate.operators.elements import ObjectBatch
from headgate.operators.loops.head import DROPPED, LOG, ROUND, IterationHead, LoopSettings, Rounds
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import RestoredState, StateSnapshot
from headgate.tests.support.operators import operator_context

GROUPS = 12


class Seen:
    """An output, timers and metrics in one."""

    def __init__(self) -> None:
        self.records: list[tuple[Any, int]] = []
        self.counts: dict[str, int] = {}

    def emit(self, batch: ObjectBatch) -> None:
        assert batch.timestamps is not None
        self.records += zip(batch.records, batch.timestamps.tolist(), strict=True)

    def counter(self, name: str) -> Any:
        seen = self

        class Counter:
            def inc(self, amount: int = 1) -> None:
                seen.counts[name] = seen.counts.get(name, 0) + amount

        return Counter()

    def gauge(self, name: str, read: Any, labels: Any = None) -> None:
        return None


def make(
    tmp_path: Path, index: int = 0, parallelism: int = 1, memory: str = "64 kb"
) -> tuple[IterationHead, Seen]:
    head, seen = IterationHead(LoopSettings("loop", None, rounds=Rounds(100))), Seen()
    head.output = seen  # type: ignore[assignment]
    head.open(
        operator_context(
            index,
            parallelism,
            GROUPS,
            metrics=seen,
            options={"headgate.iteration.memory": memory},
            local_directory=lambda: tmp_path,
        )
    )
    return head, seen


def back(head: IterationHead, *records: Any) -> None:
    head.come_back(ObjectBatch(list(records)))


def send_all(head: IterationHead) -> None:
    while head.ready:
        head.process(head.queue.take(), 1)


def end_round(head: IterationHead) -> None:
    """The probe of this round is back, and the coordinator says: go on."""
    head.round_came_back(head.queue.end)
    head.next_round()


def restored(cuts: list[StateSnapshot], index: int, parallelism: int) -> RestoredState:
    """Return the part of a new subtask in the cuts of the old ones."""
    own = key_group_range(index, parallelism, GROUPS)
    tables = [cut.tables[LOG].make(None) for cut in cuts]
    rows = [r for t in tables for r in t.to_pylist() if r["key_group"] in own]
    items = [item for cut in cuts for item in cut.items[ROUND].items]  # type: ignore[union-attr]
    return RestoredState(
        tables={LOG: pa.Table.from_pylist(rows, schema=tables[0].schema)}, items={ROUND: items}
    )


def cut(head: IterationHead, checkpoint_id: int) -> StateSnapshot:
    assert head.barrier_came_back(checkpoint_id, head.queue.end)
    return head.snapshot(checkpoint_id)


def test_what_comes_back_in_a_round_is_of_the_next(tmp_path: Path) -> None:
    head, seen = make(tmp_path)
    head.process(ObjectBatch(["a"]), 0)
    back(head, "b")
    assert not head.ready
    end_round(head)
    back(head, "c")
    send_all(head)
    assert seen.records == [("a", 0), ("b", 1)]
    end_round(head)
    send_all(head)
    assert seen.records == [("a", 0), ("b", 1), ("c", 2)]


def test_heads_cut_in_neighbouring_rounds_go_on_in_the_later(tmp_path: Path) -> None:
    """The first had its go-ahead for round 1, and sent; the second had not, when their barriers went in.

    What came back to the second is of round 1, but for what the first had already caused: that is of 2.
    """
    first, _ = make(tmp_path, 0, 2)
    second, _ = make(tmp_path, 1, 2)
    back(first, "first, of 1")
    back(first, "first too, of 1")
    back(second, "second, of 1")
    for head in (first, second):
        head.round_came_back(head.queue.end)
    first.next_round()
    first.process(first.queue.take(), 1)
    first.barrier(1)
    second.barrier(1)
    back(second, "caused by the first, of 2")
    second.next_round()
    send_all(second)
    cuts = [cut(first, 1), cut(second, 1)]
    for parallelism in (1, 2, 3):
        heads = [make(tmp_path, index, parallelism) for index in range(parallelism)]
        for index, (head, _) in enumerate(heads):
            head.restore(restored(cuts, index, parallelism))
            assert head.round == 1
            send_all(head)
        sent = sorted(each for _, seen in heads for each in seen.records)
        assert sent == [("first too, of 1", 1), ("second, of 1", 1)]
        assert sum(head.take_arrived() for head, _ in heads) == 1
        for head, _ in heads:
            end_round(head)
            send_all(head)
        sent = sorted(each for _, seen in heads for each in seen.records)
        assert ("caused by the first, of 2", 2) in sent
        assert len(sent) == 3


def test_a_cut_taken_when_the_round_is_over_keeps_what_was_not_sent(tmp_path: Path) -> None:
    """The barrier went in in round 0; the round ended, and round 1 was sent, before it came back."""
    head, _ = make(tmp_path)
    back(head, "b", "c")
    head.barrier(1)
    end_round(head)
    send_all(head)
    state = restored([cut(head, 1)], 0, 1)
    again, seen = make(tmp_path)
    again.restore(state)
    assert (again.round, again.ready, again.take_arrived()) == (0, False, 2)
    end_round(again)
    send_all(again)
    assert seen.records == [("b", 1), ("c", 1)]


def test_logs_of_several_heads_keep_their_order(tmp_path: Path) -> None:
    heads = [make(tmp_path, index, 3)[0] for index in range(3)]
    for number, head in enumerate(heads):
        for each in range(4):
            back(head, (number, each))
        head.barrier(1)
    cuts = [cut(head, 1) for head in heads]
    one, seen = make(tmp_path)
    one.restore(restored(cuts, 0, 1))
    end_round(one)
    send_all(one)
    assert [record for record, _ in seen.records] == [(n, e) for n in range(3) for e in range(4)]


@pytest.mark.parametrize("memory", ["64 kb", "1 b"])
def test_a_log_on_disk_is_a_log(tmp_path: Path, memory: str) -> None:
    head, _ = make(tmp_path, memory=memory)
    back(head, "b", "c")
    head.barrier(1)
    again, seen = make(tmp_path, memory=memory)
    again.restore(restored([cut(head, 1)], 0, 1))
    end_round(again)
    send_all(again)
    assert seen.records == [("b", 1), ("c", 1)]
    assert (again.queue.spilled_bytes > 0) == (memory == "1 b")


def test_an_aborted_checkpoint_makes_no_cut(tmp_path: Path) -> None:
    head, _ = make(tmp_path)
    back(head, "b")
    head.barrier(1)
    head.on_checkpoint_aborted(1)
    assert not head.barrier_came_back(1, head.queue.end)
    head.barrier(2)
    assert head.barrier_came_back(2, head.queue.end)


def test_what_comes_back_to_a_loop_that_is_over_is_dropped_and_counted(tmp_path: Path) -> None:
    head, seen = make(tmp_path)
    back(head, "b", "c")
    head.close_loop()
    assert seen.counts[DROPPED] == 2
    back(head, "d")
    assert seen.counts[DROPPED] == 3
    assert not head.ready
