"""The job log on a checkpoint store: carries out the decisions of `protocol/joblog.py`.

`Claims` finds, claims and reads the generation records of a job, which stay for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import final

import msgspec

from ...errors import CorruptError, FencedError, StorageError, check
from ...operators.clock import Clock
from ...operators.sink import OutputFile
from ..protocol import joblog, names
from ..protocol.checkpoints.manifest import Manifest
from ..protocol.job_result import JobFailure
from ..protocol.joblog import (
    AlreadyAppended,
    Appended,
    AttemptDeployed,
    CheckpointEntry,
    DeploymentRecord,
    Doomed,
    Fenced,
    GenerationRecord,
    GenerationStarted,
    JobEnded,
    JobStatus,
    Leader,
    LogEntry,
    LogHead,
    LogView,
    OutputListed,
    RetryAfterTail,
    RunHistory,
)
from ..protocol.old_output import pack, unpack
from .base import CheckpointStore, Created, Existed
from .read_back import ReadBack
from .retry import Sleep

LOAD_ATTEMPTS_MAX = 10
"""The number of times that a reader starts again because the log was trimmed while it read."""
START_ATTEMPTS_MAX = 20
"""The number of slots that a new leader tries before it gives up."""
GENERATIONS_ASKED_MAX = 100
"""The number of generations that are asked for their run, the newest first."""
ENDS_KEPT = 20
"""The number of ends of runs that stay in the log, unless the coordinator says otherwise."""


@final
class Claims:
    """Claims generations in sequence; their records stay for ever.

    Attributes:
        last: the highest generation that is known to be claimed.
    """

    def __init__(self, store: CheckpointStore, read_back: ReadBack) -> None:
        self._store = store
        self._read_back = read_back
        self.last = 0

    async def find_last(self) -> int:
        """Return the highest claimed generation.

        They are dense and stay, so doubling steps find it.
        """
        present, step = self.last, 1
        while await self._is_claimed(present + step):
            present, step = present + step, step * 2
        absent = present + step
        while absent - present > 1:
            middle = (present + absent) // 2
            if await self._is_claimed(middle):
                present = middle
            else:
                absent = middle
        self.last = present
        return present

    async def claim(self, writer: str, run: str, leader: Leader | None) -> int:
        """Claim the next generation for `writer`, and return it."""
        while True:
            generation = await self.find_last() + 1
            name = names.generation_record(generation)
            data = joblog.RECORDS.encode(
                GenerationRecord(generation=generation, writer=writer, run=run, leader=leader)
            )
            result = await self._store.create_if_absent(name, data)
            if isinstance(result, Created) and await self._read_back.other(name, data) is None:
                self.last = generation
                return generation

    async def winner(self, generation: int, writer: str) -> str:
        """Return the writer whose claim it is; another one only on a store that is not atomic."""
        record = await self.read(generation) if self._read_back.needed else None
        return writer if record is None else record.writer

    async def read(self, generation: int) -> GenerationRecord | None:
        """Return the record of a generation; None: there is none.

        Raises:
            CorruptError: it is damaged, or that of another generation.
        """
        name = names.generation_record(generation)
        data = await self._store.read(name)
        if data is None:
            return None
        record = joblog.RECORDS.decode(data, name, self._store.describe())
        if record.generation != generation:
            raise CorruptError(
                f"the job log is damaged: a generation record is another one's name=`{name}` "
                f"found=`{record.generation}`",
                where=self._store.describe(),
                fix="were objects copied or renamed by hand? restore them",
            )
        return record

    async def _is_claimed(self, generation: int) -> bool:
        return await self._store.read(names.generation_record(generation)) is not None


def _unchanged(_: LogView, started: GenerationStarted) -> GenerationStarted:
    return started


class JobLog:
    """Access of one coordinator, or one reader, to a job's log.

    A leader calls `start_generation` once, then `complete_checkpoint`, `trim` and `end_job`; a
    reader only `load`. After FencedError this object never writes again.

    An append that raises StorageError, or is cancelled, is *in doubt*: the entry may be in the log.
    The next append first settles it, by sending the same bytes to the same slot. Until then the
    files of that checkpoint must not be deleted.
    """

    def __init__(
        self, store: CheckpointStore, writer: str, clock: Clock, sleep: Sleep = asyncio.sleep
    ) -> None:
        """Create the object. `writer` is a token that no other coordinator process ever has."""
        self._store = store
        self._read_back = ReadBack(store, sleep)
        self._claims = Claims(store, self._read_back)
        self._writer = writer
        self._clock = clock
        self._view = LogView()
        self._generation = 0
        self.restarts = 0
        """The restarts of tasks under this coordinator, which sets it; the entries repeat them."""
        self._began = RunHistory()
        """The history in the start entry of this coordinator."""
        self._run = ""
        self._leader: Leader | None = None
        self._fenced_by: FencedError | None = None
        self._in_doubt: OutputListed | AttemptDeployed | CheckpointEntry | JobEnded | None = None
        self._settled = 0
        self._inherited: tuple[Doomed, ...] = ()
        self._reported: tuple[int, ...] = ()
        self._lock = asyncio.Lock()

    @property
    def view(self) -> LogView:
        """The content of the log when this object last read or wrote it."""
        return self._view

    @property
    def generation(self) -> int:
        """The generation this coordinator leads; 0 before `start_generation`."""
        return self._generation

    async def settle(self) -> None:
        """Settle an append in doubt, so that `view` is current.

        Raises:
            FencedError: a newer coordinator owns the job.
            StorageError: still in doubt.
        """
        async with self._lock:
            await self._finish_append_in_doubt()

    async def load(self) -> LogView:
        """Read the log to its tail. Not for a leader: its view is always current.

        Raises:
            StorageError: the log is damaged; never an empty view instead.
        """
        async with self._lock:
            check(self._generation == 0, "a leader does not read the log again")
            self._view, _ = await self._read_log()
            return self._view

    async def last_claim_of(self, run: str) -> int:
        """Return the newest generation that was claimed for `run`, after `load`; 0: none is known.

        Raises:
            StorageError: a record cannot be read.
        """
        newest = self._claims.last
        wanted = range(newest, max(0, newest - GENERATIONS_ASKED_MAX), -1)
        for generation in wanted if run else ():
            record = await self._claims.read(generation)
            if record is not None and record.run == run:
                return generation
        return 0

    async def leader_of(self, generation: int) -> Leader | None:
        """Return the process that claimed a generation; None: it is unknown.

        Raises:
            StorageError: the record cannot be read.
        """
        record = await self._claims.read(generation) if generation else None
        return None if record is None else record.leader

    async def has_grown(self) -> bool:
        """Return True if there is an entry after those of the view."""
        return await self._store.read(names.log_entry(self._view.tail + 1)) is not None

    async def start_generation(
        self,
        *,
        parallelism: int,
        max_parallelism: int,
        job_fingerprint: str = "",
        leader: Leader | None = None,
        run: str = "",
        fresh: bool = False,
        restore_from: str = "",
        job: str = "",
        ends_kept: int = ENDS_KEPT,
        follow: Callable[[LogView, GenerationStarted], GenerationStarted] = _unchanged,
    ) -> int:
        """Become the leader, and fence all older ones; return the new generation.

        Afterwards `view` is final for everything older. If it fails with StorageError or is
        cancelled, this object is no leader and it may be called again.

        `follow` makes the start entry from the log before it: until that entry is there an older
        leader may complete a checkpoint, or end the job. It may be called several times; the last
        view is the one that the entry follows.

        `job` is the name of the job, for readers of the log. The ends of the newest `ends_kept` former runs
        stay in it.

        Raises:
            FencedError: another coordinator claimed a newer generation meanwhile.
        """
        async with self._lock:
            check(self._generation == 0, "this coordinator has started already")
            self._check_not_fenced()
            self._run = run
            self._leader = leader
            generation = await self._claims.claim(self._writer, run, leader)
            started = GenerationStarted(
                generation=generation,
                writer=self._writer,
                started_ms=self._clock.now_ms(),
                job_fingerprint=job_fingerprint,
                parallelism=parallelism,
                max_parallelism=max_parallelism,
                host=leader.host if leader is not None else "",
                pid=leader.pid if leader is not None else 0,
                run=run,
                fresh=fresh,
                restore_from=restore_from,
            )
            former, replaced = RunHistory(), 0

            def with_history(view: LogView, started: GenerationStarted) -> GenerationStarted:
                nonlocal former, replaced
                former, replaced = view.history, view.old_output.sequence
                same_run = not view.empty and view.run == run
                begin = former.taken_over if same_run else former.next_run
                self._began = begin(job, started.started_ms, ends_kept)
                return follow(view, msgspec.structs.replace(started, history=self._began))

            head = await self._append_start(started, with_history)
            needless = set(former.ends) - set(self._began.ends)
            if replaced != self._view.old_output.sequence:
                needless.add(replaced)
            await self._forget(needless, head.sequence)
            await self._take_over(generation, head)
            return generation

    async def complete_checkpoint(
        self,
        manifest: Manifest,
        *,
        is_final: bool = False,
        parallelism: int = 0,
        wrote: Collection[str] = (),
    ) -> None:
        """Make a checkpoint durable. Only when this returns may its commits be permitted.

        Args:
            manifest: of the checkpoint.
            is_final: the job takes no records after it.
            parallelism: the job continues at this one; 0: unchanged.
            wrote: names of the sinks that have taken records before its barrier.

        Raises:
            FencedError: a newer coordinator owns the job; the checkpoint is not, and never will be,
                complete.
            StorageError: in doubt, see the class.
        """
        async with self._lock:
            await self._finish_append_in_doubt()
            newest = self._view.newest
            if newest is not None and newest.manifest == manifest:
                return
            check(
                manifest.checkpoint_id > self._view.last_checkpoint_id,
                "checkpoint ids must grow",
                checkpoint_id=manifest.checkpoint_id,
                last=self._view.last_checkpoint_id,
            )
            await self._append(
                CheckpointEntry(
                    generation=self._generation,
                    writer=self._writer,
                    checkpoint_id=manifest.checkpoint_id,
                    manifest=manifest,
                    completed_ms=self._clock.now_ms(),
                    is_final=is_final,
                    run=self._view.run,
                    parallelism=parallelism or self._view.parallelism,
                    deployment=self._view.deployment,
                    history=self._history(),
                    old_output=self._view.old_output.completed(manifest.checkpoint_id, wrote),
                )
            )

    async def list_output(self, files: Mapping[str, Sequence[OutputFile]]) -> None:
        """Record which files of earlier runs the run still has to delete.

        Args:
            files: by sink; replaces all that was recorded before.

        Raises:
            FencedError: a newer coordinator owns the job; none may be deleted.
            StorageError: in doubt, see the class.
        """
        async with self._lock:
            await self._finish_append_in_doubt()
            before = self._view.old_output.sequence
            packed = {name: pack(found) for name, found in sorted(files.items()) if found}
            await self._append(
                OutputListed(generation=self._generation, writer=self._writer, files=packed)
            )
            await self._forget({before}, self._view.head)

    async def old_output(self) -> dict[str, list[OutputFile]]:
        """Return the files of earlier runs that are still to be deleted, by sink.

        Raises:
            StorageError: the log cannot be read.
        """
        sequence = self._view.old_output.sequence
        if not sequence:
            return {}
        name = names.log_entry(sequence)
        data = await self._store.read(name)
        entry = None if data is None else self._entry(data, name)
        if not isinstance(entry, OutputListed):
            raise CorruptError(
                f"the job log is damaged: its list of old output is missing name=`{name}`",
                where=self._store.describe(),
                fix="were objects deleted by hand or by a lifecycle rule? restore them",
            )
        return {sink: unpack(packed) for sink, packed in entry.files.items()}

    async def deploy(self, deployment: DeploymentRecord) -> None:
        """Record the deployment that is about to run: a successor asks its workers for exactly that.

        Raises:
            FencedError: a newer coordinator owns the job; nothing may begin.
            StorageError: in doubt, see the class.
        """
        async with self._lock:
            await self._finish_append_in_doubt()
            await self._append(
                AttemptDeployed(
                    generation=self._generation, writer=self._writer, deployment=deployment
                )
            )

    async def confirm(self) -> None:
        """Check whether this coordinator still leads, without writing.

        Raises:
            FencedError: a newer coordinator owns the job.
            StorageError: unknown.
        """
        async with self._lock:
            self._check_leader()
            name = names.log_entry(self._view.tail + 1)
            data = await self._store.read(name)
            entry = None if data is None else self._entry(data, name)
            if entry is not None and entry.writer != self._writer:
                raise self._fence(entry.generation, entry.writer)

    async def end_job(
        self,
        status: JobStatus,
        reason: str = "",
        *,
        checkpoint: int = 0,
        failure: JobFailure | None = None,
    ) -> int:
        """Record that the job is over, and how. Repeating it is harmless.

        Returns:
            The newest checkpoint that it could have continued from: `checkpoint`, or one whose
                entry was in doubt; 0: none.

        Raises:
            FencedError: a newer coordinator owns the job.
            StorageError: in doubt, see the class.
        """
        async with self._lock:
            await self._finish_append_in_doubt()
            if self._view.ended is not None:
                return max(checkpoint, self._view.ended.checkpoint)
            last = self._view.last_end
            again = last is not None and last.run == self._view.run != ""
            newest = self._view.newest
            checkpoint = max(checkpoint, newest.checkpoint_id if newest is not None else 0)
            await self._append(
                JobEnded(
                    generation=self._generation,
                    writer=self._writer,
                    status=status,
                    reason=reason,
                    ended_ms=last.ended_ms if last is not None and again else self._clock.now_ms(),
                    last_checkpoint_id=self._view.last_checkpoint_id,
                    run=self._view.run,
                    checkpoint=checkpoint,
                    failure=failure,
                    history=self._history(),
                )
            )
            return checkpoint

    def _history(self) -> RunHistory:
        """Return the history that an entry of this coordinator repeats."""
        return self._began.restarted(self.restarts)

    async def trim(self, retain: int, keep_from: int | None = None) -> list[Manifest]:
        """Keep the newest `retain` checkpoints, and those from id `keep_from` on.

        Return those subsumed since the last call. The caller then deletes their files, except those
        that retained checkpoints or ones in progress share (`manifest.unshared_files`), and must
        have done so before it calls `trim` again: the log entries of one call are deleted by the
        next, so that after a crash at any point a new leader's first `trim` returns every manifest
        whose files may still exist.
        """
        async with self._lock:
            self._check_leader()
            plan = joblog.plan_trim(self._view, retain, keep_from)
            for sequence in self._reported:
                await self._store.delete(names.log_entry(sequence))
            doomed = (*self._inherited, *plan.doomed)
            if doomed or self._reported:
                swept = doomed[0].sequence if doomed else plan.head
                await self._publish(plan.head, swept)
            self._inherited = ()
            self._reported = tuple(entry.sequence for entry in doomed)
            self._view = joblog.apply_trim(self._view, plan.head)
            return [entry.manifest for entry in doomed if entry.manifest is not None]

    # Appending.

    async def _append(
        self, entry: OutputListed | AttemptDeployed | CheckpointEntry | JobEnded
    ) -> None:
        self._in_doubt = entry
        decision = await self._try_append(entry)
        if isinstance(decision, Appended | AlreadyAppended):
            sequence, data = self._view.tail + 1, joblog.ENTRIES.encode(entry)
            other = await self._read_back.settled(self._generation, sequence, data)
            if other is not None:
                existing = self._entry(other, names.log_entry(sequence))
                decision = joblog.decide_append(self._view, entry, existing)
        self._in_doubt = None
        if isinstance(decision, Fenced):
            raise self._fence(decision.by.generation, decision.by.writer)
        check(not isinstance(decision, RetryAfterTail), "a leader's append has one outcome")
        self._view = decision.view

    async def _finish_append_in_doubt(self) -> None:
        """Repeat an append whose outcome is unknown, before anything else is appended."""
        self._check_leader()
        if self._in_doubt is not None:
            await self._append(self._in_doubt)

    async def _try_append(self, entry: LogEntry) -> joblog.AppendDecision:
        name = names.log_entry(self._view.tail + 1)
        data = joblog.ENTRIES.encode(entry)
        result = await self._store.create_if_absent(name, data)
        found = result.data if isinstance(result, Existed) else None
        if found is None:
            found = await self._read_back.other(name, data)
        existing = None if found is None else self._entry(found, name)
        return joblog.decide_append(self._view, entry, existing)

    async def _append_start(
        self,
        started: GenerationStarted,
        follow: Callable[[LogView, GenerationStarted], GenerationStarted],
    ) -> LogHead:
        for _ in range(START_ATTEMPTS_MAX):
            self._view, _ = await self._read_log()
            same = self._view.generation == started.generation and self._read_back.needed
            if same or self._view.generation > started.generation:
                raise self._fence(self._view.generation, self._view.writer)
            decision = await self._try_append(follow(self._view, started))
            while isinstance(decision, RetryAfterTail):
                self._view = decision.view
                decision = await self._try_append(follow(self._view, started))
            if isinstance(decision, Fenced):
                raise self._fence(decision.by.generation, decision.by.writer)
            # The slot may only have been free because it was trimmed after we read the log.
            head = await self._read_head()
            if not joblog.reader_was_overtaken(decision.view, head):
                winner = await self._claims.winner(started.generation, self._writer)
                if winner != self._writer:
                    raise self._fence(started.generation, winner)
                self._view = decision.view
                return head
        raise StorageError(
            f"the job log grew faster than this coordinator could follow "
            f"attempts=`{START_ATTEMPTS_MAX}`",
            where=self._store.describe(),
            fix="is an older coordinator of this job still running? stop it, or try again",
        )

    async def _forget(self, needless: set[int], head: int) -> None:
        """Delete entries that trimming has spared; those in view are left to trimming."""
        for sequence in sorted(each for each in needless if 0 < each < head):
            await self._store.delete(names.log_entry(sequence))

    async def _take_over(self, generation: int, head: LogHead) -> None:
        inherited: list[Doomed] = []
        for sequence in range(head.swept, head.sequence):
            name = names.log_entry(sequence)
            data = await self._store.read(name)
            entry = None if data is None else self._entry(data, name)
            if isinstance(entry, CheckpointEntry):
                inherited.append(Doomed(sequence, entry.manifest))
            elif (
                isinstance(entry, OutputListed | AttemptDeployed | JobEnded)
                and sequence not in self._view.history.ends
                and sequence != self._view.old_output.sequence
            ):
                inherited.append(Doomed(sequence, None))
        self._inherited = tuple(inherited)
        self._generation = generation
        self._settled = self._view.settled
        try:
            await self._publish(head.sequence, head.swept)
        except BaseException:
            self._generation = 0
            raise

    # Reading.

    async def _read_log(self) -> tuple[LogView, LogHead]:
        head = await self._read_head()
        for _ in range(LOAD_ATTEMPTS_MAX):
            view = LogView.beginning_at(head.sequence)
            while True:
                name = names.log_entry(view.tail + 1)
                data = await self._store.read(name)
                if data is None:
                    break
                view = joblog.fold(view, self._entry(data, name))
            head = await self._read_head()
            if not joblog.reader_was_overtaken(view, head):
                self._check_claimed(view)
                return view, head
        raise CorruptError(
            f"the job log is damaged: its first entry is missing "
            f"name=`{names.log_entry(head.sequence)}`",
            where=self._store.describe(),
            fix="were objects deleted by hand or by a lifecycle rule? restore them, or give the job "
            "a new name to start it without state",
        )

    def _check_claimed(self, view: LogView) -> None:
        if view.generation > self._claims.last:
            raise CorruptError(
                f"the job log is damaged: a generation was never claimed "
                f"name=`{names.generation_record(view.generation)}`",
                where=self._store.describe(),
                fix="were objects deleted by hand or by a lifecycle rule? restore them",
            )

    async def _read_head(self) -> LogHead:
        head = LogHead()
        for generation in range(await self._claims.find_last(), 0, -1):
            record = await self._claims.read(generation)
            if record is None:
                raise CorruptError(
                    f"the job log is damaged: a generation record is missing "
                    f"name=`{names.generation_record(generation)}`",
                    where=self._store.describe(),
                    fix="were objects deleted by hand or by a lifecycle rule? restore them",
                )
            head = joblog.merge_head(head, record)
            if not joblog.older_heads_matter(record):
                break
        return head

    def _entry(self, data: bytes, name: str) -> LogEntry:
        return joblog.ENTRIES.decode(data, name, self._store.describe())

    # Leadership.

    async def _publish(self, head: int, swept: int) -> None:
        record = GenerationRecord(
            generation=self._generation,
            writer=self._writer,
            head=head,
            settled=self._settled,
            swept=swept,
            run=self._run,
            leader=self._leader,
        )
        name = names.generation_record(self._generation)
        await self._store.put(name, joblog.RECORDS.encode(record))

    def _check_leader(self) -> None:
        self._check_not_fenced()
        check(self._generation > 0, "this coordinator has not started a generation")

    def _check_not_fenced(self) -> None:
        if self._fenced_by is not None:
            raise self._fenced_by

    def _fence(self, generation: int, writer: str) -> FencedError:
        self._fenced_by = FencedError(
            f"a newer coordinator owns the job generation=`{generation}` writer=`{writer}`",
            where=self._store.describe(),
            fix="this one stops; nothing of its unfinished checkpoints becomes visible",
        )
        return self._fenced_by
