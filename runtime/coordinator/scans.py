"""Scans of state at the coordinator: it asks the subtasks one after the other, a slice at a time.

A request is answered with a page of rows, and with a token for the next page. A scan of the level
`committed` is of one checkpoint throughout: all subtasks keep its values until the scan is over.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import msgspec

from ...errors import JobNotReady, ScanOver, UsageError
from ...operators.durations import format_duration
from ...operators.graph import Node
from ...operators.queries import QueryableState, key_as_json
from ...operators.selections import Selection, parse_selection
from ...state.keyed.keys import decode_key
from ..control.messages import EndScan, ScanState, StateAnswer, StateOutcome
from ..options.network import (
    QUERY_ANSWER_MAX,
    QUERY_PAGE_BYTES,
    QUERY_PAGE_ROWS,
    QUERY_PAGE_TIME,
    QUERY_SCAN_IDLE,
    QUERY_SCANS_MAX,
    QUERY_SLICE,
    QUERY_TIMEOUT,
    QUERY_WAITING_MAX,
)
from ..plan import Vertex
from ..protocol.ids import SubtaskId
from .context import JobContext
from .pending_queries import PendingQueries
from .queries import (
    COMMITTED,
    LATER,
    LIVE,
    TRIES,
    check_level,
    check_read,
    check_running,
    committed_checkpoint,
    find_state,
    worker_of,
)
from .scanned_columns import to_stream

_SLICE_ROWS: Final = 1_000
"""The most rows of one slice."""
_AGAIN: Final = "begin the scan again"


@dataclass
class _Scan:
    """One scan, and how far it is.

    Attributes:
        number: its number at the subtasks.
        attempts: the attempt of each subtask that has been asked.
        begun: the subtasks that know the scan. None of them may begin it again.
        owner: the subtask that is read now.
        page: how many pages there were.
    """

    vertex: Vertex
    node: Node
    state: QueryableState
    selection: Selection
    level: str
    number: int = field(default_factory=lambda: secrets.randbits(62))
    checkpoint_id: int = 0
    attempts: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    owner: int = 0
    page: int = 0
    busy: bool = False
    over: asyncio.TimerHandle | None = None

    @property
    def token(self) -> str:
        """The token for the next page."""
        return f"{self.number:x}.{self.page}"


@final
class OpenScans:
    """The scans that clients go on with."""

    def __init__(self) -> None:
        self._open: dict[int, _Scan] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, scan: _Scan) -> None:
        """Keep a scan."""
        self._open[scan.number] = scan

    def find(self, token: str) -> _Scan | None:
        """Return the scan that a token goes on with; None: it is over."""
        number, _, _ = token.partition(".")
        scan = next((each for each in self._open.values() if f"{each.number:x}" == number), None)
        return scan if scan is not None and scan.token == token else None

    def drop(self, scan: _Scan) -> None:
        """Forget a scan."""
        self._open.pop(scan.number, None)
        if scan.over is not None:
            scan.over.cancel()


async def scan_state(
    job: JobContext, pending: PendingQueries, scans: OpenScans, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a page of the rows that a state has.

    Args:
        job: the job.
        pending: the queries to its workers.
        scans: the scans of the job.
        given: `state`, the name; `level`, which is `live` by default; `prefix`, `from` and `to`, texts
            of keys; `limit`, the most rows; `next`, the token of the page before, with which only
            `limit` counts; and `arrow`: the rows are an Arrow stream, as `stream`.

    Raises:
        ScanOver: the scan of that token cannot go on.
        StateNotFound: the job has no queryable state of that name.
        UsageError: a text is not what it has to be, or the state does not have that level.
        JobNotReady: the job does not run just now, too many ask, or the values as of the newest complete
            checkpoint are not known.
        JobError: the job has ended, or a value is too large.
        StateError: a value cannot be read.
    """
    token, limit = given.get("next"), given.get("limit") or 0
    rows_max = job.env.options.get(QUERY_PAGE_ROWS)
    if not isinstance(limit, int) or limit < 0:
        raise UsageError(f"limit is a whole number limit=`{limit!s:.200}`")
    rows_max = min(limit, rows_max) if limit else rows_max
    if token is not None:
        scan = scans.find(str(token))
        if scan is None:
            raise ScanOver("the scan is over, or was never begun", fix=_AGAIN)
        if scan.busy:
            raise UsageError("another request reads this page", fix="wait for its answer")
        reader = _Reader(job, pending, scans, scan)
    else:
        reader = await _begin(job, pending, scans, given)
        scan = reader.scan
    rows = await reader.page(rows_max)
    answer = {
        "job": job.env.spec.name,
        "run": job.env.spec.run,
        "state": scan.state.name,
        "kind": scan.state.kind,
        "step": scan.node.name,
        "level": scan.level,
        "checkpoint": scan.checkpoint_id or None,
        "next": scan.token if reader.is_open else None,
    }
    if given.get("arrow"):
        return {**answer, "stream": to_stream(scan.state, rows)}
    shown = [
        {"key": key_as_json(scan.state, key), "value": msgspec.json.decode(value)}
        for key, value in rows
    ]
    return {**answer, "rows": shown}


async def _begin(
    job: JobContext, pending: PendingQueries, scans: OpenScans, given: Mapping[str, Any]
) -> _Reader:
    vertex, node, state = find_state(job.attempt.plan, given.get("state"))
    level = given.get("level") or LIVE
    check_level(state, level)
    selection = parse_selection(state, given)
    check_running(job, "queried")
    scans_max = job.env.options.get(QUERY_SCANS_MAX)
    if len(scans) >= scans_max:
        raise JobNotReady(f"too many scans are open {QUERY_SCANS_MAX.key}=`{scans_max}`", fix=LATER)
    scan = _Scan(vertex, node, state, selection, level)
    reader = _Reader(job, pending, scans, scan)
    scans.add(scan)
    try:
        if level == COMMITTED:
            await reader.hold()
        return reader
    except BaseException:
        reader.end()
        raise


class _Reader:
    """Reads pages of a scan."""

    def __init__(
        self, job: JobContext, pending: PendingQueries, scans: OpenScans, scan: _Scan
    ) -> None:
        self._job, self._pending, self._scans = job, pending, scans
        self.scan = scan
        self._options = job.env.options

    @property
    def is_open(self) -> bool:
        """True if there is another page."""
        return self.scan.owner < self.scan.vertex.parallelism

    async def hold(self) -> None:
        """Begin the scan at all subtasks, of the newest complete checkpoint, which they keep from now on.

        Raises:
            JobNotReady: they do not have it.
        """
        scan = self.scan
        owners = range(scan.vertex.parallelism)
        for _ in range(TRIES):
            scan.checkpoint_id = committed_checkpoint(self._job, scan.state)
            answers = await self._ask_all(owners)
            if all(answer.outcome is StateOutcome.READ for answer in answers):
                scan.begun.update(owners)
                return
            for answer in answers:
                check_read(answer, scan.state, self._options)
            # A checkpoint may have completed since, and its owners have dropped what was asked for.
            self._tell_end()
            scan.number = self._renumbered()
        raise JobNotReady(
            f"the values as of checkpoint {scan.checkpoint_id} are not kept "
            f"state=`{scan.state.name}`",
            fix="ask again after the next checkpoint",
        )

    def _renumbered(self) -> int:
        self._scans.drop(self.scan)
        self.scan.number = secrets.randbits(62)
        self._scans.add(self.scan)
        return self.scan.number

    async def page(self, rows_max: int) -> list[tuple[Any, bytes]]:
        """Return the next rows: keys, and values as JSON."""
        scan = self.scan
        scan.busy = True
        try:
            rows = await self._rows(rows_max)
        except (Exception, asyncio.CancelledError) as error:
            self.end()
            if isinstance(error, JobNotReady) and (scan.page or scan.owner):
                raise ScanOver(f"the scan cannot go on: {error.message}", fix=_AGAIN) from None
            raise
        scan.busy = False
        scan.page += 1
        if self.is_open:
            self._stay()
        else:
            self.end()
        return rows

    async def _rows(self, rows_max: int) -> list[tuple[Any, bytes]]:
        scan, loop = self.scan, asyncio.get_running_loop()
        deadline = loop.time() + self._options.get(QUERY_PAGE_TIME) / 1000
        bytes_left, rows = self._options.get(QUERY_PAGE_BYTES), list[tuple[Any, bytes]]()
        while self.is_open:
            (answer,) = await self._ask_all([scan.owner], min(_SLICE_ROWS, rows_max - len(rows)))
            check_read(answer, scan.state, self._options)
            if answer.outcome is not StateOutcome.READ:
                what = f"checkpoint {scan.checkpoint_id}" if scan.checkpoint_id else "its place"
                raise ScanOver(
                    f"the scan cannot go on: {what} is gone state=`{scan.state.name}`", fix=_AGAIN
                )
            scan.begun.add(scan.owner)
            rows += zip(map(decode_key, answer.keys), answer.values, strict=True)
            bytes_left -= sum(map(len, answer.values))
            scan.owner += not answer.more
            if len(rows) >= rows_max or bytes_left <= 0 or loop.time() >= deadline:
                break
        return rows

    def _stay(self) -> None:
        """Let the scan wait for its next page, at all subtasks that have not been read."""
        scan = self.scan
        idle_s = self._options.get(QUERY_SCAN_IDLE) / 1000
        scan.over = asyncio.get_running_loop().call_later(idle_s, self.end)
        for owner in range(scan.owner + 1, scan.vertex.parallelism) if scan.checkpoint_id else ():
            number = self._pending.unawaited()
            worker = self._job.pool.live.get(self._place(owner))
            if worker is not None:
                worker.send(self._asked(number, owner, 0))

    def end(self) -> None:
        """Forget the scan, here and at its subtasks."""
        self._scans.drop(self.scan)
        self._tell_end()

    def _tell_end(self) -> None:
        for worker_id in {self._place(owner) for owner in self.scan.attempts}:
            if (worker := self._job.pool.live.get(worker_id)) is not None:
                worker.send(EndScan(scan=self.scan.number))

    def _place(self, owner: int) -> str:
        placement = self._job.attempt.executions.placement
        return placement.get(SubtaskId(self.scan.vertex.id, owner), "")

    async def _ask_all(self, owners: Sequence[int], rows_max: int = 0) -> list[StateAnswer]:
        """Ask some subtasks for a slice, or only to begin, and return their answers."""
        scan, pending = self.scan, self._pending
        if scan.over is not None:
            scan.over.cancel()
        check_running(self._job, "queried")
        timeout_ms, waiting_max = (
            self._options.get(QUERY_TIMEOUT),
            self._options.get(QUERY_WAITING_MAX),
        )
        if len(pending) and len(pending) + len(owners) > waiting_max:
            raise JobNotReady("too many queries wait for an answer", fix=LATER)
        numbers: list[int] = []
        answers: list[asyncio.Future[StateAnswer]] = []
        try:
            for owner in owners:
                subtask = SubtaskId(scan.vertex.id, owner)
                worker, attempt = worker_of(self._job, subtask, f"state=`{scan.state.name}`")
                if scan.attempts.setdefault(owner, attempt) != attempt:
                    raise ScanOver("the scan cannot go on: the job has restarted", fix=_AGAIN)
                number, answer = pending.add(worker.worker_id)
                numbers.append(number)
                answers.append(answer)
                worker.send(self._asked(number, owner, rows_max))
            async with asyncio.timeout(timeout_ms / 1000):
                return [await answer for answer in answers]
        except TimeoutError:
            raise JobNotReady(
                f"a subtask did not answer within {format_duration(timeout_ms)} "
                f"state=`{scan.state.name}`",
                fix=f"it is in a long call; {QUERY_TIMEOUT.key} is how long a query waits",
            ) from None
        finally:
            for number in numbers:
                pending.drop(number)

    def _asked(self, number: int, owner: int, rows_max: int) -> ScanState:
        scan, options = self.scan, self._options
        return ScanState(
            attempt=scan.attempts[owner],
            query=number,
            vertex=scan.vertex.id,
            index=owner,
            operator=scan.node.name,
            state=scan.state.state,
            scan=scan.number,
            begins=owner not in scan.begun,
            rows_max=rows_max,
            keys=scan.selection.encode(),
            bytes_max=options.get(QUERY_ANSWER_MAX),
            waiting_max=options.get(QUERY_WAITING_MAX),
            timeout_ms=options.get(QUERY_TIMEOUT),
            slice_ms=options.get(QUERY_SLICE),
            idle_ms=options.get(QUERY_SCAN_IDLE),
            checkpoint_id=scan.checkpoint_id,
        )
