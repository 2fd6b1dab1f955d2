"""The state of one reconciliation: the observations, the status that is being made, and the actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from .actions import (
    ENDED,
    RUNNING,
    Action,
    EmitEvent,
    JobReport,
    Object,
    Observed,
    Requeue,
)
from .objects import HEAD, REVISION, ROLE, RUN, Deployment, Settings, manifest_name, selector
from .pod_troubles import refusal, refused_pods, troubles
from .spec import Deletion, Job, Kubernetes, milliseconds, parse_deletion
from .status import (
    Outcome,
    Run,
    Start,
    StreamJobStatus,
    Transition,
    Verb,
    rfc3339,
    short,
    since_1970_ms,
)

POD_MAKERS: Final = ("StatefulSet", "Deployment", "RayCluster")


@dataclass(slots=True)
class Context:
    """The state of one reconciliation of a StreamJob.

    Attributes:
        resource: the StreamJob.
        status: a copy of its status, which is changed.
        job: its spec; None if its form is wrong.
        stored: the spec of the running revision, from its ConfigMap; None if that does not exist.
    """

    resource: Object
    status: StreamJobStatus
    observed: Observed
    now_ms: int
    settings: Settings
    job: Job | None = None
    stored: Job | None = None
    waits_for: str = ""
    """The event that the reconciliation waits for, in words."""
    stalled: str = ""
    """The reason why the job cannot go on by itself."""
    runs_at_last: bool = False
    """The run was seen to run for the first time just now."""
    actions: list[Action] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.resource["metadata"].get("namespace", "default"))

    @property
    def uid(self) -> str:
        return str(self.resource["metadata"]["uid"])

    @property
    def generation(self) -> int:
        return int(self.resource["metadata"].get("generation", 0))

    @property
    def deleted(self) -> bool:
        return "deletionTimestamp" in self.resource["metadata"]

    @property
    def now(self) -> str:
        return rfc3339(self.now_ms)

    @property
    def run(self) -> Run | None:
        """The run that should exist; None if there should be none."""
        run = self.status.run
        return run if run is not None and not run.ended else None

    @property
    def kubernetes(self) -> Kubernetes:
        """The section in force: that of the spec, or of the running revision while the spec is wrong."""
        job = self.job or self.stored
        return job.kubernetes if job is not None else Kubernetes()

    @property
    def deletion(self) -> Deletion:
        """The effect of deleting the StreamJob, by its current spec and not by the running revision."""
        return parse_deletion(self.resource)

    @property
    def running_job(self) -> Job | None:
        """The spec of the running revision."""
        run = self.status.run
        if run is not None and self.job is not None and self.job.revision == run.revision:
            return self.job
        return self.stored

    @property
    def report(self) -> JobReport | None:
        """The answer of the coordinator, if it is about this run."""
        report, run = self.observed.job, self.status.run
        if report is None or run is None or report.run_id != self.run_id(run):
            return None
        return report

    @property
    def healthy(self) -> bool:
        return self.report is not None and self.report.state == RUNNING

    @property
    def over(self) -> bool:
        """True if the job of the run has ended, with success or not."""
        return self.report is not None and self.report.state in ENDED

    @property
    def refusal(self) -> str:
        """The message of the head that says why the run can never begin; empty if there is none."""
        run = self.status.run
        if run is None or run.ran or self.report is not None:
            return ""
        pods = (each for each in self.observed.pods if self.is_of(each, run))
        heads = (each for each in pods if each["metadata"]["labels"].get(ROLE) == HEAD)
        return next(filter(None, map(refusal, heads)), "")

    def run_id(self, run: Run) -> str:
        return f"{self.uid}-{run.number}"

    def deployment(self, job: Job, run: Run) -> Deployment:
        return Deployment(self.name, self.namespace, self.uid, job, run, self.settings)

    def act(self, *actions: Action) -> None:
        self.actions.extend(actions)

    def event(
        self, reason: str, message: str, type_: Literal["Normal", "Warning"] = "Normal"
    ) -> None:
        self.act(EmitEvent(type_, reason, short(message)))

    def wait(self, message: str, after_ms: int | None = None) -> None:
        """Note that nothing can be done until something else happens; look again soon by default."""
        self.waits_for = message
        self.act(Requeue(self.settings.poll_changing_ms if after_ms is None else after_ms))

    def since_ms(self, time: str) -> int:
        """Return the milliseconds from `time` until now."""
        return self.now_ms - since_1970_ms(time)

    def begin(
        self, verb: Verb, message: str, *, outcome: Outcome = "", drained: bool = False
    ) -> None:
        """Start a transition. It is only recorded now, and carried out from the next reconciliation on.

        With `drained` there is no job to stop, but only pods to remove.
        """
        saves = verb in ("Suspend", "Upgrade", "Restore", "Delete") and not drained
        self.status.transition = Transition(
            verb=verb,
            step="Save" if saves else "Drain",
            started_at=self.now,
            step_started_at=self.now,
            message=short(message),
            outcome=outcome,
        )
        self.act(Requeue(0))

    def begin_run(
        self, revision: str, parallelism: int, start: Start, reason: str, message: str
    ) -> None:
        """Decide that a run exists from now on. No object has its number yet."""
        before = self.status.run.number if self.status.run is not None else 0
        number = max([before, *self._numbers_seen()]) + 1
        self.status.run = Run(
            number=number,
            revision=revision,
            parallelism=parallelism,
            start=start,
            started_at=self.now,
            generation=self.generation,
            reason=reason,
        )
        self.status.job = None
        self.status.rescale = None
        self.event("Deploying", f"run {number}: {message}")

    def _numbers_seen(self) -> list[int]:
        """Return the numbers of runs of this StreamJob that objects have."""
        found = []
        for each in (*self.observed.children.values(), *self.observed.pods):
            number = run_number(each, self.uid)
            if number is not None:
                found.append(number)
        return found

    def child(self, kind: str, name: str) -> Object | None:
        return self.observed.children.get((kind, name))

    def pod_trouble(self) -> str:
        """Return the trouble of the pods of the run, or the reason why no pods are made."""
        run = self.status.run
        if run is None:
            return ""
        children = self.observed.children.values()
        makers = [each for each in children if each.get("kind") in ("StatefulSet", "Deployment")]
        refused = refused_pods(
            (each for each in makers if self.is_of(each, run)), self.observed.refusals
        )
        return refused or troubles(each for each in self.observed.pods if self.is_of(each, run))

    def is_of(self, each: Object, run: Run) -> bool:
        """True if an object or a pod belongs to the run."""
        return run_id_of(each) == self.run_id(run)

    def config_map(self, revision: str) -> Object | None:
        return self.child("ConfigMap", manifest_name(self.name, revision))

    def duration(self, text: str) -> int:
        return milliseconds(text)


def run_id_of(each: Object) -> str:
    """Return the run that an object belongs to; empty if it names none."""
    metadata = each["metadata"]
    found = metadata.get("annotations", {}).get(RUN) or metadata.get("labels", {}).get(RUN, "")
    return str(found)


def run_number(each: Object, uid: str) -> int | None:
    """Return the number of the run, if it is a run of the StreamJob with this uid."""
    owner, _, number = run_id_of(each).rpartition("-")
    return int(number) if owner == uid and number.isdigit() else None


def revision_label(each: Object) -> str:
    """Return the revision in the labels of an object."""
    metadata: Mapping[str, Any] = each["metadata"]
    found = metadata.get("annotations", {}).get(REVISION)
    return str(found or metadata.get("labels", {}).get(REVISION, ""))


def copied(status: StreamJobStatus) -> StreamJobStatus:
    """Return a deep copy of a status."""
    return msgspec.convert(msgspec.to_builtins(status), StreamJobStatus)


def worker_selector(name: str) -> str:
    """Return the label selector of worker pods, as text."""
    return ",".join(f"{key}={value}" for key, value in selector(name, "worker").items())
