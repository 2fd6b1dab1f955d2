"""Scans: keys and values as of a checkpoint, while the state changes and later checkpoints complete."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headgate.operators.queries import QueriedEntries
from headgate.state.keyed.base import ABSENT
from headgate.state.queryable import CommittedPoints, NotKept, OldByKey
from headgate.tests.query.test_committed import MADE, Steps, push, steps, summed, tell
from headgate.tests.support.subtasks import Step

__all__ = ["steps"]
USERS = [f"u{n}" for n in range(60)]


def shown(found: Any) -> Any:
    """Return a value as the models of `test_committed` have it."""
    if isinstance(found, QueriedEntries):
        entries = list(found.entries)
        return sorted(entries) if found.is_map else [(n, v) for n, (_, v) in enumerate(entries)]
    return msgspec.to_builtins(found) if isinstance(found, msgspec.Struct) else found


class Scan:
    """One scan of all subtasks, one piece at a time."""

    def __init__(self, step: Step, state: str, checkpoint_id: int, wanted: dict[str, Any]) -> None:
        self.wanted, self.found, self.times = wanted, {}, Counter[str]()
        self._state, self._checkpoint = state, checkpoint_id
        self._scans = [(each, each.scan(state, checkpoint_id)) for each in step.operators]
        self._pieces = self._all()

    def _all(self) -> Iterator[None]:
        for operator, scan in self._scans:
            for piece in scan.pieces:
                for low in range(0, len(piece), 3):
                    keys = piece[low : low + 3]
                    values = operator.query_many(self._state, keys, self._checkpoint)
                    for key, value in zip(keys, values, strict=True):
                        value = shown(value)
                        if value is not ABSENT and value != []:
                            self.times[key] += 1
                            self.found[key] = value
                    yield
            scan.close()
            scan.close()

    def go_on(self) -> bool:
        """Read one piece; return False at the end, when all must be as it was at the checkpoint."""
        if next(self._pieces, self) is not self:
            return True
        assert self.found == self.wanted
        assert set(self.times.values()) <= {1}
        return False


def all_of(kind: str, model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what each state of a step has, by key, without keys that have nothing."""
    found: dict[str, dict[str, Any]] = {}
    for user in USERS:
        for state, value in MADE[kind][2](model, user).items():
            by_key = found.setdefault(state, {})
            if value is not ABSENT and value != []:
                by_key[user] = value
    return found


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("seed", range(2))
def test_a_scan_is_of_its_checkpoint(steps: Steps, kind: str, seed: int) -> None:
    make, write, _ = MADE[kind]
    rng = random.Random(f"scan {kind} {seed}")
    step = steps(make(), rng.choice((1, 2, 3)))
    model: dict[str, Any] = {}
    newest, stored, next_id = 0, None, 1
    pending: dict[int, Any] = {}
    models: dict[int, dict[str, Any]] = {}
    scans: list[Scan] = []
    ended = 0
    for _ in range(150):
        match rng.randrange(16):
            case 0 | 1:
                models[next_id] = copy.deepcopy(model)
                pending[next_id] = step.checkpoint(next_id)
                next_id += 1
            case 2 | 3 if pending:
                done = rng.choice(list(pending))
                stored, newest = pending[done], done
                pending = {id_: each for id_, each in pending.items() if id_ > done}
                tell(step, done, complete=True)
            case 4 if pending:
                lost = rng.choice(list(pending))
                del pending[lost]
                tell(step, lost, complete=False)
            case 5 if stored is not None and rng.random() < 0.2:
                step.restore(stored, rng.choice((1, 2, 3)), checkpoint_id=newest)
                model, pending, scans = copy.deepcopy(models[newest]), {}, []
            case 6 if newest and len(scans) < 4:
                for state, wanted in all_of(kind, models[newest]).items():
                    scans.append(Scan(step, state, newest, wanted))
            case 7 | 8 | 9 if scans:
                chosen = rng.choice(scans)
                for _ in range(rng.choice((1, 100))):
                    if not chosen.go_on():
                        scans.remove(chosen)
                        ended += 1
                        break
            case 10:
                for state, wanted in all_of(kind, model).items():
                    live = Scan(step, state, 0, wanted)
                    while live.go_on():
                        pass
            case _:
                rows = [(rng.choice(USERS), rng.randrange(100)) for _ in range(rng.randint(1, 9))]
                push(step, *rows)
                for row in rows:
                    write(model, *row)
    for scan in scans:
        while scan.go_on():
            pass
        ended += 1
    assert ended


def test_a_scan_holds_its_point() -> None:
    points = CommittedPoints(OldByKey, 1_000)
    points.cut(1)
    points.hold(1)
    for number in (2, 3, 4):
        points.cut(number)
        assert points.newest is not None
        points.newest.keep(f"k{number}", number)
        points.completed(number)
    assert [each.values for each in points.since(1)] == [{"k2": 2, "k3": 3}, {"k4": 4}]
    with pytest.raises(NotKept):
        points.since(2)
    points.release(1)
    points.release(1)
    with pytest.raises(NotKept):
        points.hold(1)
    assert [each.values for each in points.since(4)] == [{"k4": 4}]


def test_what_scans_hold_is_dropped_first() -> None:
    points = CommittedPoints(OldByKey, 1_000)
    points.cut(1)
    points.hold(1)
    assert points.newest is not None
    for each in range(5):
        points.newest.keep(each, each)
    points.cut(2)
    points.completed(2)
    points.newest.keep("a", 1)
    points.grew()
    assert len(points.since(1)) == 2
    points.newest.keep("b", 1)
    points.grew()
    with pytest.raises(NotKept):
        points.since(1)
    assert points.since(2) == [points.newest]


def test_keys_that_lie_in_runs(steps: Steps) -> None:
    """Enough of them that parts are written while the scan goes on."""
    step = steps(summed(), options={"taskmanager.memory.managed.size": "256kb"})
    rows = [(f"user {n}", n) for n in range(3_000)]
    for low in range(0, 3_000, 100):
        push(step, *rows[low : low + 100])
    step.checkpoint(1)
    wanted = {user: {"n": 1, "top": n, "total": n} for user, n in rows}
    scan = Scan(step, "running", 1, wanted)
    going = True
    for low in range(0, 3_000, 100):
        push(step, *rows[low : low + 100], *[(f"later {n}", 1) for n in range(low, low + 100)])
        for _ in range(40):
            going = going and scan.go_on()
    while going:
        going = scan.go_on()
