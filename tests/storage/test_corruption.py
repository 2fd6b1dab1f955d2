"""Goal: a damaged object gives an error that names it, or the right result; never a wrong one.

Method: seeded flips, truncations, swaps and overwritten pieces in every kind of object that a checkpoint
consists of, and in files that wait to be committed or read. Logs, metadata and state files are read by
themselves (hundreds of damages), and a whole job on virtual time crashes and is restored from storage with
a damaged object (a few; `tests/fuzz` does many).
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from headgate.errors import CorruptError
from headgate.runtime.protocol.failures import FailureCategory, FailureKind
from headgate.tests.fuzz import log_entries, state_files
from headgate.tests.support import (
    corruption,
    damaged_files,
    damaged_jobs,
    damaged_logs,
    damaged_parts,
)

PAGE_HEADER_BYTES = 24
OVER = (
    "log/00000000000000000001.json",
    "log/00000000000000000007.json",
    "log/generation/0000000001.json",
)


@pytest.mark.parametrize("name", sorted(damaged_logs.objects()))
def test_damage_in_a_record_is_named(name):
    rng = random.Random(name)
    seen = Counter(damaged_logs.check_damage(name, rng) for _ in range(40))
    # Start entries and claims of generations that are over only hold their places: they are not read.
    over = name in OVER
    assert seen == {"right result" if over else "named error": 40}


def test_every_bit_of_the_newest_checkpoint_entry_counts():
    """The flip that once emptied all state: one letter of a field's name, or of any value."""
    objects = damaged_logs.objects()
    name = [n for n, data in objects.items() if b"CheckpointCompleted" in data][-1]
    data = objects[name]
    start = data.index(b'"snapshots"')
    for position in range(start, start + 60):
        flipped = bytearray(data)
        flipped[position] ^= 1
        with pytest.raises(CorruptError, match="checksum"):
            damaged_logs.read({**objects, name: bytes(flipped)})


@pytest.mark.parametrize("part", damaged_files.PARTS)
@pytest.mark.parametrize("name", sorted(damaged_files.files().objects))
def test_damage_in_a_state_file_is_named(name, part):
    rng = random.Random(name + part)
    seen = Counter(damaged_files.check_damage(name, part, rng) for _ in range(30))
    assert seen["named error"]


def test_a_flipped_header_of_a_page_is_found_also_by_who_reads_a_part():
    """Parquet's own checksums do not cover these headers, and some flips there change values."""
    import io

    import pyarrow.parquet as pq

    from headgate.state.checked_files import row_group_extent

    name = "chk/1-1/table.parquet"
    data = damaged_files.files().objects[name]
    metadata = pq.ParquetFile(io.BytesIO(data)).metadata
    part = damaged_files.PARTS["part"]
    statistics = [
        metadata.row_group(g).column(0).statistics for g in range(metadata.num_row_groups)
    ]
    group = next(g for g, s in enumerate(statistics) if s.min <= part.first <= s.max)
    start, _ = row_group_extent(metadata, group)
    numbers = metadata.row_group(group).column(metadata.num_columns - 1).data_page_offset
    for column in (start, numbers):
        for position in range(column, column + PAGE_HEADER_BYTES):
            flipped = bytearray(data)
            flipped[position] ^= 1 << (position % 8)
            objects = {**damaged_files.files().objects, name: bytes(flipped)}
            with pytest.raises(CorruptError, match="table.parquet"):
                damaged_files.read(objects, "part")


@pytest.mark.parametrize("inline", damaged_jobs.INLINE)
@pytest.mark.parametrize("backend", damaged_jobs.BACKENDS)
def test_a_job_restored_from_a_damaged_object_fails_and_names_it(backend, inline):
    _, objects = damaged_jobs.undamaged(backend, inline)
    rng = random.Random(f"{backend} {inline}")
    by_kind = {damaged_jobs.kind_of(name): name for name in objects}
    for name in by_kind.values():
        damaged_jobs.check_damage(name, rng, backend, inline)


@pytest.mark.parametrize("format", damaged_parts.FORMATS)
def test_damage_in_a_draft_of_a_sink_is_named(format):
    rng = random.Random(format)
    seen = Counter(damaged_parts.check_draft(format, rng) for _ in range(40))
    assert seen == {"named error": 40}


def test_a_damaged_draft_stays_invisible_and_is_kept(tmp_path):
    """No wrong row is read, and a draft that can be mended stays where it was."""
    state = damaged_parts.write_drafts(str(tmp_path), "csv")
    draft, other = damaged_parts.drafts_in(str(tmp_path))
    data = draft.read_bytes()
    draft.write_bytes(data.replace(b"name 1", b"name 2"))
    with pytest.raises(CorruptError, match=draft.name):
        damaged_parts.commit_drafts(str(tmp_path), "csv", state)
    assert draft.exists()
    assert not (tmp_path / draft.name).exists()
    draft.write_bytes(data)
    assert len(damaged_parts.commit_drafts(str(tmp_path), "csv", state)) == 80
    assert other.name in {path.name for path in tmp_path.glob("part-*")}


def test_damage_in_a_file_of_a_spark_result_is_named():
    rng = random.Random("result")
    seen = Counter(damaged_parts.check_result(rng) for _ in range(120))
    # Between the row groups and the footer lie page indexes, and only wanted row groups are read.
    assert set(seen) <= {"named error", "right result"}
    assert seen["named error"] > 100


def test_every_byte_of_a_row_group_and_of_the_footer_counts(tmp_path):
    """Also the headers of pages, which the checksums of Parquet itself do not cover."""
    splits = damaged_parts.write_result(str(tmp_path))
    path = Path(splits[-1].path)
    data = path.read_bytes()
    mine = [split for split in splits if split.path == str(path)]
    for position in range(len("PAR1"), len(data), 7):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        damaged_parts.overwrite(path, bytes(flipped))
        with pytest.raises(CorruptError, match=path.name):
            damaged_parts.read_result(mine, ["id"])


def test_damage_is_never_a_failure_that_is_tried_again():
    kind = FailureKind.of(CorruptError("x"))
    assert (kind, kind.recoverable, kind.category) == (
        FailureKind.CORRUPT,
        False,
        FailureCategory.RESOURCE,
    )


def test_the_fuzzing_targets_run():
    rng = random.Random(4)
    for _ in range(5):
        log_entries.run(rng)
        state_files.run(rng)


def test_damage_always_changes_something_and_comes_in_each_kind():
    rng = random.Random(1)
    for size in (1, 2, 3, 100):
        data = rng.randbytes(size)
        kinds = Counter()
        for _ in range(200):
            kind, changed = corruption.damaged(data, rng)
            assert changed != data
            kinds[kind] += 1
        assert kinds["flip"] > 60
        assert size < 2 or len(kinds) == len(corruption.DAMAGES)
