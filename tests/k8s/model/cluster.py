"""A Kubernetes as the model has it: an API server, controllers, a kubelet, and pods that are killed."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from headgate.k8s.actions import Observed
from headgate.k8s.context import POD_MAKERS
from headgate.k8s.objects import GROUP, JOB, ROLE, RUN
from headgate.k8s.pods import GRACE_S
from headgate.k8s.snapshots import restored_snapshot
from headgate.k8s.status import rfc3339, since_1970_ms

from .job import Broken, Process, Storage

Key: TypeAlias = tuple[str, str]


class Conflict(Exception):
    """409: exists already, or is another one than was seen."""


@dataclass
class Cluster:
    """The truth. Objects are replaced, never changed: a copy of the dict is a view of one moment."""

    random: random.Random
    now_ms: int = 1_700_000_000_000
    objects: dict[Key, dict[str, Any]] = field(default_factory=dict)
    storage: Storage = field(default_factory=Storage)
    processes: dict[str, Process] = field(default_factory=dict)
    """By uid of the pod."""
    zombies: list[Process] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    """Uids of pods on nodes that do not answer."""
    allowed: set[str] = field(default_factory=set)
    """The starts of runs that the user allowed: `nothing`, or paths."""
    trace: list[str] = field(default_factory=list)
    _versions: Any = field(default_factory=lambda: itertools.count(1))
    _seen_by_controllers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def tell(self, text: str) -> None:
        self.trace.append(f"{(self.now_ms - 1_700_000_000_000) / 1000:8.1f} {text}")

    # the API server

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        return self.objects.get((kind, name))

    def put(self, made: dict[str, Any], *, spec_changed: bool = False) -> dict[str, Any]:
        """Store an object as a new version of it."""
        made = copy.deepcopy(made)
        metadata = made["metadata"]
        metadata.setdefault("uid", f"uid{next(self._versions)}")
        metadata.setdefault("generation", 1)
        metadata["generation"] += spec_changed
        metadata["resourceVersion"] = str(next(self._versions))
        self.objects[made["kind"], metadata["name"]] = made
        return made

    def create(self, made: dict[str, Any]) -> None:
        if (made["kind"], made["metadata"]["name"]) in self.objects:
            raise Conflict
        if made["kind"] in POD_MAKERS:
            self._check_alone(made["metadata"]["annotations"][RUN], made["kind"])
        self.tell(f"created {made['kind']} {made['metadata']['name']}")
        self.put(made)

    def change(self, kind: str, name: str, version: str | None, **spec: Any) -> None:
        """Change fields of `spec`, if the object still has this version."""
        found = self.get(kind, name)
        if found is None or (
            version is not None and found["metadata"]["resourceVersion"] != version
        ):
            raise Conflict
        if found["spec"] | spec != found["spec"]:
            self.tell(f"{kind} {name}: {spec}"[:150])
            self.put({**found, "spec": found["spec"] | spec}, spec_changed=True)

    def delete(self, kind: str, name: str, uid: str | None = None) -> None:
        """Delete an object; one with finalizers, and a pod, gets a time of deletion first."""
        found = self.get(kind, name)
        if found is None or (uid is not None and found["metadata"]["uid"] != uid):
            raise Conflict
        metadata = found["metadata"]
        if metadata.get("finalizers") or kind == "Pod":
            if "deletionTimestamp" not in metadata:
                until = rfc3339(self.now_ms + 1000 * GRACE_S * (kind == "Pod"))
                self.put({**found, "metadata": {**metadata, "deletionTimestamp": until}})
        else:
            self.tell(f"{kind} {name} is gone")
            del self.objects[kind, name]

    def force(self, name: str, uid: str) -> None:
        """Let a pod go. Its process, if there is one, lives on."""
        found = self.get("Pod", name)
        if found is None or found["metadata"]["uid"] != uid:
            raise Conflict
        until_ms = since_1970_ms(found["metadata"].get("deletionTimestamp", ""))
        if not 0 < until_ms < self.now_ms:
            raise Broken(f"the pod {name} is let go before its time to end is over")
        self.tell(f"Pod {name} is let go")
        process = self.processes.pop(uid, None)
        if process is not None:
            self.zombies.append(process)
        del self.objects["Pod", name]

    def pods(self) -> list[dict[str, Any]]:
        return [each for (kind, _), each in self.objects.items() if kind == "Pod"]

    def _check_alone(self, run_id: str, what: str) -> None:
        """No pod of another run may be left when something of this run is made."""
        others = {
            pod["metadata"]["name"]
            for pod in self.pods()
            if pod["metadata"]["labels"][RUN] != run_id
        }
        if others:
            raise Broken(f"{what} of {run_id} is made while there are {sorted(others)}")

    # what works in a cluster

    def work(self) -> None:
        """One round of everything but the operator; each part may be slow."""
        parts = (
            *(self._controllers, self._kuberay, self._kubelet),
            *(self._collect_garbage, self._jobs),
        )
        for part in parts:
            if self.random.random() < 0.8:
                part()

    def _controllers(self) -> None:
        """StatefulSets and Deployments; a controller may see an older version of its object."""
        for (kind, name), truth in list(self.objects.items()):
            if kind not in ("StatefulSet", "Deployment"):
                continue
            uid = truth["metadata"]["uid"]
            seen = truth
            if self.random.random() < 0.3:
                seen = self._seen_by_controllers.get(uid, truth)
            self._seen_by_controllers[uid] = seen
            own = [pod for pod in self.pods() if _owner(pod) == uid]
            living = [pod for pod in own if "deletionTimestamp" not in pod["metadata"]]
            replicas = seen["spec"]["replicas"]
            for pod in living[replicas:]:
                self.delete("Pod", pod["metadata"]["name"])
            for _ in range(replicas - (len(own) if kind == "StatefulSet" else len(living))):
                self._make_pod(kind, name, uid, seen)
            count = sum(_owner(pod) == uid for pod in self.pods())
            status = {"replicas": count, "observedGeneration": seen["metadata"]["generation"]}
            if truth.get("status") != status:
                self.put({**truth, "status": status})

    def _kuberay(self) -> None:
        """The head and the workers of RayClusters."""
        for (kind, name), cluster in list(self.objects.items()):
            if kind != "RayCluster":
                continue
            uid, spec = cluster["metadata"]["uid"], cluster["spec"]
            groups = [(each, each["replicas"]) for each in spec["workerGroupSpecs"]]
            for part, replicas in ((spec["headGroupSpec"], 1), *groups):
                labels = part["template"]["metadata"]["labels"]
                own = [
                    pod
                    for pod in self.pods()
                    if _owner(pod) == uid and pod["metadata"]["labels"] == labels
                ]
                living = [pod for pod in own if "deletionTimestamp" not in pod["metadata"]]
                for pod in living[replicas:]:
                    self.delete("Pod", pod["metadata"]["name"])
                for _ in range(replicas - len(living)):
                    self._make_pod(kind, name, uid, {"spec": part})

    def _make_pod(self, kind: str, owner: str, uid: str, seen: dict[str, Any]) -> None:
        name = f"{owner}-0" if kind == "StatefulSet" else f"{owner}-{next(self._versions)}"
        if ("Pod", name) in self.objects:
            return
        template = copy.deepcopy(seen["spec"]["template"])
        self._check_alone(template["metadata"]["labels"][RUN], "a pod")
        template["metadata"] |= {"name": name, "ownerReferences": [{"uid": uid}]}
        made = {"kind": "Pod", **template, "status": {"phase": "Pending"}}
        self.put({**made, "born_ms": self.now_ms})

    def _kubelet(self) -> None:
        for pod in self.pods():
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            if uid in self.lost:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                if self.random.random() < 0.5:
                    del self.objects["Pod", name]
                    self.processes.pop(uid, None)
                continue
            image = pod["spec"]["containers"][0]["image"]
            if pod["status"]["phase"] == "Pending" and self.random.random() < 0.5:
                if image == "bad-pull":
                    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
                    status = {
                        "phase": "Pending",
                        "containerStatuses": [{"state": {"waiting": waiting}}],
                    }
                elif image == "bad-manifest" and _role(pod) == "head":
                    status = _refused()
                else:
                    ready = [{"type": "Ready", "status": "True"}]
                    status = {"phase": "Running", "conditions": ready}
                if status != pod["status"]:
                    self.put({**pod, "status": status})
            elif pod["status"]["phase"] == "Running" and uid not in self.processes:
                self._start_process(pod)

    def _start_process(self, pod: dict[str, Any]) -> None:
        if _role(pod) != "head":
            return
        container = pod["spec"]["containers"][0]
        command = container["command"]
        said = dict(itertools.pairwise(command))
        process = Process(
            self.storage,
            said["--run-id"],
            int(said["--parallelism"]),
            container["image"] == "bad-crash",
            self.now_ms,
        )
        self.processes[pod["metadata"]["uid"]] = process
        process.start(said["--start"], said.get("--path", ""), frozenset(self.allowed))
        self.tell(f"coordinator of {process.run_id} at {process.position}: {process.state}")

    def _collect_garbage(self) -> None:
        uids = {each["metadata"]["uid"] for each in self.objects.values()}
        for (kind, name), each in list(self.objects.items()):
            owners = each["metadata"].get("ownerReferences", ())
            if owners and not any(owner["uid"] in uids for owner in owners):
                self.delete(kind, name)

    def _jobs(self) -> None:
        workers = self._slots()
        for process in (*self.processes.values(), *self.zombies):
            before = process.state
            process.tick(self.now_ms, self.random, workers)
            if process.state != before:
                self.tell(f"job of {process.run_id}: {process.state}")
        for key in [key for key in self.objects if key[0] == "Job"]:
            job = self.objects[key]
            if not job.get("status") and self.random.random() < 0.5:
                self._clean(job)

    def _slots(self) -> int:
        """The slots that each slot sharing group of the job has at least."""
        pods = [pod for pod in self.pods() if pod["metadata"]["uid"] not in self.lost]
        job = self.get("StreamJob", "flights")
        groups = ("default", "gpu") if job is not None and "resources" in job["spec"] else (None,)
        return min(
            sum(_slots(pod) for pod in pods if pod["metadata"]["labels"].get(GROUP) == group)
            for group in groups
        )

    def _clean(self, job: dict[str, Any]) -> None:
        command = job["spec"]["template"]["spec"]["containers"][0]["command"]
        self.tell(f"cleaning: {' '.join(command[1:])}")
        if command[1] == "savepoint":
            self.storage.savepoints.pop(command[-1], None)
        elif self.storage.claims and self.storage.claims[-1][0].startswith(f"{command[-1]}-"):
            self.storage.position, self.storage.checkpoints = 0, 0
            self.storage.claims.clear()
        self.put({**job, "status": {"succeeded": 1}})

    # what goes wrong

    def kill_process(self) -> None:
        """The container of the head dies; the kubelet starts it again."""
        for uid in list(self.processes):
            del self.processes[uid]

    def lose_pod(self, *, cut_off: bool) -> None:
        """A pod is gone at once; if its node is only cut off, its process lives on."""
        pods = self.pods()
        if not pods:
            return
        pod = self.random.choice(pods)
        process = self.processes.pop(pod["metadata"]["uid"], None)
        if cut_off and process is not None:
            self.zombies.append(process)
        self.tell(f"lost {pod['metadata']['name']}{' (cut off)' if cut_off else ''}")
        del self.objects["Pod", pod["metadata"]["name"]]

    def lose_node(self, *, cut_off: bool) -> None:
        """The node of a pod does not answer any more: Kubernetes deletes the pod, which never ends."""
        pods = [pod for pod in self.pods() if pod["metadata"]["uid"] not in self.lost]
        if not pods:
            return
        metadata = self.random.choice(pods)["metadata"]
        process = self.processes.pop(metadata["uid"], None)
        if cut_off and process is not None:
            self.zombies.append(process)
        self.tell(f"lost the node of {metadata['name']}{' (cut off)' if cut_off else ''}")
        self.lost.add(metadata["uid"])
        self.delete("Pod", metadata["name"])

    def lose_child(self) -> None:
        """Somebody deletes an object of the job."""
        kinds = ("Service", "NetworkPolicy", "Secret", "ConfigMap", "StatefulSet", "Deployment")
        children = [key for key in self.objects if key[0] in kinds]
        if children:
            self.delete(*self.random.choice(children))

    def view(self) -> Observed:
        """Return the objects that an informer has if it is up to date."""
        children = {
            key: each
            for key, each in self.objects.items()
            if key[0] not in ("StreamJob", "StreamSnapshot", "Pod")
            and JOB in each["metadata"]["labels"]
        }
        snapshots = [each for (kind, _), each in self.objects.items() if kind == "StreamSnapshot"]
        job = self.get("StreamJob", "flights")
        wanted = restored_snapshot(job) if job is not None else ""
        restored = self.get("StreamSnapshot", wanted)
        return Observed(children, tuple(self.pods()), tuple(snapshots), restored)

    def coordinator(self) -> Process | None:
        """Return the process that answers at the Service of the head."""
        for pod in self.pods():
            process = self.processes.get(pod["metadata"]["uid"])
            if process is not None:
                return process
        return None


def _refused() -> dict[str, Any]:
    """The status of a head that ends with exit code 2, again and again."""
    ended = {"exitCode": 2, "reason": "Error", "message": "the variable FARE is not set"}
    container = {
        "name": "headgate",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ended},
    }
    return {"phase": "Pending", "containerStatuses": [container]}


def _slots(pod: dict[str, Any]) -> int:
    """The slots that a pod gives to its job."""
    if _role(pod) != "worker" or pod["status"]["phase"] != "Running":
        return 0
    return int(pod["spec"]["containers"][0]["command"][-1])


def _role(pod: dict[str, Any]) -> str | None:
    """None: the head of a RayCluster, in which there is no coordinator."""
    role: str | None = pod["metadata"]["labels"].get(ROLE)
    return role


def _owner(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["ownerReferences"][0]["uid"])
