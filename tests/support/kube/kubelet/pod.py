"""The life of one pod: volumes, init containers, containers with restarts and probes, status, end."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headgate.tests.support.kube.kubelet import probes, sandbox, spec
from headgate.tests.support.kube.kubelet.network import Network, PodNetwork
from headgate.tests.support.kube.kubelet.volumes import Volumes

Object = dict[str, Any]
MISSING_S = 0.2
"""The interval at which a pod looks again for a Secret, a ConfigMap or a volume that it waits for."""
BACKOFF_S = (0.2, 5.0)
"""The first and the longest pause before a restart (a real kubelet: 10 s and 5 min)."""

WORDS_MAX = 4096
"""Characters of a termination message."""
LOG_WORDS_MAX, LOG_LINES_MAX = 2048, 80
"""Of a log that takes its place."""


@dataclass
class Machine:
    """The services that a pod needs of its node and of the API."""

    directory: Path
    lookup: spec.Lookup
    claim: Callable[[str], Path]
    token: Callable[[Object], Awaitable[str]]
    report: Callable[[Object], Awaitable[None]]
    """Writes the pod's status."""
    remove: Callable[[], Awaitable[None]]
    """Deletes the pod from the API for good."""
    environment: Callable[[], Mapping[str, str]]
    """Variables that name the services of the namespace."""
    hosts: Path
    network: Network
    image: Callable[[str], str | None]
    """The directory with an image's own programs, maybe an empty text; None: it cannot be pulled."""


@dataclass
class Container:
    """The known facts about one container of a pod."""

    spec: Object
    running: sandbox.Running | None = None
    state: Object = field(default_factory=lambda: waiting("ContainerCreating"))
    last: Object = field(default_factory=dict)
    restarts: int = 0
    ready: bool = False
    started: bool = False
    log: Path | None = None
    previous_log: Path | None = None

    @property
    def name(self) -> str:
        name: str = self.spec["name"]
        return name

    def status(self) -> Object:
        """The containerStatus of the API."""
        pid = self.running.pid if self.running else 0
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": "",
            "containerID": f"process://{pid}" if pid else "",
            "state": self.state,
            "lastState": self.last,
            "restartCount": self.restarts,
            "ready": self.ready,
            "started": self.started,
        }


def _last_words(one: Object, box: sandbox.Sandbox, *, failed: bool) -> str:
    """The termination message: the container's own, or the end of its log if that is the policy."""
    said = box.last_words.read_text(errors="replace")[:WORDS_MAX]
    falls_back = one.get("terminationMessagePolicy") == "FallbackToLogsOnError"
    if said or not failed or not falls_back:
        return said
    lines = box.log.read_text(errors="replace").splitlines(keepends=True)
    return "".join(lines[-LOG_LINES_MAX:])[-LOG_WORDS_MAX:]


def waiting(reason: str, message: str = "") -> Object:
    return {"waiting": {"reason": reason, "message": message}}


def now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Pod:
    """One pod that was bound to a node. `run` ends when the pod is deleted and its processes are gone."""

    def __init__(self, pod: Object, machine: Machine) -> None:
        self.pod = pod
        self.ip = ""
        self.machine = machine
        self.init = [Container(c) for c in pod["spec"].get("initContainers", [])]
        self.containers = [Container(c) for c in pod["spec"]["containers"]]
        self.phase = "Pending"
        self.start_time = now()
        self.deleted = asyncio.Event()
        self.gone = False
        self._mounted: dict[str, tuple[Path, bool]] = {}
        self._starts = 0
        self._network: PodNetwork | None = None
        self._conditions: dict[str, tuple[bool, str]] = {}
        self._changes = asyncio.Event()

    def changed(self, pod: Object, gone: bool) -> None:
        """A new version of the pod in the API. `gone`: it was deleted by force, or by somebody else."""
        self.pod = pod
        if gone or pod["metadata"].get("deletionTimestamp"):
            self.gone = self.gone or gone
            self.deleted.set()
        if gone:
            self._kill()

    @property
    def ready(self) -> bool:
        return self.phase == "Running" and all(c.ready for c in self.containers) and not self.gone

    async def run(self) -> None:
        """Live until deleted."""
        self._network = await self.machine.network.plug_in()
        self.ip = self._network.address
        reporter = asyncio.create_task(self._report())
        life = asyncio.create_task(self._live())
        deleted = asyncio.create_task(self.deleted.wait())
        try:
            await asyncio.wait([life, deleted], return_when=asyncio.FIRST_COMPLETED)
            if not self.deleted.is_set():
                life.result()
                await deleted
            await self._terminate(life)
        finally:
            for task in (life, deleted, reporter):
                task.cancel()
            self._kill()
            self._network.close()
            if not self.gone:
                with contextlib.suppress(Exception):
                    await self.machine.report(self.status())
                await self.machine.remove()
            shutil.rmtree(self.machine.directory, ignore_errors=True)

    async def _live(self) -> None:
        await self._mount()
        for container in self.init:
            if not await self._run_to_the_end(container):
                self._end("Failed")
                return
            container.ready = True
        lives = [asyncio.create_task(self._keep_running(c)) for c in self.containers]
        try:
            codes = await asyncio.gather(*lives)
        finally:
            for task in lives:
                task.cancel()
        self._end("Succeeded" if not any(codes) else "Failed")

    def _end(self, phase: str) -> None:
        self.phase = phase
        self._changes.set()

    async def _mount(self) -> None:
        metadata = {**self.pod, "status": {**self.pod.get("status", {}), **self._addresses()}}
        volumes = Volumes(
            self.machine.directory / "volumes",
            metadata,
            self.machine.lookup,
            self.machine.claim,
            self.machine.token,
        )
        while True:
            try:
                self._mounted = await volumes.make()
                return
            except spec.NotReadyError as error:
                self._wait_all("ContainerCreating", str(error))
                await asyncio.sleep(MISSING_S)

    def _wait_all(self, reason: str, message: str) -> None:
        for container in self.init + self.containers:
            container.state = waiting(reason, message)
        self._changes.set()

    async def _run_to_the_end(self, container: Container) -> bool:
        """An init container, again and again until it succeeds unless the pod never restarts."""
        backoff = BACKOFF_S[0]
        while True:
            code = await self._run_once(container)
            if code == 0 or self.pod["spec"].get("restartPolicy") == "Never":
                return code == 0
            backoff = await self._back_off(container, backoff)

    async def _keep_running(self, container: Container) -> int:
        backoff = BACKOFF_S[0]
        while True:
            code = await self._run_once(container)
            policy = self.pod["spec"].get("restartPolicy", "Always")
            if policy == "Never" or (policy == "OnFailure" and code == 0) or self.deleted.is_set():
                return code
            backoff = await self._back_off(container, backoff)

    async def _back_off(self, container: Container, pause: float) -> float:
        container.last = container.state
        container.state = waiting(
            "CrashLoopBackOff", f"back-off {pause} s restarting failed container"
        )
        self._changes.set()
        await asyncio.sleep(pause)
        container.restarts += 1
        return min(pause * 2, BACKOFF_S[1])

    async def _run_once(self, container: Container) -> int:
        box = await self._sandbox(container)
        container.previous_log, container.log = container.log, box.log
        began = now()
        container.running = running = await sandbox.start(box)
        container.state = {"running": {"startedAt": began}}
        container.started = container.ready = False
        if container in self.containers:
            self.phase = "Running"
        self._changes.set()
        watching = asyncio.create_task(self._probe(container, running))
        try:
            code = await running.process.wait()
        finally:
            watching.cancel()
        container.ready = container.started = False
        container.running = None
        code = code if code >= 0 else 128 - code
        ended = {"exitCode": code, "startedAt": began, "finishedAt": now()}
        reason = "Completed" if code == 0 else "Error"
        said = _last_words(container.spec, box, failed=code != 0)
        container.state = {"terminated": {**ended, "reason": reason, "message": said}}
        self._changes.set()
        return code

    async def _sandbox(self, container: Container) -> sandbox.Sandbox:
        """Return the start of the container, once there is its image and what its variables need."""
        while True:
            image = container.spec["image"]
            programs = self.machine.image(image)
            if programs is None:
                reason = "ErrImagePull" if container.restarts == 0 else "ImagePullBackOff"
                container.state = waiting(reason, f'failed to pull image "{image}": not found')
            else:
                try:
                    return self._described(container, programs)
                except spec.NotReadyError as error:
                    container.state = waiting("CreateContainerConfigError", str(error))
            self._changes.set()
            await asyncio.sleep(MISSING_S)

    def _described(self, container: Container, programs: str) -> sandbox.Sandbox:
        one = container.spec
        metadata = {**self.pod, "status": {**self.pod.get("status", {}), **self._addresses()}}
        base = {
            **sandbox.base_environment(programs),
            "HOSTNAME": self._hostname(),
            **self.machine.environment(),
        }
        env = spec.environment(one, metadata, base, self.machine.lookup)
        # An image of headgate has the command as its entry point.
        command = [*one.get("command", ["headgate"]), *one.get("args", [])]
        context = {**self.pod["spec"].get("securityContext", {}), **one.get("securityContext", {})}
        user = context.get("runAsUser", sandbox.USER)
        if user == 0 and context.get("runAsNonRoot"):
            raise spec.NotReadyError("container has runAsNonRoot and the image will run as root")
        group = context.get("fsGroup")
        assert self._network is not None
        self._starts += 1
        return sandbox.Sandbox(
            directory=self.machine.directory / "containers" / f"{container.name}-{self._starts}",
            network=self._network.namespace,
            hostname=self._hostname(),
            command=[spec.expanded(part, env) for part in command],
            env=env,
            mounts=self._mounts(one),
            working_directory=one.get("workingDir", sandbox.HOME),
            user=user,
            group=context.get("runAsGroup", sandbox.USER),
            groups=(group,) if group is not None else (),
            read_only_root=context.get("readOnlyRootFilesystem", False),
            last_words_path=one.get("terminationMessagePath", sandbox.LAST_WORDS),
        )

    def _hostname(self) -> str:
        name: str = self.pod["spec"].get("hostname") or self.pod["metadata"]["name"]
        return name

    def _mounts(self, container: Object) -> list[sandbox.Mount]:
        mounts = [sandbox.Mount(self.machine.hosts, "/etc/hosts", read_only=True)]
        for mount in container.get("volumeMounts", []):
            source, read_only = self._mounted[mount["name"]]
            if mount.get("subPath"):
                source = source / mount["subPath"]
                if not source.exists():
                    source.mkdir(parents=True)
            only = read_only or mount.get("readOnly", False)
            mounts.append(sandbox.Mount(source, mount["mountPath"], only))
        return mounts

    async def _probe(self, container: Container, running: sandbox.Running) -> None:
        """Keep `started` and `ready` true to the probes, and kill a container that is not alive."""

        def started(good: bool) -> None:
            container.started = good
            self._changes.set()

        def ready(good: bool) -> None:
            container.ready = good
            self._changes.set()

        alive = await probes.until_started(container.spec, self._place(), running)
        if not alive:
            await self._stop(container)
            return
        started(True)
        readiness = probes.keep(container.spec, "readinessProbe", self._place(), running, ready)
        liveness = probes.until_dead(container.spec, self._place(), running)
        watching = asyncio.create_task(readiness)
        try:
            await liveness
            await self._stop(container)
        finally:
            watching.cancel()

    def _place(self) -> probes.Place:
        return probes.Place(self.machine.network, self.ip)

    def _grace(self) -> float:
        named = self.pod["metadata"].get("deletionGracePeriodSeconds")
        default: float = self.pod["spec"].get("terminationGracePeriodSeconds", 30)
        return default if named is None else float(named)

    async def _terminate(self, life: asyncio.Task[None]) -> None:
        """SIGTERM, the grace period, SIGKILL. A pod that is gone by force was killed already."""
        await asyncio.gather(*(self._stop(c) for c in self.init + self.containers))
        if any(c.running for c in self.init + self.containers):
            # The tasks that wait for the processes still have to note how they ended.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(life), 60)

    async def _stop(self, container: Container) -> None:
        """Ask a container to stop, and kill it after the grace period, which may be shortened meanwhile."""
        running = container.running
        if running is None:
            return
        hook = container.spec.get("lifecycle", {}).get("preStop")
        clock = asyncio.get_running_loop().time
        began = clock()
        if hook and not self.gone:
            await probes.hook(hook, container.spec, self._place(), running, self._grace())
        running.signal(signal.SIGTERM)
        while running.process.returncode is None and not self.gone:
            if clock() >= began + self._grace():
                break
            await asyncio.sleep(0.02)
        running.signal(signal.SIGKILL)

    def _kill(self) -> None:
        for container in self.init + self.containers:
            if container.running:
                container.running.signal(signal.SIGKILL)

    def _addresses(self) -> Object:
        return {"podIP": self.ip, "podIPs": [{"ip": self.ip}], "hostIP": "127.0.0.1"}

    def status(self) -> Object:
        """The status of the API."""
        ready = self.ready and not self.deleted.is_set()
        initialized = all(c.ready for c in self.init)
        completed = {"reason": "PodCompleted"} if self.phase == "Succeeded" else {}
        conditions = {
            "PodScheduled": (True, {}),
            "Initialized": (initialized, {}),
            "ContainersReady": (ready, completed),
            "Ready": (ready, completed),
        }
        return {
            "phase": self.phase,
            "startTime": self.start_time,
            **self._addresses(),
            "hostIPs": [{"ip": "127.0.0.1"}],
            "conditions": [
                {"type": kind, "status": str(good), **why, **self._since(kind, good)}
                for kind, (good, why) in conditions.items()
            ],
            "initContainerStatuses": [c.status() for c in self.init],
            "containerStatuses": [c.status() for c in self.containers],
        }

    def _since(self, kind: str, good: bool) -> Object:
        """When the condition became what it is."""
        if self._conditions.get(kind, (None, ""))[0] != good:
            self._conditions[kind] = (good, now())
        return {"lastTransitionTime": self._conditions[kind][1]}

    async def _report(self) -> None:
        """Write the status whenever it changed."""
        last: Object = {}
        while True:
            status = self.status()
            if status != last:
                await self.machine.report(status)
                last = status
            await self._changes.wait()
            self._changes.clear()
