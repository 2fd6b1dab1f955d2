"""The present attempt of a job: its plan, where its subtasks run, and what they report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import msgspec

from ...errors import FencedError, StorageError
from ...operators.base import ATTEMPTS_PER_GENERATION
from ...operators.drops import dropped_text, how_to_keep
from ..control.messages import SubtaskStatistics, Warm
from ..options.network import REST_LOST_RECORDS
from ..options.recovery import FAILOVER_STRATEGY, ORPHANED_MAX
from ..plan import PhysicalPlan
from ..protocol.adoption import Adopted
from ..protocol.backpressure import RecentRecords
from ..protocol.drops import DropLedger, LostRecords
from ..protocol.failover import RegionId
from ..protocol.failure_history import RestoreFigures
from ..protocol.ids import SubtaskId
from ..protocol.joblog import DeploymentRecord
from ..shipping import ship
from .environment import JobEnvironment
from .placement import Executions
from .restore import Restored, continues


@final
class Attempt:
    """One object for all attempts of a coordinator, one after the other.

    After a restart of some regions, those of the others belong to an older attempt: `executions`
    has the number of each region, and `number` is the newest.
    """

    def __init__(self, env: JobEnvironment) -> None:
        self._env = env
        self.number = 0
        self.begun = 0
        """The number of attempts that this coordinator has begun."""
        self.plan = env.spec.plan
        """The parallelism of the spec, until the job is rescaled."""
        self.parallelism = env.spec.parallelism
        self.plan_blob = ship(self.plan)
        self.executions = self._new_executions()
        self.restored: Restored | None = None
        """The state that the attempt began with."""
        self.restoring: dict[tuple[str, int], tuple[int, int]] = {}
        """By worker and region: bytes of state read, and to read, while an attempt is deployed."""
        self.figures = RestoreFigures()
        """Figures of the deployment under way, or of the last one."""
        self.deployment_events: int | None = None
        """The number of messages about the deployment under way; None: none is under way."""
        self.restarting: frozenset[RegionId] = frozenset()
        """Regions that restart while the others run."""
        self.orphaned_ms = 0
        """For how long the attempt may go on without a coordinator; 0: not at all."""
        self.statistics: dict[tuple[int, int], SubtaskStatistics] = {}
        """The last report of each subtask, by vertex and index."""
        self.recent = RecentRecords()
        self.dropped = DropLedger()
        self.lost = LostRecords(env.options.get(REST_LOST_RECORDS))
        self.late_messages = 0
        """The number of messages of attempts that were over; they had no effect."""

    def _new_executions(self) -> Executions:
        return Executions(self.plan, self._env.options.get(FAILOVER_STRATEGY))

    @property
    def restored_checkpoint(self) -> int:
        """Id of the checkpoint or savepoint that the attempt began with; 0: none."""
        return self.restored.manifest.checkpoint_id if self.restored is not None else 0

    @property
    def restored_bytes(self) -> tuple[int, int]:
        """The bytes of state that were read in this deployment, and all that are to be read."""
        parts = self.restoring.values()
        return sum(done for done, _ in parts), sum(total for _, total in parts)

    @property
    def warm_up(self) -> Warm:
        """The message that prepares a worker without subtasks for some of this plan."""
        checkpoint = self._env.spec.checkpoint
        storage = checkpoint.storage if checkpoint else ""
        return Warm(job=self.plan_blob, settings=self._env.spec.options, storage=storage)

    # -- what runs ----------------------------------------------------------------------------------

    def use(self, plan: PhysicalPlan, parallelism: int) -> None:
        """Run another plan from the next attempt on."""
        if plan is not self.plan:
            self.plan = plan
            self.executions = self._new_executions()
            self.executions.begin(self.executions.failover.everything, self.number)
            self.parallelism = parallelism
            self.plan_blob = ship(plan)

    def plan_for(self, restored: Restored | None) -> tuple[PhysicalPlan, int]:
        """Return plan and parallelism for the next attempt.

        The parallelism is that of the log; the number of key groups is that of the state.

        Raises:
            PlanError: a parallelism exceeds the number of key groups.
        """
        env, parallelism = self._env, self.parallelism
        if env.log is not None:
            parallelism = env.log.view.parallelism or parallelism
        groups = env.spec.max_parallelism
        if groups is None and restored is not None:
            groups = restored.manifest.max_parallelism
        same = parallelism == self.parallelism and groups in (None, self.plan.max_parallelism)
        return (self.plan if same else env.spec.replan(parallelism, groups)), parallelism

    def begin(self) -> int:
        """Begin another attempt of the whole job and return its number.

        No attempt of this job ever had that number, in any generation. Its subtasks count from 0.
        """
        self.statistics.clear()
        self.recent.clear()
        self.dropped.attempt_over()
        self.restored = None
        self.begin_deployment()
        return self._begin(self.executions.failover.everything)

    def begin_regions(self, regions: frozenset[RegionId]) -> int:
        """Begin another attempt of some regions and return its number; the others keep theirs."""
        self.restarting = regions
        self.deployment_events = None
        for subtask in self.executions.failover.subtasks_of(regions):
            self.statistics.pop((subtask.vertex, subtask.index), None)
            self.recent.forget(subtask.vertex, subtask.index)
            self.dropped.attempt_over([(subtask.vertex, subtask.index)])
        return self._begin(regions)

    def _begin(self, regions: frozenset[RegionId]) -> int:
        self.begun += 1
        self._number(self._env.generation * ATTEMPTS_PER_GENERATION + self.begun, regions)
        return self.number

    def adopt(self, number: int) -> None:
        """Go on with an attempt that an earlier coordinator began."""
        self._number(number, self.executions.failover.everything)

    def _number(self, number: int, regions: frozenset[RegionId]) -> None:
        self.number = self._env.attempt = number
        self.executions.begin(regions, number)

    def checkpoints_before(self, adopted: Adopted | None) -> tuple[int, int]:
        """Return the checkpoints before those of this attempt, which begins, or is adopted.

        Returns:
            The id up to which no id may be used again; and the checkpoint that the next one may
            build on, or 0 if there is none.
        """
        if adopted is None:
            restored, used = self.restored, self.restored_checkpoint
            own = restored.manifest if restored is not None and restored.of_this_job else None
            return used, used if own is not None and continues(own, self.plan) else 0
        log = self._env.log
        newest = log.view.newest if log is not None else None
        if newest is None or newest.checkpoint_id != adopted.base:
            return adopted.last_checkpoint, 0
        base = adopted.base if continues(newest.manifest, self.plan) else 0
        return adopted.last_checkpoint, base

    def committed_before(self, adopted: Adopted | None) -> int:
        """Return the checkpoint that the state of an attempt follows when it begins, or is adopted."""
        return self.restored_checkpoint if adopted is None else adopted.committed

    # -- its entry in the log -----------------------------------------------------------------------

    async def log_deployment(self, workers: Sequence[str]) -> None:
        """Record in the log what is about to run, and decide how long it may run without a coordinator.

        If the log cannot be written, the attempt runs all the same, but it stops together with its
        coordinator.

        Raises:
            FencedError: a newer coordinator leads, so nothing may begin.
        """
        self.orphaned_ms = 0
        log, orphaned_ms = self._env.log, self._env.options.get(ORPHANED_MAX)
        if log is None or not orphaned_ms or self.plan.loops:
            return
        deployment = DeploymentRecord(
            attempt=self.number,
            workers=tuple(workers),
            plan=self.plan.fingerprint(),
            parallelism=self.parallelism,
            max_parallelism=self.plan.max_parallelism,
            restored_checkpoint=self.restored_checkpoint,
        )
        try:
            await log.deploy(deployment)
        except FencedError:
            raise
        except StorageError as error:
            text = f"a takeover would restart attempt {self.number}: {error}"
            self._env.publish("unlogged", text)
            return
        self.orphaned_ms = orphaned_ms

    async def log_partial_restart(self) -> None:
        """Record in the log that some regions restart: a coordinator that takes over restarts the job.

        The entry only gives the reason. If it cannot be written, the workers know of the restart
        too, and do not wait for another coordinator.

        Raises:
            FencedError: a newer coordinator leads, so nothing may begin.
        """
        log = self._env.log
        deployment = log.view.deployment if log is not None else None
        if log is None or deployment is None or deployment.in_parts:
            return
        try:
            await log.deploy(msgspec.structs.replace(deployment, in_parts=True))
        except FencedError:
            raise
        except StorageError as error:
            text = f"the log does not have the restart of regions: {error}"
            self._env.publish("unlogged", text)

    # -- its deployment -----------------------------------------------------------------------------

    def begin_deployment(self) -> None:
        """Begin to count what shows that the deployment makes progress."""
        self.restoring.clear()
        self.deployment_events = 0
        self.figures = RestoreFigures()

    def end_regions(self) -> None:
        """No regions restart any more: they are deployed, or the whole attempt is over."""
        self.restarting, self.deployment_events = frozenset(), None

    # -- what its subtasks report -------------------------------------------------------------------

    def report(self, number: int, statistics: Iterable[SubtaskStatistics]) -> None:
        """Take in the reports of an attempt's subtasks, except those that run in another one by now."""
        for subtask in statistics:
            own = self.executions.attempt_of(SubtaskId(subtask.vertex, subtask.index))
            if own != number:
                continue
            self.statistics[subtask.vertex, subtask.index] = subtask
            self.recent.report(subtask.vertex, subtask.index, subtask.records_in)
            self.dropped.report(subtask.vertex, subtask.index, subtask.dropped)
            self.lost.report(self._env.clock.now_ms(), subtask.index, subtask.lost)
        self.announce_dropped()

    def announce_dropped(self, *, at_the_end: bool = False) -> None:
        """Warn about records that steps have dropped, as far as a warning is due."""
        now_ms = round(1_000 * self._env.clock.monotonic())
        for each in self.dropped.due(now_ms, at_the_end=at_the_end):
            keep = how_to_keep(each.kind)
            self._env.publish(
                "dropped",
                f"step `{each.step}` has dropped {dropped_text(each.kind, each.count)}"
                + (f"; to keep them: {keep}" if keep else ""),
                step=each.step,
                reason=each.kind,
                count=each.count,
                keep=keep,
            )
