"""State of cancelled subtasks that waits in the memory of a worker for the next attempt.

It waits for the next deployment, which takes over what it can use, and lets go of the rest; and not for
longer than an option says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import TypeAlias

import msgspec
import xxhash

from ...state.chain import StateKey
from ...state.keygroups import KeyGroupRange, key_group_range
from ...state.snapshot import KeptState, OperatorSnapshot, StateHandle
from ..control.messages import DeployCommon
from ..protocol.kept_state import KeptFacts, RestoreFacts, reason_to_read
from ..task.subtask import Subtask

Place: TypeAlias = tuple[int, int]
"""The vertex and the index of a subtask."""
_log = logging.getLogger("headgate.worker")


class KeptSubtask:
    """The states of a subtask that was cancelled.

    Args:
        code: a digest of the code and the options of the job.
        subtask: the subtask. Nothing of it stays in memory but its states.
    """

    def __init__(self, code: str, subtask: Subtask) -> None:
        env = subtask.env
        self.place: Place = (env.vertex.id, env.index)
        self._code, self._task_name = code, env.task_name
        self._key_groups = key_group_range(
            env.index, env.vertex.parallelism, env.plan.max_parallelism
        )
        self._states = subtask.kept
        self._book = subtask.snapshots.book

    def taken_over(
        self,
        code: str,
        own: KeyGroupRange,
        checkpoint_id: int,
        state: Sequence[OperatorSnapshot],
        *,
        of_this_job: bool,
    ) -> dict[StateKey, KeptState]:
        """Return the states that the next subtask of this place takes over. All others are read.

        Args:
            code: see `KeptSubtask`; of the next attempt.
            own: its key groups.
            checkpoint_id: the checkpoint that it restores.
            state: what it restores.
            of_this_job: see `RestoreFacts`.
        """
        taken: dict[StateKey, KeptState] = {}
        written = self._book.written(checkpoint_id).chains
        for key, found in self._states.items():
            chain, handles = written.get(key), handles_of(state, key)
            kept = KeptFacts(
                code=self._code,
                key_groups=self._key_groups,
                checkpoints=found.checkpoints,
                handles=None if chain is None else chain.handles,
            )
            restored = RestoreFacts(code, own, checkpoint_id, of_this_job, handles)
            reason = reason_to_read(kept, restored)
            if not reason:
                taken[key] = found
            elif handles:
                _log.info(
                    "state is read again: %s operator=`%s` state=`%s` task=`%s`",
                    reason,
                    *key,
                    self._task_name,
                )
        return taken


class KeptStates:
    """The states of cancelled subtasks that wait in one worker."""

    def __init__(self) -> None:
        self._subtasks: dict[Place, KeptSubtask] = {}
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, kept: KeptSubtask, timeout_ms: int) -> None:
        """Let the states of a subtask wait for up to `timeout_ms`."""
        self._subtasks[kept.place] = kept
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_ms / 1000, self.take_all)

    def take_all(self) -> dict[Place, KeptSubtask]:
        """Return all that waits; nothing does afterwards."""
        self._stop_timer()
        taken, self._subtasks = self._subtasks, {}
        return taken

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def handles_of(state: Sequence[OperatorSnapshot], key: StateKey) -> tuple[StateHandle, ...]:
    """Return the handles of one state of an operator."""
    operator, name = key
    return tuple(
        handle
        for snapshot in state
        if snapshot.operator == operator
        for handle in snapshot.handles
        if handle.state == name
    )


def without(
    state: Sequence[OperatorSnapshot], taken: Collection[StateKey]
) -> tuple[OperatorSnapshot, ...]:
    """Return what is left to read when some states were taken over."""
    if not taken:
        return tuple(state)
    return tuple(
        msgspec.structs.replace(
            snapshot,
            handles=tuple(h for h in snapshot.handles if (snapshot.operator, h.state) not in taken),
        )
        for snapshot in state
    )


def code_digest(common: DeployCommon) -> str:
    """Return a digest of the job's code and options, by which attempts are compared."""
    digest = xxhash.xxh3_128(common.job)
    for item in sorted(common.settings.items()):
        digest.update(repr(item).encode())
    return digest.hexdigest()
