"""Finds what an attempt restores: a checkpoint of this job, or the state that the user named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from ...errors import CorruptError, MissingFileError, StateError, UsageError
from ...state.snapshot import StateHandle
from ..options.state import RESTORE_FALLBACK
from ..plan import PhysicalPlan
from ..protocol.checkpoints.manifest import Manifest
from ..savepoint import store as savepoints
from ..savepoint.locate import locate
from ..storage.base import CheckpointStore
from .restore import ReadHandle

if TYPE_CHECKING:
    from .context import JobContext


@dataclass(frozen=True, slots=True)
class Restored:
    """The state of an attempt.

    Attributes:
        manifest: what it consists of.
        root: where its files lie; empty: in the job's own storage.
        text: what it is, for a person.
    """

    manifest: Manifest
    root: str
    text: str

    @property
    def own(self) -> bool:
        """It is a checkpoint of this job, so that the next one may build on it."""
        return not self.root


async def find_restored(job: JobContext) -> Restored | None:
    """Find what this attempt restores. A checkpoint whose publication is in doubt is settled first.

    Raises:
        StateError: what the run was told to restore is not there.
        UsageError: it is not something to be claimed.
        StorageError: the log cannot be brought up to date.
    """
    if job.log is not None:
        await job.log.settle()
        for logged in reversed(job.log.view.restorable):
            if logged.checkpoint_id not in job.unreadable:
                text = f"checkpoint {logged.checkpoint_id}"
                return Restored(logged.manifest, "", text)
    if not job.spec.restore_from:
        return None
    if job.located is None:
        job.located = await locate(job.open_at, job.spec.restore_from, job.spec.options, job.clock)
    found = job.located
    if job.spec.claim and found.savepoint is None:
        raise UsageError(
            f"only a savepoint can be claimed, and this is {found.text}",
            fix="leave out --claim-mode claim; its job deletes its checkpoints itself",
        )
    return Restored(found.manifest, found.root, found.text)


def plan_for(job: JobContext, restored: Restored | None) -> tuple[PhysicalPlan, int]:
    """Plan and parallelism of this attempt: as the log says, with the key groups of the state.

    Raises:
        PlanError: a parallelism exceeds the number of key groups.
    """
    parallelism = job.parallelism
    if job.log is not None:
        parallelism = job.log.view.parallelism or parallelism
    groups = job.spec.max_parallelism
    if groups is None and restored is not None:
        groups = restored.manifest.max_parallelism
    same = parallelism == job.parallelism and groups in (None, job.plan.max_parallelism)
    return (job.plan if same else job.spec.replan(parallelism, groups)), parallelism


def reader_of(store: CheckpointStore | None) -> ReadHandle:
    """Reads what lies at handles, and verifies it."""

    async def read(operator: str, handle: StateHandle) -> bytes:
        if handle.inline is not None:
            data = handle.inline
        elif store is None or handle.file is None:
            raise StateError(
                f"state has no readable file operator=`{operator}` state=`{handle.state}`"
            )
        else:
            try:
                data = await store.read_file(handle.file)
            except MissingFileError as error:
                raise _unreadable(
                    f"state is missing: {error.message}", operator, handle, store
                ) from error
        if len(data) != handle.size_bytes or xxhash.xxh3_64_hexdigest(data) != handle.checksum:
            sizes = f"expected_bytes=`{handle.size_bytes}` bytes=`{len(data)}`"
            raise _unreadable(f"state is corrupt {sizes}", operator, handle, store)
        return data

    return read


def _unreadable(
    text: str, operator: str, handle: StateHandle, store: CheckpointStore | None
) -> CorruptError:
    place = "the manifest of the checkpoint"
    if handle.file is not None and store is not None:
        place = f"{store.describe()}: {handle.file}"
    return CorruptError(
        f"{text} operator=`{operator}` state=`{handle.state}`",
        where=place,
        fix=f"restore an older checkpoint (--from DIR@ID, or {RESTORE_FALLBACK.key}), or a savepoint",
    )


async def dispose_claimed(job: JobContext) -> None:
    """Delete the savepoint this run has claimed: it has a checkpoint of its own now.

    Raises:
        StorageError: something is left over.
    """
    options = job.spec.options
    async with savepoints.opened(job.open_at, job.spec.restore_from, options) as store:
        savepoint = await savepoints.read(store)
        if savepoint is not None:
            await savepoints.delete(store, sorted(savepoint.manifest.files()))
            job.publish("disposed", f"deleted the claimed savepoint {job.spec.restore_from}")
