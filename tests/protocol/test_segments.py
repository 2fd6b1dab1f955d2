"""Pieces of state in shared objects: where they lie, how they are read, and when they are written anew."""

from __future__ import annotations

import random

import msgspec
import pytest

from headgate.runtime.protocol import names
from headgate.runtime.protocol.checkpoints.manifest import (
    Manifest,
    ManifestOperator,
    ManifestSubtask,
    unshared_files,
    verify,
)
from headgate.runtime.protocol.checkpoints.segments import (
    SegmentLedger,
    extents,
    is_piece,
    layout,
)
from headgate.state.snapshot import OperatorSnapshot, StateHandle


def segment(size: int, checkpoint_id: int = 1, number: int = 0) -> str:
    return names.segment_file(1, checkpoint_id, "job-1-0001", number, size)


def piece(file: str, offset: int, size: int, kind: str = "delta") -> StateHandle:
    return StateHandle(
        state="s", kind=kind, size_bytes=size, checksum="x", rows=1, file=file, offset=offset
    )


def manifest(id_: int, *handles: StateHandle) -> Manifest:
    snapshot = OperatorSnapshot(operator="o", handles=handles)
    subtasks = (ManifestSubtask(subtask=0, snapshots=(snapshot,)),)
    operator = ManifestOperator(name="o", parallelism=1, subtasks=subtasks)
    return Manifest(
        checkpoint_id=id_, trigger_ms=0, completed_ms=0, duration_ms=0, max_parallelism=1,
        operators=(operator,),
    )  # fmt: skip


def test_the_name_of_a_segment_has_its_size_and_its_checkpoint() -> None:
    name = segment(1234, checkpoint_id=7)
    assert names.segment_bytes(name) == 1234
    assert names.checkpoint_of(name) == (1, 7)
    own = names.checkpoint_file(1, 7, "operator-5.segment", 0, "state", "delta")
    assert names.segment_bytes(own) is None
    assert is_piece(piece(name, 0, 9))
    assert not is_piece(piece(own, 0, 9))
    assert not is_piece(StateHandle(state="s", kind="items", size_bytes=1, checksum="", rows=0))


def test_segments_of_workers_and_numbers_have_different_names() -> None:
    made = {names.segment_file(1, 1, f"w{w}", n, 9) for w in range(3) for n in range(12)}
    assert len(made) == 36


def test_pieces_lie_one_behind_the_other() -> None:
    assert layout([]) == []
    assert layout([5, 0, 7, 1]) == [0, 5, 5, 12]


@pytest.mark.parametrize("seed", range(20))
def test_adjacent_pieces_are_read_at_once(seed: int) -> None:
    rng = random.Random(seed)
    handles = []
    for number in range(3):
        sizes = [rng.randint(1, 40) for _ in range(20)]
        file = segment(sum(sizes), number=number)
        places = zip(layout(sizes), sizes, strict=True)
        handles += [piece(file, *place) for place in places if rng.random() < 0.7]
    handles.append(piece("chk/1-1/of-its-own.channel", 7, 5))  # packs of records are in such files
    rng.shuffle(handles)
    found = extents([*handles, msgspec.structs.replace(handles[0], file=None)], size_max=100)
    assert found.keys() == {(handle.file, handle.offset) for handle in handles}
    for handle in handles:
        extent = found[handle.file, handle.offset]
        assert extent.file == handle.file
        assert extent.start <= handle.offset
        assert handle.offset + handle.size_bytes <= extent.end
    for extent in {id(each): each for each in found.values()}.values():
        own = [h for h in handles if found[h.file, h.offset] is extent]
        assert sum(h.size_bytes for h in own) == extent.end - extent.start, "nothing else is read"
        assert extent.end - extent.start <= 100


def test_a_segment_goes_with_the_last_checkpoint_that_needs_a_piece_of_it() -> None:
    file = segment(30)
    old = manifest(1, piece(file, 0, 10), piece(file, 10, 10))
    new = manifest(2, piece(file, 10, 10))
    other = manifest(3, piece(segment(10, 3), 0, 10))
    assert unshared_files([old], [new]) == []
    assert unshared_files([old, new], [other]) == [file]


def test_a_segment_is_whole_only_with_the_size_that_was_written() -> None:
    file = segment(30)
    needs = manifest(2, piece(file, 0, 10))
    assert verify(needs, {file: 30}) == []
    for size in (10, 29, 31):
        (problem,) = verify(needs, {file: size})
        assert (problem.expected_bytes, problem.found_bytes) == (30, size)


def test_what_is_needed_of_a_sparse_segment_is_to_be_written_anew() -> None:
    ledger = SegmentLedger(amplification_max=2.0)
    full, half, sparse = (segment(100, number=number) for number in range(3))
    ledger.note(1, (0, 0), [piece(full, 0, 60), piece(half, 0, 25), piece(sparse, 0, 25)])
    ledger.note(1, (0, 1), [piece(half, 25, 25), piece(sparse, 25, 24)])
    assert ledger.sparse(1) == {sparse}
    ledger.note(1, (0, 2), [piece(sparse, 50, 1)])
    assert ledger.sparse(1) == set(), "another subtask needs a part of it"


def test_older_checkpoints_are_forgotten() -> None:
    ledger = SegmentLedger(amplification_max=1.0)
    for id_ in (1, 2, 3):
        ledger.note(id_, (0, 0), [piece(segment(100, id_), 0, 10)])
    assert ledger.sparse(2) == {segment(100, 2)}
    assert ledger.sparse(1) == set()
    assert ledger.sparse(0) == set()
    assert ledger.sparse(3) == {segment(100, 3)}
    ledger.forget(3)
    assert ledger.sparse(3) == set(), "it was aborted"
    ledger.note(4, (0, 0), [piece(segment(100, 4), 0, 10)])
    ledger.clear()
    assert ledger.sparse(4) == set()
