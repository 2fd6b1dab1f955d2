"""Deadlines give out each slot once, at the bucket of its earliest time, as a plain dictionary would."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.operators.windows.sessions.table import Deadlines

WIDTH_MS = 7


@pytest.mark.parametrize("seed", range(20))
def test_deadlines_are_those_of_a_dictionary(seed: int) -> None:
    rng = np.random.default_rng(seed)
    deadlines, model, now = Deadlines(WIDTH_MS), dict[int, int](), 0
    for _ in range(80):
        if rng.random() < 0.6:
            slots = rng.permutation(50)[: rng.integers(0, 20)]
            times = now + rng.integers(0, 200, len(slots))
            deadlines.add(slots, times)
            for slot, bucket in zip(slots.tolist(), (times // WIDTH_MS).tolist(), strict=True):
                model[slot] = min(bucket, model.get(slot, bucket))
        else:
            now += int(rng.integers(0, 60))
            due = sorted(slot for slot, bucket in model.items() if bucket <= now // WIDTH_MS)
            assert deadlines.pop(now).tolist() == due
            for slot in due:
                del model[slot]
