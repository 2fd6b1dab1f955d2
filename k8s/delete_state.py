"""`headgate k8s delete-state` deletes the stored state of a deleted StreamJob, except savepoints.

The order makes it safe to interrupt and to repeat. The newest generation record says to which run the log
belongs, so it is deleted last. If the command is repeated, it can still see to which job the rest
belongs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..api.manifest import document
from ..api.manifest.document import load
from ..errors import CorruptError, JobError, UsageError
from ..runtime.options.registry import current_key
from ..runtime.protocol import joblog, names
from ..runtime.storage.base import CheckpointStore
from ..runtime.storage.open_store import open_store

STORAGE_KEY: Final = "execution.checkpointing.dir"
GENERATIONS: Final = names.generation_record(1).rpartition("/")[0] + "/"
LOG: Final = names.log_entry(1).rpartition("/")[0] + "/"
OWN: Final = tuple(
    name.partition("/")[0] + "/"
    for name in (
        names.checkpoint_dir(1, 1),
        names.source_dir("x"),
        names.control_token(1),
        names.probe("x"),
    )
)
"""The directories of a job beside its log. Nothing else below the job's address is touched."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The place of a job's state.

    Attributes:
        job: its name.
        storage: the address of `checkpoint.storage`; empty if the job has no checkpoints.
        options: all options that the manifest sets, under their current keys.
    """

    job: str
    storage: str
    options: Mapping[str, str]

    def check_mounted(self) -> None:
        """Check that a storage in a directory exists.

        Raises:
            UsageError: it does not exist here, so its content cannot be deleted.
        """
        scheme, separator, rest = self.storage.rpartition("://")
        if scheme not in ("", "file"):
            return
        path = Path("/" + rest.partition("/")[2]) if separator else Path(rest).expanduser()
        if not path.is_dir():
            raise UsageError(
                f"the directory of the state does not exist path=`{path}`: nothing was deleted",
                fix="is it on a volume that is not mounted here? delete the state where it is mounted",
            )


@dataclass(frozen=True, slots=True)
class Deleted:
    """The result of a deletion.

    Attributes:
        address: the address of the job's directory.
        files: the number of deleted files.
        size_bytes: the bytes of these files.
        kept: the names of files below the address that do not belong to the job's state, such as
            savepoints.
    """

    address: str
    files: int
    size_bytes: int
    kept: tuple[str, ...]

    def __str__(self) -> str:
        if not self.files:
            text = f"there is no state to delete in {self.address}"
        else:
            text = f"deleted {self.files:,} files, {self.size_bytes:,} bytes, in {self.address}"
        return text + (f"; kept {len(self.kept):,} other files there" if self.kept else "")


def state_place(text: str, file: str, environment: Mapping[str, str]) -> StatePlace:
    """Return the place of the state of a manifest's job. The rest of the manifest is not checked.

    So a wrong step, or code that is not installed, does not prevent the deletion.

    Raises:
        ManifestErrors: the manifest is not YAML, or refers to variables that are not set.
        UsageError: it has no name.
    """
    problems = document.Problems(file)
    root = load(text, problems, environment)
    if root is None:
        problems.raise_if_any()
    name = _text(root, "metadata", "name")
    if not name:
        raise UsageError("the manifest has no metadata.name", where=file)
    said = _below(root, "spec", "options")
    entries = said.entries if isinstance(said, document.Mapping) else {}
    options = {current_key(key): _text(entry.value) for key, entry in entries.items()}
    storage = _text(root, "spec", "checkpoint", "storage") or options.get(STORAGE_KEY, "")
    if any(_broken(each) for each in (_below(root, "spec", "checkpoint", "storage"), said)):
        problems.raise_if_any()
    return StatePlace(name, storage, options)


def belongs_to(run: str, uid: str) -> bool:
    """True if the run id is one of the StreamJob with this uid: the uid, `-`, and a number."""
    owner, _, number = run.rpartition("-")
    return bool(uid) and owner == uid and number.isdigit()


async def delete_state(place: StatePlace, uid: str) -> Deleted:
    """Delete checkpoints and log of the StreamJob with this uid. No process of the job may run.

    Raises:
        JobError: the log belongs to another StreamJob, or to a run that no StreamJob has started.
        CorruptError: the log does not say to which job it belongs.
        StorageError: the storage cannot be read, or refuses to delete.
    """
    store = open_store(place.storage, place.job, place.options)
    await store.open(writable=False)
    try:
        await _check_owner(store, uid)
        own, log, generations, kept = await _sorted_files(store)
        await store.delete_files(sorted(own))
        await _check_owner(store, uid)
        await store.delete_files(sorted(log))
        oldest_first = sorted(generations)
        await store.delete_files(oldest_first[:-1])
        await store.delete_files(oldest_first[-1:])
        for directory in {name.partition("/")[0] for name in (*own, *log)}:
            await store.delete_incomplete(directory)
        sizes = own | log | generations
        return Deleted(store.describe(), len(sizes), sum(sizes.values()), tuple(sorted(kept)))
    finally:
        await store.close()


async def _check_owner(store: CheckpointStore, uid: str) -> None:
    """Check that the newest generation belongs to this StreamJob, or that there is no state."""
    own, log, generations, _ = await _sorted_files(store)
    if not generations:
        if own or log:
            raise CorruptError(
                "the state has no generation records, so its owner is unknown: it was left alone",
                where=store.describe(),
                fix="if it is no longer needed, delete the directory yourself",
            )
        return
    newest = max(generations)
    data = await store.read(newest)
    if data is None:
        raise JobError("the job log is changing: is the job running?", where=store.describe())
    record = joblog.RECORDS.decode(data, newest, store.describe())
    if not belongs_to(record.run, uid):
        raise JobError(
            f"the state belongs to another job now run=`{record.run}` uid=`{uid}`: it was left alone",
            where=store.describe(),
            fix="a StreamJob of the same name continued with it; delete that one with its state instead",
        )


_Files = dict[str, int]


async def _sorted_files(store: CheckpointStore) -> tuple[_Files, _Files, _Files, _Files]:
    """Return the files of the job, its log, its generation records, and all others, with their sizes."""
    own: _Files = {}
    log: _Files = {}
    generations: _Files = {}
    kept: _Files = {}
    async for name, size in store.list_files(""):
        if name.startswith(GENERATIONS):
            generations[name] = size
        elif name.startswith(LOG):
            log[name] = size
        else:
            (own if name.startswith(OWN) else kept)[name] = size
    return own, log, generations, kept


def _below(value: document.Value | None, *path: str) -> document.Value | None:
    for name in path:
        if not isinstance(value, document.Mapping) or name not in value.entries:
            return None
        value = value.entries[name].value
    return value


def _text(value: document.Value | None, *path: str) -> str:
    found = _below(value, *path)
    return found.text if isinstance(found, document.Scalar) else ""


def _broken(value: document.Value | None) -> bool:
    """Return True if the value has a variable that is not set."""
    if isinstance(value, document.Mapping):
        return any(_broken(entry.value) for entry in value.entries.values())
    return isinstance(value, document.Scalar) and value.broken
