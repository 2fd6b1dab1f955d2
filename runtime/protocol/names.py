"""Every object name in the checkpoint store is made here, and nowhere else.

Names are relative to one job's root and `/`-separated:

    log/00000000000000000001.json     entry 1 of the job log (protocol/joblog.py)
    log/generation/0000000001.json    the claim of generation 1, and where its log begins now
    probe/<token>.json                written and deleted while a store is opened
    chk/<generation>-<checkpoint>/<operator>-<subtask>-<state>-<hash>.parquet    state files

Text of the user (job, operator, state names) is made safe for file systems and URLs by a readable slug
and a hash of the whole text, so that two different texts never share a name.
"""

from __future__ import annotations

import re

import xxhash

from ...errors import check

SLUG_CHARACTERS_MAX = 40
"""Readable part of a name; the hash keeps longer texts apart."""

_UNSAFE = re.compile(r"[^a-z0-9_]+")
_PLAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_FILE_SUFFIX = {"table": ".parquet", "items": ".msgpack"}


def log_entry(sequence: int) -> str:
    """Entry number `sequence` (1, 2, 3, ...) of the job log."""
    check(sequence >= 1, "log entries are numbered from 1", sequence=sequence)
    return f"log/{sequence:020d}.json"


def generation_record(generation: int) -> str:
    """The record that claims `generation` (1, 2, 3, ...)."""
    check(generation >= 1, "generations are numbered from 1", generation=generation)
    return f"log/generation/{generation:010d}.json"


def probe(token: str) -> str:
    """An object that exists only while a store is opened; `token` keeps openers apart."""
    return f"probe/{token}.json"


def checkpoint_dir(generation: int, checkpoint_id: int) -> str:
    """The common part of the names of all state files of one checkpoint."""
    return f"chk/{generation}-{checkpoint_id}"


def checkpoint_file(
    generation: int,
    checkpoint_id: int,
    operator: str,
    subtask: int,
    state: str,
    kind: str = "table",
) -> str:
    """A state file of one subtask; `kind` is that of its StateHandle (`table` or `items`)."""
    check(kind in _FILE_SUFFIX, "unknown kind of state", kind=kind)
    digest = _hash(f"{operator}\0{state}\0{kind}")
    stem = f"{_slug(operator)}-{subtask}-{_slug(state)}-{digest}"
    return f"{checkpoint_dir(generation, checkpoint_id)}/{stem}{_FILE_SUFFIX[kind]}"


def job_dir(job_name: str) -> str:
    """The job's directory below the storage address: its name if that is plain, else slug and hash."""
    if _PLAIN.fullmatch(job_name):
        return job_name
    return f"{_slug(job_name)}-{_hash(job_name)}"


def savepoint_dir(job_name: str, checkpoint_id: int) -> str:
    """The directory of a savepoint below the address the user gave for it."""
    return f"savepoint-{job_dir(job_name)}-{checkpoint_id}"


def _slug(text: str) -> str:
    slug = _UNSAFE.sub("-", text.lower()).strip("-")[:SLUG_CHARACTERS_MAX].strip("-")
    return slug or "x"


def _hash(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))
