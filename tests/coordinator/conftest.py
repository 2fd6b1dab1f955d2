"""A checkpoint driver whose workers, clock and store are in the hands of the test; and the lab of
tests/integration for whole jobs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.operators.graph import Graph
from headgate.runtime.control.messages import (
    CheckpointAcked,
    Messages,
    SubtaskAck,
    TriggerCheckpoint,
)
from headgate.runtime.coordinator.checkpointing import CheckpointDriver, Outcome
from headgate.runtime.coordinator.environment import PublishResult
from headgate.runtime.coordinator.global_commit import GlobalCommitter
from headgate.runtime.observe.spans import NoSpans
from headgate.runtime.options.registry import Options
from headgate.runtime.protocol.checkpoints.coordinator import CheckpointCoordinator
from headgate.runtime.protocol.checkpoints.settings import CheckpointRules
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.memory import MemoryStore
from headgate.state.snapshot import OperatorSnapshot, StateHandle

JOB = "job"
OPERATOR = "count"


class Clock:
    """Time that moves by hand, in ms."""

    now = 1000

    def now_ms(self) -> int:
        return self.now


class Store(MemoryStore):
    """Holds back the calls whose kind has a closed gate in `gates`."""

    def __init__(self, root: str) -> None:
        super().__init__(root, {})
        self.gates: dict[str, asyncio.Event] = {}

    def hold(self, call: str) -> None:
        self.gates[call] = asyncio.Event()

    async def _pass(self, call: str) -> None:
        if call in self.gates:
            await self.gates[call].wait()

    async def create_if_absent(self, name: str, data: bytes) -> Any:
        await self._pass("create_if_absent")
        return await super().create_if_absent(name, data)

    async def delete_files(self, names: Any) -> None:
        await self._pass("delete_files")
        await super().delete_files(names)


class DrivenJob:
    """One subtask of one operator, and the coordinator's checkpoint driver of attempt 1."""

    def __init__(self, *, log: bool = True, retain: int = 1, **settings: Any) -> None:
        self.clock = Clock()
        self.store = Store(JOB)
        self.elsewhere = Store("elsewhere")
        self.log = JobLog(self.store, "writer", self.clock) if log else None  # type: ignore[arg-type]
        self.settings = CheckpointRules(**{"interval_ms": None} | settings)
        self.retain = retain
        self.sent: list[Any] = []
        self.events: asyncio.Queue[PublishResult] = asyncio.Queue()
        self.announced: list[tuple[str, str]] = []
        self.plan: Any = SimpleNamespace(
            job_name=JOB,
            max_parallelism=4,
            vertices=[
                SimpleNamespace(
                    id=0, name=OPERATOR, parallelism=1, nodes=[SimpleNamespace(name=OPERATOR)]
                )
            ],
        )

    async def begin(self) -> CheckpointDriver:
        """Start the log and the first attempt."""
        if self.log is not None:
            await self.log.start_generation(parallelism=1, max_parallelism=4, run="run")
        env: Any = SimpleNamespace(
            spec=SimpleNamespace(
                checkpoint=SimpleNamespace(retain=self.retain), options={}, graph=Graph()
            ),
            options=Options({}),
            log=self.log,
            store=self.store if self.log is not None else None,
            open_at=lambda _, __: self.elsewhere,
            steady_clock=self.clock,
            generation=1,
            checkpoint_directory="memory://jobs/job" if self.log is not None else "",
            events=self.events,
            spans=NoSpans(),
            publish=lambda kind, text, **_: self.announced.append((kind, text)),
        )
        self.driver = CheckpointDriver(
            CheckpointCoordinator(self.settings), env, self, self, GlobalCommitter(env)
        )
        self.driver.start(1, self.plan, used=0, base=0, committed=0)
        return self.driver

    def broadcast(self, message: Messages) -> None:
        self.sent.append(message)

    def wake_at(self, at_ms: int) -> None:
        pass

    def checkpoint_completed(self) -> None:
        pass

    @property
    def triggered(self) -> list[TriggerCheckpoint]:
        return [message for message in self.sent if isinstance(message, TriggerCheckpoint)]

    def ack(self, id_: int, *files: str) -> Outcome:
        """The subtask has written these files, and needs them."""
        handles = tuple(
            StateHandle(state="s", kind="table", size_bytes=1, checksum="x", rows=1, file=file)
            for file in files
        )
        snapshots = (OperatorSnapshot(operator=OPERATOR, handles=handles),)
        ack = SubtaskAck(
            vertex=0,
            index=0,
            snapshots=snapshots,
            finished=False,
            sync_ms=0.0,
            async_ms=0.0,
            alignment_ms=0.0,
        )
        return self.driver.acked(CheckpointAcked(attempt=1, checkpoint_id=id_, subtasks=(ack,)))

    async def answer(self) -> Outcome:
        """The oldest publication under way is answered, and the job hears of it."""
        return self.driver.publish_result(await self.events.get())

    async def complete(self, id_: int, *files: str) -> Outcome:
        self.ack(id_, *files)
        return await self.answer()


@pytest.fixture
def driven() -> type[DrivenJob]:
    return DrivenJob
