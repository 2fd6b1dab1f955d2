"""A subtask at a source: polls its reader, and injects barriers where the coordinator triggers them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from ...errors import UserCodeError, check
from ...operators.elements import Batch, CheckpointBarrier, CheckpointOptions, LatencyMarker
from ...operators.functions.user_code import describe_record
from ...operators.source import REJECTED, SourceReader
from ...operators.splits import History
from ...state.snapshot import CommitPermit, ItemsCut, OperatorSnapshot, RestoredState
from ..protocol.split_discovery import KNOWN_SPLITS, EndedSplits, LedgerStart, SplitLedger
from .accounting import Activity
from .chain import Outputs, make_context, with_context
from .environment import TaskEnvironment
from .subtask import Subtask

SPLITS = "splits"
"""The name of the operator state with the positions."""
_ROWS_IN_ANY_CASE: Final = 8_192


class SourceSubtask(Subtask):
    """A subtask whose input is a source."""

    def __init__(
        self,
        env: TaskEnvironment,
        outputs: Outputs,
        fresh_splits: tuple[bytes, ...] | None,
        ledger: LedgerStart | None = None,
    ) -> None:
        super().__init__(env, outputs)
        source = env.vertex.head.source
        check(source is not None, "a source subtask without a source", vertex=env.vertex.name)
        assert source is not None  # for the type checker; `check` has raised otherwise
        self._reader: SourceReader = source.reader()
        self._fresh_splits = fresh_splits
        self._source = source
        self._ledger = None
        """The splits that are known; None for a source that discovers none."""
        self._ended: EndedSplits | None = None
        """The splits that have ended, for a source whose splits have parents."""
        self._awaited: tuple[str, ...] = ()
        self._more_wait = False
        """Splits wait for others, so the source is not idle for good."""
        if ledger is not None:
            self._ledger = SplitLedger(env.index, ledger, source.split_share)
            if source.splits_have_parents:
                self._ended = EndedSplits(ledger)
        self._waits_for_splits = ledger is not None and ledger.enabled and not source.bounded
        self._without_splits = False
        """All splits have ended, or there were none, and others may come."""
        self._splits = env.splits
        self._splits.behind_source = True
        self._splits.at_rest = source.at_rest
        self._splits.can_pause = self._reader.can_pause_splits
        self._splits.on_pause = self._pause
        self._splits.may_go_live = not source.has_history  # otherwise the coordinator decides when
        self._history = None if source.has_history else History.NONE
        """The phase reported to the coordinator; None: none yet."""
        self._last_batch_s = env.clock.monotonic()
        self._quiet_since_s: float | None = None
        """Since when the reader has had nothing; None: it has, or records are held back."""
        self._ends_when_quiet = False
        self._waiting: asyncio.Task[None] | None = None
        self._opened = False
        self._hurries = False
        self._completed = 0

    async def prepare(
        self,
        states: dict[str, RestoredState] | None,
        finished: bool,
        own: Sequence[OperatorSnapshot] = (),
    ) -> None:
        """Open the reader and give it its splits: fresh ones, or restored ones with positions."""
        await super().prepare(states, finished, own)
        head = self.chain.head
        self._opened = True
        context = make_context(head, self.env, self.timers, self.time.backpressured_s)
        with_context(head, self._reader.open, context, self._reject)
        restored = (states or {}).get(head.name, RestoredState()).items
        if self._fresh_splits is not None:
            splits = list(self._fresh_splits)
        else:
            splits = restored.get(SPLITS, [])
        if self._ledger is not None:
            keys = [key.decode() for key in restored.get(KNOWN_SPLITS, [])]
            with_context(head, self._ledger.add_known, keys)
            if self._ended is not None:
                self._ended.restore(keys)
        self._add_splits(splits)

    def _add_splits(self, splits: Sequence[bytes]) -> None:
        head = self.chain.head
        if self._ended is not None:
            self._ended.begun(with_context(head, self._keys, splits))
        with_context(head, self._reader.add_splits, splits)

    def _keys(self, splits: Sequence[bytes]) -> set[str]:
        return {self._source.split_key(split) for split in splits}

    def _going_on(self) -> set[str]:
        """Return the splits with a position, by key."""
        return self._keys(with_context(self.chain.head, self._reader.snapshot))

    @property
    def ended_splits(self) -> tuple[str, ...]:
        """The awaited splits that have ended for good."""
        if self._ended is None or not self._awaited or not self._opened:
            return ()
        return self._ended.among(self._awaited, self._going_on)

    def start(self) -> None:
        super().start()
        if self.env.settings.latency_interval_ms:
            self.timers.call_later(self.env.settings.latency_interval_ms, self._send_marker)

    def _send_marker(self) -> None:
        if self.finished or self._stopping:
            return
        now_ms = self.env.clock.now_ms()
        self.mark_latency(LatencyMarker(now_ms, self.chain.head.name, self.env.index))
        self.timers.call_later(self.env.settings.latency_interval_ms, self._send_marker)

    @property
    def reader(self) -> SourceReader:
        """The reader; other threads may only ask for its lag."""
        return self._reader

    @property
    def idle_s(self) -> float:
        """The seconds since the reader last returned a record; also for other threads."""
        return max(0.0, self.env.clock.monotonic() - self._last_batch_s)

    @property
    def quiet_ms(self) -> int:
        """For how long the reader has had nothing, although no records were held back."""
        since_s = self._quiet_since_s
        return 0 if since_s is None else round(1000 * (self.env.clock.monotonic() - since_s))

    def _note_quiet(self, batch: Batch | None) -> None:
        splits = self._splits
        held_back = splits.paused or splits.history is not History.NONE or self._reader.held_back
        held_back = held_back or self._more_wait
        if batch is not None or held_back:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = self.env.clock.monotonic()

    def _reject(self, batch: Batch) -> None:
        self.chain.head.output.emit_side(REJECTED, batch)

    async def step(self) -> bool:
        if self._stopping or self.finished:
            return False
        if self._splits.stands_still and not self._reader.finished:
            self._quiet_since_s = None
            return False
        self.time.switch(Activity.BUSY)
        self._reader.rows_wanted = self._rows_wanted()
        batch = with_context(self.chain.head, self._reader.poll)
        self._note_quiet(batch)
        if batch is not None:
            self._last_batch_s = self.env.clock.monotonic()
            try:
                await self.process(batch, 0)
            except UserCodeError as error:
                error.position = self._read_up_to()
                raise
        with_context(self.chain.head, self._splits.batch_done)
        if self._tell_history() or batch is not None:
            return True
        ends = self._ends_when_quiet and self._quiet_since_s is not None
        if not self._reader.finished and not ends:
            return False
        if self._waits_for_splits and not ends:
            return self._set_without_splits(True)
        await self.finish()
        return True

    def _rows_wanted(self) -> int:
        """Return the most rows to read at once, which the source need not have.

        A barrier waits until all records that were read at once have left the chain. So no more are
        read than one slice takes, except that 8,192 are read in any case.
        """
        wanted = None if self.debloater is None else self.debloater.rows_at_once()
        most = max(self._slices.rows, _ROWS_IN_ANY_CASE)
        return most if wanted is None else min(wanted, most)

    def _set_without_splits(self, none: bool) -> bool:
        """Note whether there is a split to read, as event time must not wait for a subtask without one.

        Return True if this has changed.
        """
        if none is self._without_splits:
            return False
        self._without_splits = none
        self.chain.head.output.emit_idle(none)
        return True

    def offer(
        self, splits: Mapping[str, bytes], awaited: Sequence[str] = (), *, more: bool = False
    ) -> None:
        """Take, as mail, those of the splits by key which are new and for this subtask.

        The ledger and the reader change together, so that no snapshot has the one without the other.

        Args:
            splits: those that may be read now.
            awaited: the splits whose end is to be reported.
            more: there are others, which may not be read yet.
        """

        def take() -> None:
            if self._ledger is None or self._stopping or self.finished:
                return
            self._awaited, self._more_wait = tuple(awaited), more
            taken = with_context(self.chain.head, self._ledger.offer, splits)
            if taken:
                self._add_splits(taken)
                self._set_without_splits(False)
                self._wait_anew()

        self.put_mail(take)

    def _tell_history(self) -> bool:
        """Report the phase of the reader; return True if it has changed."""
        before, self._history = self._history, self._splits.history
        if before is self._history:
            return False
        if History.OVER in (before, self._history):
            # Event time follows the subtasks that still read, and this one once it is live.
            self.chain.head.output.emit_idle(self._history is History.OVER)
        self._splits.on_history()
        return True

    def history_over(self) -> None:
        """Handle, as mail, that all subtasks have read their part of the history."""

        def go_live() -> None:
            self._splits.may_go_live = True
            self._wait_anew()

        self.put_mail(go_live)

    def _read_up_to(self) -> str:
        """Return the positions of the splits as text."""
        try:
            splits = [msgspec.msgpack.decode(split) for split in self._reader.snapshot()]
            return describe_record(splits) if splits else "its end"
        except Exception:  # a user's reader may encode positions differently
            return ""

    async def _idle(self) -> None:
        reads = not (
            self._stopping or self.finished or self._splits.stands_still or self._without_splits
        )
        if reads and self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_task(
                self._reader.wait(), name=f"source wait of {self.env.task_name}"
            )
            self._waiting.add_done_callback(self._arrived)
        await super()._idle()

    def _pause(self) -> None:
        """React to a change of paused splits. Barriers are still injected, as they come by mail."""
        if self._reader.can_pause_splits:
            with_context(self.chain.head, self._reader.pause_splits, self._splits.paused)
        self._wait_anew()

    def _wait_anew(self) -> None:
        """Wait again, as what the reader waits for may have changed."""
        if self._waiting is not None:
            self._waiting.cancel()
        self.signal.set()

    def announce(self, group: str, limit: int) -> None:
        """Handle, as mail, that splits above `limit` wait for the others of their group."""
        self.put_mail(lambda: self._splits.announce(group, limit))

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self._waiting = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self.put_mail(lambda: _reraise(error))
        self.signal.set()

    def trigger_checkpoint(
        self, checkpoint_id: int, trigger_ms: int, options: CheckpointOptions
    ) -> None:
        """Inject the barrier, as mail; with `options.stop`, nothing is read after it."""

        def trigger() -> None:
            self._hurries = False
            if options.stop:
                self._stopping = True
            with_context(self.chain.head, self._reader.begin_checkpoint, checkpoint_id)
            if self._ended is not None:
                self._ended.cut(checkpoint_id, self._going_on())
            self.take_snapshot(CheckpointBarrier(checkpoint_id, trigger_ms, options), 0.0)

        self._hurries = self._hurries or options.may_overtake
        self.put_mail(trigger)

    def checkpoint_completed(self, permit: CommitPermit) -> None:
        super().checkpoint_completed(permit)

        def tell() -> None:
            if permit.checkpoint_id > self._completed:
                self._completed = permit.checkpoint_id
                if self._ended is not None:
                    self._ended.completed(permit.checkpoint_id)
                with_context(
                    self.chain.head, self._reader.on_checkpoint_complete, permit.checkpoint_id
                )

        self.put_mail(tell)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        super().checkpoint_aborted(checkpoint_id)

        def tell() -> None:
            if self._ended is not None:
                self._ended.aborted(checkpoint_id)
            with_context(self.chain.head, self._reader.on_checkpoint_aborted, checkpoint_id)

        self.put_mail(tell)

    async def _drain_outputs(self) -> None:
        """Do not wait for the outputs in the middle of a batch while an overtaking barrier waits
        for its end.

        At most this batch is added to the output queues.
        """
        while self._backlogged() and not self._hurries:
            await self._sleep(Activity.BACKPRESSURED)

    def end_early(self) -> None:
        """Stop reading, as mail; continue as if the data had ended here."""
        self.put_mail(self.finish)

    def end_when_quiet(self) -> None:
        """End, as mail, as soon as the reader has nothing: something may have come since it was asked."""

        def end() -> None:
            self._ends_when_quiet = True

        self.put_mail(end)

    def extra_items(self) -> dict[str, ItemsCut]:
        items = {SPLITS: ItemsCut(self._reader.snapshot())}
        if self._ledger is not None:
            keys = [key.encode() for key in self._ledger.known]
            items[KNOWN_SPLITS] = ItemsCut(keys, "union")
        return items

    def forget(self) -> None:
        super().forget()
        self._splits.on_pause = None
        vars(self).pop("_reader", None)  # it knows `_reject`

    async def _release(self) -> None:
        waiting = self._waiting
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        if self._opened:
            self._opened = False
            self._reader.close()
        await super()._release()


def _reraise(error: BaseException) -> None:
    raise error
