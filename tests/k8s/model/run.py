"""One seed: a user who changes his mind, a cluster in trouble, and an operator that has to cope.

First trouble, in which no promise may be broken; then quiet, in which everything has to come to what the
user wants, and then to rest.
"""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from msgspec import convert

from headgate.k8s.actions import Requeue
from headgate.k8s.spec import Job, parse_job
from headgate.k8s.status import StreamJobStatus, paths_in_use
from headgate.k8s.transitions import HOLD_ATTEMPTS_MAX

from ..conftest import IN_GROUPS, RESOURCE
from .cluster import Broken, Cluster
from .job import MISSING
from .operator import JOB_KEY, Operator

STEPS = 160
QUIET_STEPS_MAX = 1500
IMAGES = ("good-1", "good-2", "good-3", "bad-pull", "bad-crash", "bad-manifest")
TIMES = {"stabilizationPeriod": "1m", "progressDeadline": "4m"}


@dataclass
class Model:
    """A cluster, its user and its operators."""

    seed: int
    random: random.Random = field(init=False)
    cluster: Cluster = field(init=False)
    operators: list[Operator] = field(default_factory=list)
    uids: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.cluster = Cluster(self.random)
        self.operators.append(Operator(self.cluster))

    @property
    def job(self) -> dict[str, Any] | None:
        return self.cluster.objects.get(JOB_KEY)

    def run(self) -> None:
        """Raises Broken, with what happened before."""
        try:
            self._trouble()
            self._quiet()
        except Broken as broken:
            trace = "\n".join(self.cluster.trace[-60:])
            raise Broken(f"seed {self.seed}: {broken}\n{trace}") from None

    @property
    def in_groups(self) -> bool:
        """The job has two slot sharing groups."""
        return self.seed % 3 == 1

    # the user

    def apply(self) -> None:
        """`kubectl apply` of a StreamJob, new or changed."""
        kubernetes: dict[str, Any] = {
            "image": self.random.choice(IMAGES),
            "state": self.random.choice(("Running", "Running", "Running", "Suspended")),
            "upgrade": {
                "mode": self.random.choice(("Checkpoint", "Checkpoint", "Savepoint")),
                "fallback": self.random.choice(("LastCheckpoint", "LastCheckpoint", "Fail")),
                "timeout": "2m",
                "rollback": {**TIMES, "enabled": self.random.random() < 0.8},
            },
            "deletion": {
                "policy": self.random.choice(("SavepointThenStop", "Stop", "Abort")),
                "stateRetention": self.random.choice(("Retain", "Retain", "Delete")),
                "timeout": "2m",
            },
            "restartPolicy": {
                "strategy": self.random.choice(("Never", "ExponentialDelay")),
                "maxAttempts": 2,
            },
        }
        if self.random.random() < 0.1:
            kubernetes["upgrade"]["mode"] = "Stateless"
        if self.random.random() < 0.3:
            kubernetes["savepoints"] = {"every": "1m", "retain": 2}
        if self.random.random() < 0.2 and self.cluster.storage.savepoints:
            path = self.random.choice(sorted(self.cluster.storage.savepoints))
            kubernetes["restore"] = {"path": path, "nonce": self.random.randrange(100)}
        if self.random.random() < 0.1:
            kubernetes["imagge"] = "wrong"
        self.change(parallelism=self.random.choice((1, 2, 3)), kubernetes=kubernetes)

    def change(self, **spec: Any) -> None:
        """Change the spec; what it allows is remembered for the oracle."""
        kubernetes = spec["kubernetes"]
        if kubernetes["upgrade"]["mode"] == "Stateless":
            self.cluster.allowed.add("nothing")
        if "restore" in kubernetes:
            self.cluster.allowed.add(kubernetes["restore"]["path"])
        found = self.job
        words = {k: kubernetes.get(k) for k in ("image", "state", "restore")}
        self.cluster.tell(f"user: {words} {kubernetes['upgrade']['mode']} x{spec['parallelism']}")
        if found is not None:
            if "deletionTimestamp" not in found["metadata"]:
                changed = found["spec"] | spec
                self.cluster.put({**found, "spec": changed}, spec_changed=changed != found["spec"])
            return
        made = copy.deepcopy(RESOURCE)
        made["metadata"]["uid"] = f"u{next(self.uids)}"
        made["spec"] |= spec | (IN_GROUPS if self.in_groups else {})
        self.cluster.put(made)

    def annotate(self, paused: str) -> None:
        if self.job is not None:
            metadata = {**self.job["metadata"], "annotations": {"headgate.io/paused": paused}}
            self.cluster.put({**self.job, "metadata": metadata})

    def snapshot(self) -> None:
        policy = self.random.choice(("Retain", "Delete"))
        name = f"snapshot-{next(self.uids)}"
        made = {
            "apiVersion": "headgate.io/v1alpha1",
            "kind": "StreamSnapshot",
            "metadata": {"name": name, "namespace": "air"},
            "spec": {"jobRef": {"name": "flights"}, "deletionPolicy": policy},
        }
        self.cluster.put(made)

    def delete(self, kind: str) -> None:
        keys = [key for key in self.cluster.objects if key[0] == kind]
        if keys:
            key = self.random.choice(keys)
            self.cluster.tell(f"user deletes {key[1]}")
            self.cluster.delete(*key)

    def tear_out(self) -> None:
        """Remove the StreamJob with its finalizer, while all its objects are still there."""
        if self.cluster.objects.pop(JOB_KEY, None) is not None:
            self.cluster.tell("user tears out the StreamJob")

    # trouble

    def _trouble(self) -> None:
        self.apply()
        rate = self.random.choice((0.0, 0.05, 0.15))
        self.operators[0].faults = rate
        self.operators[0].lag = self.random.choice((0.0, 0.3, 0.6))
        for _ in range(STEPS):
            self.cluster.now_ms += self.random.choice((200, 1_000, 3_000, 10_000, 30_000))
            self.cluster.work()
            if self.random.random() < 0.8:
                self.operators[0].step()
            if self.random.random() < 0.25:
                self._something()

    def _something(self) -> None:
        cluster = self.cluster
        match self.random.randrange(15):
            case 0 | 1 | 2:
                self.apply()
            case 3:
                cluster.kill_process()
            case 4:
                cluster.lose_pod(cut_off=self.random.random() < 0.5)
            case 5:
                cluster.lose_child()
            case 6:
                self._replace_operator()
            case 7:
                self.annotate(self.random.choice(("true", "false")))
            case 8 | 9:
                self.snapshot()
            case 10:
                self.random.choice((lambda: self.delete("StreamJob"), self.tear_out, self.apply))()
            case 11:
                self.delete("StreamSnapshot")
            case 12:
                for operator in self.operators[1:]:
                    operator.step()
            case 13:
                for operator in self.operators:
                    operator.catch_up()
            case 14:
                cluster.lose_node(cut_off=self.random.random() < 0.5)

    def _replace_operator(self) -> None:
        """Another process leads; the old one may not know it for a while."""
        old = self.operators[0]
        old.deposed = True
        new = Operator(self.cluster, old.faults, old.lag)
        self.operators = [new, *self.operators[: self.random.randrange(2)]]

    # quiet

    def _quiet(self) -> None:
        """Nothing fails any more. The user says once more what he wants."""
        self.annotate("false")
        if self.job is not None and "deletionTimestamp" not in self.job["metadata"]:
            self._say_again()
        operator = self.operators[0] = Operator(self.cluster)
        self.cluster.zombies.clear()
        self.cluster.tell("quiet")
        for step in range(QUIET_STEPS_MAX):
            self.cluster.now_ms += 2_000
            self.cluster.work()
            operator.step()
            rests = all(isinstance(each, Requeue) for each in operator.last_actions)
            if rests and step > 30 and not self.unfinished():
                return
        said = (self.job or {}).get("status", {})
        last = {type(each).__name__ for each in operator.last_actions}
        raise Broken(
            f"no rest: {self.unfinished() or last}, {said.get('phase')}: {said.get('message')}"
        )

    def _say_again(self) -> None:
        assert self.job is not None
        kubernetes = copy.deepcopy(self.job["spec"]["kubernetes"])
        kubernetes.pop("imagge", None)
        kubernetes.pop("savepoints", None)
        kubernetes["deletion"]["timeout"] = "3m"
        if self.random.random() < 0.6:
            kubernetes["image"] = self.random.choice(("good-1", "good-2"))
        if self.random.random() < 0.2:
            kubernetes["state"] = self.random.choice(("Running", "Suspended"))
        self.change(parallelism=self.job["spec"]["parallelism"], kubernetes=kubernetes)

    def unfinished(self) -> str:
        """Return all that is not as the user wants it."""
        job, pods = self.job, self.cluster.pods()
        for (kind, name), each in self.cluster.objects.items():
            used = paths_in_use(convert((job or {}).get("status", {}), StreamJobStatus))
            waits = each.get("status", {}).get("path") in used
            if kind == "StreamSnapshot" and "deletionTimestamp" in each["metadata"] and not waits:
                return f"{name} is still there"
        if job is None:
            # Nobody has a say over pods on a lost node whose StreamJob was torn out.
            left = [pod for pod in pods if pod["metadata"]["uid"] not in self.cluster.lost]
            return "pods without a job" if left else ""
        if "deletionTimestamp" in job["metadata"]:
            return "the job is still there"
        status = job.get("status", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        phase = status.get("phase")
        process = self.cluster.coordinator()
        runs = process is not None and process.state == "RUNNING"
        attempts = status.get("held", {}).get("attempts", 0)
        held = attempts >= HOLD_ATTEMPTS_MAX or (attempts and not runs)
        if job["spec"]["kubernetes"]["state"] == "Suspended" and not held:
            down = phase in ("Suspended",) and not pods
            return "" if down else "it is not suspended"
        if phase in ("Failed", "Suspended"):
            return "pods of a job that is over" if pods else ""
        if held:
            return "" if conditions.get("Stalled") == "True" else "held, and nobody says so"
        parsed = parse_job(job)
        assert isinstance(parsed, Job)
        back = status.get("rejected", {}).get("revision") == parsed.revision
        if job["spec"]["kubernetes"]["image"] == "bad-manifest" and not back:
            return "a run that can never begin is not given up"
        if job["spec"]["kubernetes"]["image"].startswith("bad") and not back:
            return "" if conditions.get("Stalled") == "True" else "bad, and nobody says so"
        if process is not None and process.state == MISSING and conditions["Stalled"] == "True":
            return ""
        return self._not_running(parsed, status, conditions, back)

    def _not_running(
        self, parsed: Job, status: dict[str, Any], conditions: dict[str, str], back: bool
    ) -> str:
        process = self.cluster.coordinator()
        if status.get("phase") != "Running" or conditions.get("Ready") != "True":
            return "it does not run"
        if process is None or process.state != "RUNNING":
            return "there is no coordinator"
        if not back and status["run"]["revision"] != parsed.revision:
            return "another revision runs"
        if process.parallelism != parsed.parallelism and conditions["Stalled"] != "True":
            return "the parallelism is another one"
        return ""


def simulate(seed: int) -> str:
    """Return the promise that is broken with this seed; empty if none is."""
    try:
        Model(seed).run()
    except Broken as broken:
        return str(broken)
    return ""
