"""The commit of a checkpoint to a table: its files are added once, also if the commit is repeated.

In the same atomic change that adds files, a table records a *mark* for each attempt of a run that wrote
them: the newest checkpoint whose files of that attempt it has. A commit first looks what the table has, and
leaves out what is there. It is written only if no other writer was faster; otherwise it looks again. So it
may be repeated by anybody at any time.

A mark is that of an attempt, since a savepoint may have files that the job never commits: if the job fails
behind it, the next attempt goes on from an older checkpoint, and its checkpoints have greater numbers. A
run that begins with the savepoint has to add these files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from ...errors import JobError, StorageError
from ...operators.clock import SystemClock

OLD_MS: Final = 3_600_000
"""Files that are committed later than this are looked for before, as they may have been deleted."""
COMMITS_MAX: Final = 50
"""The number of times in a row that other writers of the table may be faster."""


class TablePart(Protocol):
    """A committable: a durable file that the table does not have yet."""

    @property
    def run(self) -> str:
        """The run that wrote it."""
        ...

    @property
    def job(self) -> str:
        """The job whose run wrote it; empty in committables of the first versions."""
        ...

    @property
    def sink(self) -> str:
        """The name of the sink's step in that job."""
        ...

    @property
    def attempt(self) -> int:
        """The attempt that wrote it; 0 in committables of the first versions."""
        ...

    @property
    def path(self) -> str:
        """Where it is."""
        ...

    @property
    def written_ms(self) -> int:
        """When it was written."""
        ...


P = TypeVar("P", bound=TablePart)
Q = TypeVar("Q", bound=TablePart, contravariant=True)


class TableVersion(Protocol[Q]):
    """The newest version of a table, as one commit has found it."""

    def committed(self, mark: str, parts: Sequence[Q]) -> int | None:
        """Return the newest checkpoint that is recorded under a mark; None: there is none.

        Args:
            mark: see `mark_of`.
            parts: the files that are to be added under it.

        Raises:
            JobError: the table has forgotten it.
        """
        ...

    def check(self, parts: Sequence[Q]) -> None:
        """Raise an error if the table does not take the files any more."""
        ...

    def missing(self, paths: Sequence[str]) -> list[str]:
        """Return those files that are not there."""
        ...

    def add(
        self, parts: Sequence[Q], marks: Mapping[str, int], properties: Mapping[str, str]
    ) -> bool:
        """Add files and marks in one change.

        Args:
            parts: the files.
            marks: the newest checkpoint by the name under which it is recorded.
            properties: tell the users of the table where the change comes from.

        Returns:
            False if another writer was faster or had locked the table, and nothing was added.

        Raises:
            StorageError: the table cannot be reached, and perhaps has the files.
        """
        ...


def mark_of(job: str, sink: str, run: str, attempt: int = 0) -> str:
    """Return the name under which an attempt of a run records its checkpoints in a table.

    With an empty run it is the name under which all runs of the sink record theirs. Without an attempt it
    is the name under which the first versions recorded those of all attempts of a run.
    """
    name = f"headgate/{job}/{sink}/{run}"
    return f"{name}/{attempt}" if attempt else name


def commit_parts(
    open_version: Callable[[], TableVersion[P]],
    table: str,
    job: str,
    sink: str,
    parts: Sequence[tuple[int, P]],
) -> None:
    """Add the files of some checkpoints to a table, unless it has them. May be repeated.

    Args:
        open_version: reads the newest version of the table.
        table: its address, for errors.
        job: the name of the job.
        sink: the name of the sink's step.
        parts: the files, and the checkpoint of each.

    Raises:
        StorageError: the table cannot be reached, is gone, or others write to it all the time.
        JobError: files are gone.
    """

    def mark(part: P) -> str:
        # A job of another name may have been started with a savepoint that holds the file. Then the run
        # that wrote it has perhaps committed it, under the name of its own job.
        return mark_of(part.job or job, part.sink or sink, part.run, part.attempt)

    own: dict[str, list[P]] = {}
    for _, part in parts:
        own.setdefault(mark(part), []).append(part)
    for _ in range(COMMITS_MAX):
        version = open_version()
        committed = {each: version.committed(each, files) or 0 for each, files in own.items()}
        due = [(id_, part) for id_, part in parts if id_ > committed[mark(part)]]
        if not due:
            return
        files = [part for _, part in due]
        version.check(files)
        _check_there(version, table, files)
        newest: dict[str, int] = {}
        for id_, part in due:
            newest[mark(part)] = max(newest.get(mark(part), 0), id_)
        # A run without state looks whether any run of this sink has written here.
        newest[mark_of(job, sink, "")] = max(newest.values())
        if version.add(files, newest, {"headgate.job": job, "headgate.sink": sink}):
            return
    raise StorageError(
        f"other writers of the table were faster, or had locked it, {COMMITS_MAX} times table=`{table}`"
    )


def _check_there(version: TableVersion[P], table: str, parts: Sequence[P]) -> None:
    """Check that old files are there: with one that is not, nobody could read the table any more.

    Raises:
        JobError: one is not.
    """
    now_ms = SystemClock().now_ms()
    old = [part.path for part in parts if part.written_ms < now_ms - OLD_MS]
    gone = version.missing(old) if old else []
    if gone:
        raise JobError(
            f"files of a checkpoint are not in the directory of the table any more table=`{table}` "
            f"files=`{len(gone)}` first=`{gone[0]}`",
            fix="tools that clean tables delete files that no version of the table has when they are some "
            "days old: restore an older checkpoint, or give the sink another name and allow non-restored "
            "state",
        )
