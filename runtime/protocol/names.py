"""Every object name in the checkpoint store is made here, and nowhere else.

Names are relative to one job's root and `/`-separated:

    log/00000000000000000001.json     entry 1 of the job log (protocol/joblog.py)
    log/generation/0000000001.json    the claim of generation 1, and where its log begins now
    control/0000000001.json           the token of the leader of generation 1, readable by its clients only
    probe/<token>.json                written and deleted while a store is opened
    chk/<generation>-<checkpoint>/<operator>-<subtask>-<state>-<hash>.parquet    state files
    chk/<generation>-<checkpoint>/<worker>-<hash>-<number>-<bytes>.segment    pieces of many of them
    sources/<source>-<hash>/...       the data that a source prepared for itself

Those of a savepoint are relative to its directory:

    <operator>-<hash>/<state>/<subtask>.parquet    a table; all subtasks of a state side by side
    _metadata                                      completes the savepoint

Text of the user (job, operator, state names) is made safe for file systems and URLs by a readable slug
and a hash of the whole text, so that two different texts never share a name.
"""

from __future__ import annotations

import re

import xxhash

from ...errors import check

SLUG_CHARACTERS_MAX = 40
"""The most characters of the readable part of a name; the hash keeps longer texts apart."""

CHECKPOINTS = "chk"
"""The directory of all state files of checkpoints."""

_UNSAFE = re.compile(r"[^a-z0-9_]+")
_PLAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_SEGMENT = re.compile(rf"{CHECKPOINTS}/\d+-\d+/[a-z0-9_-]+-(\d+)\.segment")
_CHECKPOINT_DIR = re.compile(rf"{CHECKPOINTS}/(\d+)-(\d+)/")
_SAVEPOINT_DIR = re.compile(r"savepoint-[a-z0-9][a-z0-9_-]*-[0-9a-f]{12}")
_SAVEPOINT_FILE = re.compile(
    r"[a-z0-9_-]+-[0-9a-f]{16}/[a-z0-9_-]+/\d+(-[0-9a-f]{16})?"
    r"(\.parquet|\.delta\.parquet|\.msgpack|\.bin|\.meta)|probe/[0-9a-f]{32}\.json"
)
_FILE_SUFFIX = {
    "table": ".parquet",
    "delta": ".delta.parquet",
    "items": ".msgpack",
    "file": ".bin",
    "meta": ".meta",
    "channel": ".channel",
}


def log_entry(sequence: int) -> str:
    """Return the name of entry number `sequence` (1, 2, 3, ...) of the job log."""
    check(sequence >= 1, "log entries are numbered from 1", sequence=sequence)
    return f"log/{sequence:020d}.json"


def generation_record(generation: int) -> str:
    """Return the name of the record that claims `generation` (1, 2, 3, ...)."""
    check(generation >= 1, "generations are numbered from 1", generation=generation)
    return f"log/generation/{generation:010d}.json"


def control_token(generation: int) -> str:
    """Return the name of the record with the token of the leader of `generation`."""
    check(generation >= 1, "generations are numbered from 1", generation=generation)
    return f"control/{generation:010d}.json"


def probe(token: str) -> str:
    """Return the name of an object that exists only while a store is opened; `token` keeps openers
    apart."""
    return f"probe/{token}.json"


def checkpoint_dir(generation: int, checkpoint_id: int) -> str:
    """Return the common part of the names of all state files of one checkpoint."""
    return f"{CHECKPOINTS}/{generation}-{checkpoint_id}"


def checkpoint_file(
    generation: int,
    checkpoint_id: int,
    operator: str,
    subtask: int,
    state: str,
    kind: str = "table",
    file_id: str = "",
) -> str:
    """Return the name of a state file of one subtask; `kind` and `file_id` are those of its StateHandle."""
    check(kind in _FILE_SUFFIX, "unknown kind of state", kind=kind)
    digest = _hash("\0".join((operator, state, kind, *filter(None, (file_id,)))))
    stem = f"{_slug(operator)}-{subtask}-{_slug(state)}-{digest}"
    return f"{checkpoint_dir(generation, checkpoint_id)}/{stem}{_FILE_SUFFIX[kind]}"


def segment_file(
    generation: int, checkpoint_id: int, worker: str, number: int, size_bytes: int
) -> str:
    """Return the name of a segment; `number` keeps those of one worker apart, for ever."""
    stem = f"{_slug(worker)}-{_hash(worker)}-{number}-{size_bytes}"
    return f"{checkpoint_dir(generation, checkpoint_id)}/{stem}.segment"


def segment_bytes(file: str) -> int | None:
    """Return the size of the segment `file`, which its name tells; None if it is no segment."""
    match = _SEGMENT.fullmatch(file) if file.endswith(".segment") else None
    return None if match is None else int(match[1])


def checkpoint_of(file: str) -> tuple[int, int] | None:
    """Return generation and checkpoint that wrote the state file `file`; None if it is not one of ours."""
    match = _CHECKPOINT_DIR.match(file)
    return None if match is None else (int(match[1]), int(match[2]))


def source_dir(source: str) -> str:
    """Return the directory of the data of the source `source`; it chooses the names below it."""
    return f"sources/{_slug(source)}-{_hash(source)}"


def savepoint_file(
    operator: str, subtask: int, state: str, kind: str = "table", file_id: str = ""
) -> str:
    """Return the name of a state file in a savepoint; `kind` and `file_id` are those of its StateHandle."""
    check(kind in _FILE_SUFFIX, "unknown kind of state", kind=kind)
    stem = f"{subtask}-{_hash(file_id)}" if file_id else f"{subtask}"
    directory = f"{_slug(operator)}-{_hash(operator)}/{_plain(state)}"
    return f"{directory}/{stem}{_FILE_SUFFIX[kind]}"


def local_dir(text: str) -> str:
    """Return the directory, on a worker's own disk, of the operator or worker named `text`."""
    return f"{_slug(text)}-{_hash(text)}"


def local_copy(file: str) -> str:
    """Return the name of the copy of a state file on a worker's own disk."""
    return f"{_slug(file.rpartition('/')[2])}-{xxhash.xxh3_128_hexdigest(file.encode())}"


def local_job_dir(job_name: str, storage: str) -> str:
    """Return the directory of all such copies of a job whose checkpoints are in `storage`."""
    return f"{_slug(job_name)}-{_hash(storage + chr(0) + job_name)}"


def restored_file(subtask: int, state: str, file_id: str) -> str:
    """Return the name of a downloaded file in an operator's directory; `subtask` keeps old subtasks
    apart."""
    return f"{subtask}-{_slug(state)}-{_hash(state + chr(0) + file_id)}"


def job_dir(job_name: str) -> str:
    """Return the job's directory below the storage address: its name if plain, else slug and hash."""
    return _plain(job_name)


def is_savepoint_dir(directory: str) -> bool:
    """Return True if `savepoint_dir` may have made this name."""
    return _SAVEPOINT_DIR.fullmatch(directory) is not None


def is_savepoint_file(name: str) -> bool:
    """Return True if a savepoint in progress may have made this name, its metadata excepted."""
    return _SAVEPOINT_FILE.fullmatch(name) is not None


SAVEPOINT_METADATA = "_metadata"
"""The metadata in the directory of a savepoint: written last, it completes the savepoint."""


def savepoint_dir(job_name: str, token: str) -> str:
    """Return the directory of a savepoint below the user's address for it; `token` is random."""
    return f"savepoint-{job_dir(job_name)}-{token}"


def _plain(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    return f"{_slug(text)}-{_hash(text)}"


def _slug(text: str) -> str:
    slug = _UNSAFE.sub("-", text.lower()).strip("-")[:SLUG_CHARACTERS_MAX].strip("-")
    return slug or "x"


def _hash(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))
