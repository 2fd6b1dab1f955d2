"""The index of a run finds every hash it holds, however hashes are spread, and few others."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from headgate.state.runs.run import RunIndex

close = st.integers(0, 1 << 64).flatmap(
    lambda base: st.lists(st.integers(0, 300).map(lambda more: min(base + more, (1 << 64) - 1)))
)
spread = st.lists(st.integers(0, (1 << 64) - 1))


@given(st.one_of(close, spread), st.one_of(close, spread), st.integers(0, 100))
def test_what_is_held_is_a_candidate(one: list[int], other: list[int], cut: int) -> None:
    held = np.array(sorted({*one, *other, 5}), np.uint64)
    # A hash may be held several times: by keys that differ in the second lane.
    held = np.sort(np.concatenate([held, held[:3]]))
    pieces = [piece for piece in (held[:cut], held[cut:]) if len(piece)]
    asked = np.unique(np.array([*one, *other, 5, 0, (1 << 64) - 1], np.uint64))
    candidates = RunIndex(pieces).probe(asked)
    found: dict[int, set[int]] = {}
    while candidates.positions.size:
        for position, row in zip(
            candidates.positions.tolist(), candidates.rows().tolist(), strict=True
        ):
            found.setdefault(position, set()).add(row)
        candidates = candidates.others(np.arange(len(candidates.positions)))
    for position, hash_ in enumerate(asked):
        assert set(np.flatnonzero(held == hash_).tolist()) <= found.get(position, set())


def test_what_is_not_held_is_rarely_a_candidate() -> None:
    rng = np.random.default_rng(1)
    held = np.sort(rng.integers(0, 1 << 64, 50_000, np.uint64))
    index = RunIndex([held])
    asked = np.sort(rng.integers(0, 1 << 64, 50_000, np.uint64))
    assert len(index.probe(asked).positions) < 0.03 * len(asked)
    assert index.nbytes < 4 * len(held)
