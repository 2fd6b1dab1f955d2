"""The subtask that reads a split which was found while the job runs, against a plain model."""

from __future__ import annotations

import random

import pytest

from headgate.runtime.protocol.split_discovery import (
    EndedSplits,
    LedgerStart,
    SplitLedger,
    ready_splits,
)

KEYS = [f"split-{number}" for number in range(12)]


def share(key: str) -> int:
    return int(key.rpartition("-")[2]) * 7


def ledgers(known: list[str], keys: list[str], width: int) -> list[SplitLedger]:
    """Those of all subtasks, `keys` from the restored states."""
    start = LedgerStart(tuple(known), width)
    made = [SplitLedger(index, start, share) for index in range(width)]
    for ledger in made:
        ledger.add_known(keys)
    return made


def offer(ledger: SplitLedger, keys: list[str]) -> list[str]:
    return [split.decode() for split in ledger.offer({key: key.encode() for key in keys})]


@pytest.mark.parametrize("seed", range(200))
def test_each_split_is_read_once_through_restores_at_other_parallelisms(seed: int) -> None:
    """A split is read, in what counts, by exactly one subtask: a restore takes back what came after."""
    rng = random.Random(seed)
    width = rng.randint(1, 4)
    exist = rng.sample(KEYS, rng.randint(0, 5))
    being_read = {key: rng.randrange(width) for key in exist}
    ended: set[str] = set()
    current = ledgers(exist, [], width)
    cuts = [(dict(being_read), set(ended), [ledger.known for ledger in current])]
    for _ in range(60):
        match rng.choice(("appears", "offer", "offer", "ends", "checkpoint", "restore")):
            case "appears":
                exist += rng.sample(KEYS, 1)
            case "offer":  # to some subtasks; incomplete, in any order, with repetitions
                offered = rng.choices(exist, k=rng.randint(0, 8)) if exist else []
                for index in rng.sample(range(width), rng.randint(0, width)):
                    for key in offer(current[index], offered):
                        assert key not in being_read, "handed to two readers"
                        assert key not in ended, "read twice"
                        being_read[key] = index
            case "ends" if being_read:
                key = rng.choice(sorted(being_read))
                del being_read[key]
                ended.add(key)
            case "checkpoint":
                cuts.append((dict(being_read), set(ended), [each.known for each in current]))
            case "restore":
                being_read, ended, states = rng.choice(cuts[-2:])
                being_read, ended = dict(being_read), set(ended)
                width = rng.randint(1, 4)
                union = [key for keys in states for key in keys]
                assert sorted(union) == sorted(being_read.keys() | ended), "each key is kept once"
                current = ledgers(sorted(being_read), union, width)
    for ledger in current:
        for key in offer(ledger, KEYS):
            assert key not in being_read
            assert key not in ended
            being_read[key] = 0
    assert being_read.keys() | ended == set(KEYS), "lost"


def test_positions_alone_are_enough_where_no_ledger_was_kept() -> None:
    """A checkpoint of a source that did not discover splits has positions only."""
    for ledger in ledgers(KEYS[:5], [], 3):
        assert offer(ledger, KEYS[:5]) == []


def test_owners_do_not_depend_on_what_a_ledger_began_with() -> None:
    """A region that is restarted alone begins with a newer checkpoint than the others."""
    old, new = ledgers([], [], 4), ledgers(KEYS[:3], KEYS[:2], 4)
    mixed = [old[0], new[1], old[2], new[3]]
    taken = [key for ledger in mixed for key in offer(ledger, KEYS[3:])]
    assert sorted(taken) == sorted(KEYS[3:])


def test_consecutive_shares_go_to_different_subtasks() -> None:
    start = LedgerStart((), 4)
    owned = [SplitLedger(index, start, int).owns for index in range(4)]
    assert [[key for key in "01234567" if owns(key)] for owns in owned] == [
        ["0", "4"],
        ["1", "5"],
        ["2", "6"],
        ["3", "7"],
    ]


def test_a_split_has_ended_with_a_checkpoint_that_is_complete() -> None:
    ended = EndedSplits(LedgerStart(("c",), 1))
    ended.restore(["a", "c"])
    ended.begun(["c", "d", "e"])
    keys = ("a", "c", "d", "e", "other")

    def among() -> tuple[str, ...]:
        return ended.among(keys, lambda: ["e"])

    assert among() == ("a",), "it had ended at the restored checkpoint"
    ended.cut(1, ["d", "e"])
    ended.cut(2, ["e"])
    ended.aborted(2)
    assert among() == ("a",)
    ended.completed(1)
    assert among() == ("a", "c")
    ended.cut(3, ["e"])
    ended.cut(4, ["e"])
    ended.completed(4)
    assert among() == ("a", "c", "d")


def test_without_checkpoints_a_split_has_ended_at_once() -> None:
    ended = EndedSplits(LedgerStart((), 1, checkpoints=False))
    ended.begun(["a", "b"])
    assert ended.among(["a", "b", "c"], lambda: ["b"]) == ("a",)


def test_a_split_waits_for_all_of_its_parents_that_exist() -> None:
    found = {key: key.encode() for key in ("a", "b", "ab", "b2", "old")}
    parents = {"ab": ("a", "b"), "b2": ("b",), "old": ("gone",)}
    ready, awaited = ready_splits(found, parents, [])
    assert (list(ready), awaited) == (["a", "b", "old"], ["a", "b"])
    ready, awaited = ready_splits(found, parents, ["b"])
    assert (list(ready), awaited) == (["a", "b", "b2", "old"], ["a", "b"])
    assert ready_splits(found, parents, ["a", "b"])[0] == found
