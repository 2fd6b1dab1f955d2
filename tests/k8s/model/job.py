"""A job as the model has it: its log in the storage, and the processes that claim to be its coordinator.

All the state of a job is one number, how far it has read. That is enough to see whether a run began with
less than what was durable, or whether two of them wrote.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from headgate.k8s.actions import CompletedCheckpoint, JobReport, Operation

MISSING = "CREATED"
"""The state of a job that cannot begin with what it is to begin with."""


class Broken(AssertionError):
    """A promise does not hold; the text says which."""


@dataclass
class Storage:
    """The storage of a job, which outlives all pods."""

    claims: list[tuple[str, int]] = field(default_factory=list)
    """The runs in order: the id, and the position the run began with. The number of claims is the
    epoch.
    """
    position: int = 0
    """The newest durable one: of the last checkpoint, or of the start of the last run."""
    checkpoints: int = 0
    completed_ms: int = 0
    ended: dict[str, str] = field(default_factory=dict)
    savepoints: dict[str, int] = field(default_factory=dict)


@dataclass
class Process:
    """A coordinator: the process in a head pod. It lives on for a while if its pod's node is cut off."""

    storage: Storage
    run_id: str
    parallelism: int
    crashes: bool
    now_ms: int
    state: str = "CREATED"
    epoch: int = 0
    position: int = 0
    restored: str = ""
    wants: dict[str, tuple[str, dict[str, Any], int]] = field(default_factory=dict)
    """Operations under way: verb, arguments and when each ends."""
    operations: dict[str, Operation] = field(default_factory=dict)

    def start(self, kind: str, path: str, allowed: frozenset[str]) -> None:
        """Read the log, and go on with this run or begin it.

        `allowed`: `nothing`, or paths of the user, with which a run may begin with less than is durable.
        """
        storage = self.storage
        if self.run_id in storage.ended:
            self.state = storage.ended[self.run_id]
            return
        runs = [run for run, _ in storage.claims]
        if self.run_id in runs and runs[-1] != self.run_id:
            self.state = "SUSPENDED"  # the log has gone on without it
            return
        if self.run_id in runs or kind == "latest":
            begin = storage.position
        elif kind == "path":
            if path not in storage.savepoints:
                self.state = MISSING  # the user has deleted it
                return
            begin = storage.savepoints[path]
            if begin < storage.position and path not in allowed:
                raise Broken(f"{self.run_id} begins at {begin}, durable is {storage.position}")
        else:
            begin = 0
            if storage.position and "nothing" not in allowed:
                raise Broken(f"{self.run_id} begins without state, durable is {storage.position}")
        self.restored = str(begin) if begin else ""
        storage.claims.append((self.run_id, begin))
        storage.position = begin
        self.epoch, self.position, self.state = len(storage.claims), begin, "RESTORING"

    @property
    def fenced(self) -> bool:
        """A newer coordinator has claimed the log."""
        return self.epoch != len(self.storage.claims)

    def checkpoint(self, now_ms: int) -> bool:
        """Append a checkpoint; False if the log refuses it."""
        if self.fenced:
            self.state = "FENCED"
            return False
        self.storage.position = self.position
        self.storage.checkpoints += 1
        self.storage.completed_ms = now_ms
        return True

    def tick(self, now_ms: int, random_: random.Random, slots: int) -> None:
        """Let some time pass."""
        if self.state == "RESTORING" and now_ms - self.now_ms > 3_000 and slots:
            self.state = "RUNNING"
        if self.state != "RUNNING":
            return
        if self.crashes and random_.random() < 0.3:
            self.end("FAILED", now_ms)
            return
        self.position += random_.randrange(3)
        if random_.random() < 0.3 and not self.checkpoint(now_ms):
            return
        for trigger, (verb, arguments, ends_ms) in list(self.wants.items()):
            if now_ms >= ends_ms and self.state == "RUNNING":
                del self.wants[trigger]
                self.operations[trigger] = self._do(verb, arguments, now_ms, random_, slots)

    def call(self, trigger: str, verb: str, arguments: dict[str, Any], ends_ms: int) -> None:
        """A request; the same trigger id again changes nothing."""
        if trigger not in self.wants and trigger not in self.operations:
            self.wants[trigger] = (verb, arguments, ends_ms)
            self.operations_begun(trigger)

    def operations_begun(self, trigger: str) -> None:
        self.operations[trigger] = Operation("running")

    def end(self, state: str, now_ms: int) -> None:
        """The job is over, and the log says so."""
        if state == "FAILED" or self.checkpoint(now_ms):
            if self.fenced:
                self.state = "FENCED"
                return
            self.storage.ended[self.run_id] = self.state = state

    def _do(
        self,
        verb: str,
        arguments: dict[str, Any],
        now_ms: int,
        random_: random.Random,
        slots: int,
    ) -> Operation:
        if random_.random() < 0.15:
            return Operation("failed", error="the storage did not answer")
        if verb == "rescale":
            if slots < arguments["parallelism"]:
                return Operation("failed", error="not enough workers")
            self.parallelism = arguments["parallelism"]
            return Operation("completed")
        if not self.checkpoint(now_ms):
            return Operation("failed", error="fenced")
        path = ""
        if verb == "savepoint" or arguments.get("savepoint"):
            path = f"s3://savepoints/{len(self.storage.savepoints)}"
            self.storage.savepoints[path] = self.position
        if verb == "stop":
            self.end("SUSPENDED", now_ms)
        return Operation("completed", path=path)

    def report(self) -> JobReport:
        """The answer of the REST API."""
        storage = self.storage
        last = CompletedCheckpoint(storage.checkpoints, storage.completed_ms)
        return JobReport(
            run_id=self.run_id,
            state=self.state,
            parallelism=self.parallelism,
            epoch=self.epoch,
            checkpoint=last if storage.checkpoints else None,
            restored=self.restored,
            operations=dict(self.operations),
        )
