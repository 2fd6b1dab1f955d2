"""The jobs of a storage address, read from their logs alone: no process of them has to live.

The storage may also have the token of a job's coordinator. A client that has the token commands the job,
and can run code in its processes. So it is written only where the storage itself keeps others out, as a
file that only its user reads, or if the option `headgate.control.token-in-storage` says so. Each generation
has a record of its own: a coordinator that was replaced and comes late cannot put its token in the place of
its successor's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ...errors import CorruptError, JobNotFound, StorageError
from ...operators.clock import Clock
from ..protocol import joblog, names
from ..protocol.checkpoints.manifest import orphans
from ..protocol.joblog import JobEnded, Leader, LogView
from .base import AddressOpener, CheckpointStore
from .joblog_store import JobLog
from .open_store import join_address

READS_MAX: Final = 8
"""The number of jobs that are read at once."""
LOG: Final = "log"
"""The directory that shows that another one is that of a job."""


@dataclass(frozen=True, slots=True)
class StoredJob:
    """One job as its storage has it.

    Attributes:
        name: of the job; its directory, if the log is older than that names are in it.
        address: of its directory.
        view: of its log.
        leader: the process that led it last; None: not known.
        ends: how its runs ended, as far as the history has them, the oldest first.
        token: the secret of the leader, if it lies in the storage and this user may read it.
    """

    name: str
    address: str
    view: LogView
    leader: Leader | None
    ends: tuple[JobEnded, ...]
    token: str = field(default="", repr=False)

    @property
    def ended(self) -> JobEnded | None:
        """The end of the newest run; None if it goes on, or its coordinator died."""
        return self.view.ended

    def end_of(self, run: str) -> JobEnded | None:
        """The end of one of the runs; None: it has not ended, or the history has forgotten it."""
        return next((end for end in reversed(self.ends) if end.run == run), None)


async def find_jobs(
    open_at: AddressOpener, address: str, options: Mapping[str, str], clock: Clock
) -> list[StoredJob]:
    """All jobs with checkpoints below the storage address, by name; or the one whose directory it is.

    Raises:
        UsageError: the address is not understood.
        StorageError: it cannot be read, or a log is damaged.
    """
    store = open_at(address, options)
    await store.open(writable=False)
    try:
        directories = await store.list_directories()
        if LOG in directories:
            found = [await _read_job(store, address, clock)]
        else:
            at_once = asyncio.Semaphore(READS_MAX)

            async def read(directory: str) -> StoredJob | None:
                async with at_once:
                    return await _read_at(open_at, join_address(address, directory), options, clock)

            found = list(await asyncio.gather(*map(read, directories)))
    finally:
        await store.close()
    return sorted((job for job in found if job is not None), key=lambda job: job.name)


async def find_job(
    open_at: AddressOpener, address: str, name: str, options: Mapping[str, str], clock: Clock
) -> StoredJob:
    """The job called `name` below the storage address, or the one whose directory the address is.

    Raises:
        UsageError: the address is not understood.
        StorageError: it cannot be read, or the log is damaged.
        JobNotFound: there is no such job.
    """
    directory = names.job_dir(name)
    whole = address.rstrip("/")
    below = whole.endswith(f"/{directory}") or whole == directory
    places = [join_address(address, directory), *([address] if below else [])]
    for place in places:
        job = await _read_at(open_at, place, options, clock)
        if job is not None:
            return job
    raise JobNotFound(
        f"no job of this name has checkpoints there name=`{name}` storage=`{address}`",
        fix=f"`headgate list --storage {address}` shows those that have",
    )


async def _read_at(
    open_at: AddressOpener, address: str, options: Mapping[str, str], clock: Clock
) -> StoredJob | None:
    store = open_at(address, options)
    await store.open(writable=False)
    try:
        return await _read_job(store, address, clock)
    finally:
        await store.close()


async def _read_job(store: CheckpointStore, address: str, clock: Clock) -> StoredJob | None:
    log = JobLog(store, "reader", clock)
    view = await log.load()
    if view.empty:
        return None
    leader = await log.leader_of(view.generation)
    ends = [await _read_end(store, sequence) for sequence in view.history.ends]
    kept = tuple(end for end in ends if end is not None)
    name = view.history.job or address.rstrip("/").rpartition("/")[2]
    token = "" if view.ended else await read_token(store, view.generation)
    return StoredJob(name, address, view, leader, kept, token)


async def _read_end(store: CheckpointStore, sequence: int) -> JobEnded | None:
    """The end of a run; None if the history has forgotten it since the log was read."""
    name = names.log_entry(sequence)
    data = await store.read(name)
    if data is None:
        return None
    entry = joblog.ENTRIES.decode(data, name, store.describe())
    if isinstance(entry, JobEnded):
        return entry
    raise CorruptError(
        f"the job log is damaged: this entry is to be the end of a run name=`{name}`",
        where=store.describe(),
        fix="were objects copied or renamed by hand? restore them",
    )


class _ControlToken(msgspec.Struct, frozen=True):
    token: str


async def publish_token(
    store: CheckpointStore, generation: int, token: str, *, in_any_storage: bool
) -> None:
    """Keep the token of the leader of `generation`.

    Args:
        store: of the job.
        generation: that leads.
        token: its secret.
        in_any_storage: also where everybody who reads the storage can read it.

    Raises:
        StorageError: it cannot be written.
    """
    name = names.control_token(generation)
    data = msgspec.json.encode(_ControlToken(token))
    if not await store.put_private(name, data) and in_any_storage:
        await store.put(name, data)


async def withdraw_token(store: CheckpointStore, generation: int) -> None:
    """Delete the token of a generation that leads no more. That there is none is fine."""
    if generation:
        await store.delete(names.control_token(generation))


async def read_token(store: CheckpointStore, generation: int) -> str:
    """The token of the leader of `generation`; empty: it is not there, or this user may not read it."""
    try:
        data = await store.read(names.control_token(generation))
        return "" if data is None else msgspec.json.decode(data, type=_ControlToken).token
    except (StorageError, msgspec.DecodeError):
        return ""


async def sweep_orphans(store: CheckpointStore, keep: set[str], generation: int) -> list[str]:
    """Delete state files of earlier generations that are not in `keep`; return their names, sorted.

    For the coordinator of `generation`, after its start entry is in the log and before its first
    checkpoint: from then on no earlier generation can complete one. Also for a coordinator whose
    own generation is over, by its end in the log, and which names the next. Unfinished files of
    dead writers are deleted as well.

    Raises:
        StorageError: the store cannot be listed, or refuses to delete.
    """
    present = [name async for name, _ in store.list_files(f"{names.CHECKPOINTS}/")]
    doomed = orphans(present, keep, generation)
    await store.delete_files(doomed)
    await store.delete_incomplete(names.CHECKPOINTS)
    return doomed
