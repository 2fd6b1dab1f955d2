"""The runs of one state: lookup, new runs, merges, and versions that keep files alive.

A version is an immutable list of runs. Long reads pin a version; a file is deleted when no current or
pinned version has it. Lookups run in one thread, the mailbox; new runs and merges come from others. Only
new runs change the rows that lookups find. A merge drops those that have expired by now, so the cut of a
checkpoint has to have the runs that were current at its barrier, and not merges that end later.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import msgspec
import numpy as np
import pyarrow as pa

from ..hashing import Hashes
from ..settings import RunSettings
from ..values import Index
from .layout import PackedRows, RowLayout, join_rows
from .merge import Expired, choose_runs, merged, newest
from .run import Hits, Run, RunWriter
from .run_file import FilePool


class _Stopped(Exception):
    """Raised to end a merge that is no longer wanted."""


class Version(msgspec.Struct, frozen=True):
    """A list of runs, newest first."""

    runs: tuple[Run, ...] = ()

    def pin(self) -> None:
        """Keep the files until `unpin`."""
        for run in self.runs:
            for segment in run.segments:
                segment.file.file.pin()

    def unpin(self) -> None:
        """Undo one `pin`."""
        for run in self.runs:
            for segment in run.segments:
                segment.file.file.unpin()


class Found(msgspec.Struct, frozen=True):
    """The result of a lookup: row i of `table` belongs to the key at `positions[i]` of those asked for."""

    positions: Index
    table: pa.Table


class RunSet:
    """The runs of one state in one directory. `clear` deletes files without other pins."""

    def __init__(
        self,
        directory: Path,
        layout: RowLayout,
        settings: RunSettings,
        new_id: Callable[[], str],
        pool: FilePool | None = None,
        expired: Expired | None = None,
    ) -> None:
        self.layout, self._settings, self._expired = layout, settings, expired
        self._directory, self._new_id = directory, new_id
        self._version = Version()
        self._lock = Lock()
        self._flush_writer, self._merge_writer = (
            RunWriter(directory, layout, settings.file_bytes, new_id, pool) for _ in range(2)
        )
        self._cold = False
        self._stopped = False

    @property
    def version(self) -> Version:
        """The current version, not pinned."""
        return self._version

    @property
    def index_bytes(self) -> int:
        """Memory of the indexes."""
        return sum(run.index.nbytes for run in self._version.runs)

    @property
    def buffer_bytes(self) -> int:
        """The memory of the buffer that is kept between new runs."""
        return self._flush_writer.nbytes

    def release_buffer(self) -> None:
        """Free the buffer; must not be called while `add` runs."""
        self._flush_writer.release()

    def pin(self) -> Version:
        """Pin the current version and return it."""
        with self._lock:
            self._version.pin()
            return self._version

    def stop(self) -> None:
        """Make a merge under way end early, without effect."""
        self._stopped = True

    def clear(self) -> None:
        """Forget all runs. Files that are pinned elsewhere stay until they are unpinned."""
        self._install(lambda runs: ())
        self.release_buffer()

    # --- reading -------------------------------------------------------------------------------

    def lookup(self, hashes: Hashes, checks: Hashes | None) -> Found:
        """Return the rows of these distinct identities. Deleted rows are not found."""
        order = np.argsort(hashes)
        hashes = hashes[order]
        checks = checks[order] if checks is not None and self.layout.wide else None
        if self.layout.wide and checks is None:
            checks = np.zeros(len(hashes), np.uint64)
        found: list[tuple[Index, PackedRows]] = []
        rest = np.arange(len(hashes))
        with self._watching_pages():
            for run in self._version.runs:
                if not rest.size:
                    break
                hits = run.find(hashes, checks, self._cold)
                if hits:
                    found += [(rest[hit.positions], hit.rows) for hit in hits]
                    left = _others(hits, len(rest))
                    rest, hashes = rest[left], hashes[left]
                    checks = None if checks is None else checks[left]
        return self._gather(order, found)

    def lookup_all(self, hashes: Hashes) -> PackedRows | None:
        """Return all rows with these ascending, distinct first lanes, in their order; None if there are
        none. Deleted rows are among them.
        """
        with self._watching_pages():
            hits = [run.find_all(hashes, self._cold) for run in self._version.runs]
        found = [rows for rows in hits if rows is not None]
        if not found:
            return None
        rows = join_rows(found)
        return rows if len(found) == 1 else newest(rows, self.layout, self.layout.empty(len(rows)))

    @contextmanager
    def _watching_pages(self) -> Iterator[None]:
        """Note whether a lookup waits for the disk, and bound the pages that it maps."""
        faults = _faults()
        yield
        self._cold = _faults() - faults >= self._settings.prefetch_faults
        self._forget_pages()

    def _gather(self, order: Index, found: list[tuple[Index, PackedRows]]) -> Found:
        if not found:
            return Found(np.empty(0, np.intp), self.layout.schema.empty_table())
        positions = np.concatenate([at for at, _ in found])
        rows = join_rows([rows for _, rows in found])
        deleted = self.layout.deleted(rows.records)
        if deleted.any():
            kept = np.flatnonzero(~deleted)
            positions, rows = positions[kept], rows.take(kept)
        return Found(order[positions], self.layout.unpack(rows))

    def _forget_pages(self) -> None:
        """Unmap pages once lookups have touched more than the settings allow."""
        segments = [segment for run in self._version.runs for segment in run.segments]
        if sum(segment.touched_bytes for segment in segments) > self._settings.mapped_bytes:
            for segment in segments:
                segment.forget()

    def merged(
        self,
        version: Version,
        chunk_bytes: int | None = None,
        expired: Expired | None = None,
    ) -> Iterator[PackedRows]:
        """Yield the rows of a pinned version in the order of their hashes; see `merge.merged`."""
        return merged(
            version.runs,
            self.layout,
            chunk_bytes or self._settings.merge_bytes,
            keep_deleted=False,
            expired=expired,
        )

    # --- writing, in threads -------------------------------------------------------------------

    def add(self, pieces: Iterator[PackedRows], onto: Version | None = None) -> Version:
        """Write the newest run, and return the pinned version that begins with it. Only one call at a
        time.

        Args:
            pieces: the rows of the run.
            onto: the older runs of the version that is returned, pinned for it; None: those that are
                current when the run has been written.
        """
        try:
            run = self._flush_writer.write(pieces)
        except BaseException:
            if onto is not None:
                onto.unpin()
            raise
        if run is None:
            return self.pin() if onto is None else onto
        if onto is None:
            return self._install(lambda runs: (run, *runs), pin=True, born=run)
        self._install(lambda runs: (run, *runs))
        return Version(
            (run, *onto.runs)
        )  # its writer has pinned the run, and the caller the others

    def adopt(self, runs: Sequence[Run]) -> None:
        """Take over runs, newest first, into an empty set. Their files must have been pinned once."""
        self._version = Version(tuple(runs))

    @property
    def wants_merge(self) -> bool:
        """True if `merge_once` has work."""
        return self._choice(self._version.runs) is not None

    @property
    def has_too_many_runs(self) -> bool:
        """True if new runs should wait for a merge."""
        return len(self._version.runs) >= self._settings.runs_stop

    def merge_once(self) -> None:
        """Merge some runs if there are too many. Only one call at a time; `add` may run meanwhile."""
        version = self.pin()
        try:
            choice = self._choice(version.runs)
            if choice is None:
                return
            chosen = version.runs[choice[0] : choice[1]]
            oldest = choice[1] == len(version.runs)
            pieces = merged(
                chosen,
                self.layout,
                self._settings.merge_bytes,
                keep_deleted=not oldest,
                expired=self._expired,
            )
            run = self._merge_writer.write(self._until_stopped(pieces))
            self._install(lambda runs: _replaced(runs, chosen, run), born=run)
        except _Stopped:
            return
        finally:
            self._merge_writer.release()
            version.unpin()

    def _until_stopped(self, pieces: Iterator[PackedRows]) -> Iterator[PackedRows]:
        for piece in pieces:
            if self._stopped:
                raise _Stopped
            yield piece

    def _choice(self, runs: Sequence[Run]) -> tuple[int, int] | None:
        sizes = [len(run) for run in runs]
        return choose_runs(sizes, self._settings.runs_per_level, self._settings.runs_max)

    def _install(
        self,
        change: Callable[[tuple[Run, ...]], tuple[Run, ...]],
        *,
        pin: bool = False,
        born: Run | None = None,
    ) -> Version:
        """Make a new version current. `born` has been pinned by its writer."""
        with self._lock:
            before = self._version
            after = Version(change(before.runs))
            after.pin()
            if pin:
                after.pin()
            self._version = after
        before.unpin()
        if born is not None:
            Version((born,)).unpin()
        return after


def _replaced(
    runs: tuple[Run, ...], chosen: Sequence[Run], merged_run: Run | None
) -> tuple[Run, ...]:
    """Return the runs with the merged one in the place of the chosen ones. Newer runs may have been added
    meanwhile.

    If the set has been cleared meanwhile, there is nothing to replace.
    """
    if chosen[0] not in runs:
        return runs
    at = runs.index(chosen[0])
    new = () if merged_run is None else (merged_run,)
    return (*runs[:at], *new, *runs[at + len(chosen) :])


def _others(hits: Sequence[Hits], size: int) -> Index:
    """Return the positions that were not hit."""
    left = np.ones(size, np.bool_)
    for hit in hits:
        left[hit.positions] = False
    return np.flatnonzero(left)


def _faults() -> int:
    """Return the number of times that this thread waited for the disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
