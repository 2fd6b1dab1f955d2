"""The answers of the REST API about the state of a job that clients read."""

from __future__ import annotations

from typing import Any

from .answers import Answer


class QueryableAnswer(Answer, frozen=True):
    """A state that can be read by key."""

    name: str
    step: str
    kind: str
    """`value`, `list`, `map`, `reducing`, `aggregating`, `reduce`, `running` or `window`."""
    key: dict[str, str] | None
    """The type of each key column; null: no type is declared, and keys are JSON values."""
    levels: list[str]
    """The levels at which it can be read: `live`, `committed`."""


class StatesAnswer(Answer, frozen=True):
    """The queryable states of the job."""

    states: list[QueryableAnswer]


class QueryAnswer(Answer, frozen=True):
    """The value that a state has for a key."""

    job: str
    run: str
    attempt: int
    """The attempt of the subtask that answered."""
    state: str
    kind: str
    """As in `QueryableAnswer`."""
    step: str
    subtask: int
    """The subtask that has the key."""
    key: Any
    """The key as plain data; an object if it has several columns."""
    key_group: int
    level: str
    """`live`: the value while the job runs, which a failure may take back; `committed`: the value as of
    a complete checkpoint.
    """
    checkpoint: int | None
    """The checkpoint that the value is of; null at the level `live`."""
    found: bool
    """False: the state has nothing for this key."""
    value: Any
    """A list is an array, a map an array of objects with `key` and `value`, an aggregate an object."""


class OwnerAnswer(Answer, frozen=True):
    """The subtask that has a range of key groups, and where its worker answers direct reads."""

    subtask: int
    attempt: int
    """The attempt of the subtask; with another one, the key groups may be elsewhere."""
    first_key_group: int
    last_key_group: int
    worker: str
    host: str
    port: int
    """The number of the worker's data port."""
    machine: str
    """The machine of the worker; equal for processes that can use its Unix socket."""
    socket: str | None
    """The path of that socket; null: there is none."""


class OwnersAnswer(Answer, frozen=True):
    """The owners of the key groups of a state; other fields are those of `QueryAnswer`."""

    job: str
    run: str
    state: str
    kind: str
    step: str
    stored_as: str
    """The name of the state in its step."""
    vertex: int
    generation: int
    """The generation of the coordinator that says so."""
    max_parallelism: int
    """The number of key groups."""
    timeout_ms: int
    """The longest time for which a client waits for an answer of an owner, in ms."""
    ticket: str
    """The secret that a client shows to owners."""
    owners: list[OwnerAnswer]
    """All of the state's key groups, in their order."""


class RowAnswer(Answer, frozen=True):
    """The value of one key; the fields are those of `QueryAnswer`."""

    attempt: int
    subtask: int
    key: Any
    key_group: int
    found: bool
    value: Any


class RowsAnswer(Answer, frozen=True):
    """The values that a state has for several keys; other fields are those of `QueryAnswer`."""

    job: str
    run: str
    state: str
    kind: str
    step: str
    level: str
    checkpoint: int | None
    """The checkpoint that all values are of; null at the level `live`."""
    rows: list[RowAnswer]
    """In the order of the keys that were asked for."""


class ChangesAnswer(Answer, frozen=True):
    """The values of those keys that have changed; other fields are those of `QueryAnswer`."""

    job: str
    run: str
    state: str
    kind: str
    step: str
    level: str
    checkpoint: int | None
    """The checkpoint that the values are of; null at the level `live`."""
    since: int | None
    """The checkpoint up to which the client knew all values: what a key had between it and `checkpoint`
    is not told. Null at the level `live`, and if the client knew none of this run.
    """
    id: str
    """The id of the event, with which a client goes on behind it (`Last-Event-ID`)."""
    rows: list[RowAnswer]
    """Those of the keys whose value is another one than the client was told, in the order of the keys. A
    row that is not found says that the state has nothing for the key, or no longer.
    """


class ScannedAnswer(Answer, frozen=True):
    """A key that a scan has found, and its value."""

    key: Any
    value: Any


class ScanAnswer(Answer, frozen=True):
    """Some rows of a state; other fields are those of `QueryAnswer`."""

    job: str
    run: str
    state: str
    kind: str
    step: str
    level: str
    checkpoint: int | None
    """The checkpoint that all rows of the scan are of; null at the level `live`."""
    rows: list[ScannedAnswer]
    """In no particular order."""
    next: str | None
    """The text that the next request gives as `next`; null: these are the last rows."""
