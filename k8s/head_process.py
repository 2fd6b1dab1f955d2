"""`headgate k8s head`: the head of Ray in a pod, and the coordinator of the job in the same process.

The coordinator is not an actor of Ray here: it has to be in this pod, to which the Service leads, and
Kubernetes starts it again. When the job has ended, the process answers requests until its pod is
deleted. SIGTERM before that takes a checkpoint and leaves the run to the next start of this pod.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from ..errors import JobError, JobNotFound, UsageError
from ..runtime.cli.console import report, say
from ..runtime.cli.progress import Reporter
from ..runtime.cli.run import check_whole, make_reporter
from ..runtime.cluster.process import stem_in
from ..runtime.control.interrupts import Interrupts
from ..runtime.finding import Where, stored_job
from ..runtime.job import runnable
from ..runtime.manifest import load_job
from ..runtime.options.execution import PARALLELISM
from ..runtime.plan import JobSpec
from . import ports
from .gcs_storage import environment, prepare
from .head import (
    CONSOLE,
    HeadRun,
    Logged,
    beginning,
    node_resource_of,
    settings,
    with_place_for_savepoints,
)
from .ray_node import start_head
from .ray_process import RayProcess, address_of, listens
from .spec import Job, parse_job

if TYPE_CHECKING:
    from ..runtime.protocol.job_result import JobOutcome

PROGRESS_EVERY_S: Final = 60.0
LOOK_S: Final = 0.2
HANDED_OVER: Final = "HANDED_OVER"
log = logging.getLogger("headgate.k8s.head")


def described(manifest: Path, run: HeadRun) -> HeadRun:
    """Return `run` with the settings of pods in the manifest of the StreamJob.

    Raises:
        UsageError: the manifest cannot be read, or is wrong.
    """
    try:
        resource = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"manifest cannot be read path=`{manifest}`: {error}") from None
    if not isinstance(resource, dict):
        raise UsageError(f"not a StreamJob path=`{manifest}`")
    job = parse_job(resource)
    if not isinstance(job, Job):
        raise UsageError("\n".join(str(problem) for problem in job), where=str(manifest))
    metadata, kubernetes = resource["metadata"], job.kubernetes
    return replace(
        run,
        name=metadata["name"],
        namespace=metadata["namespace"],
        mode=kubernetes.ray.mode,
        slots={name: group.workers.slots for name, group in job.groups.items()},
    )


async def make_spec(manifest: Path, run: HeadRun) -> tuple[JobSpec, bool]:
    """Return the job for its coordinator, and whether this run had a coordinator before, by the log.

    Raises:
        HeadgateError: the manifest is wrong, or the job log cannot be read.
    """
    options = settings(run) | {PARALLELISM.key: str(run.parallelism)}
    job = runnable(load_job(manifest, options=options))
    check_whole(list(job.problems()))
    checkpoint = job.checkpoint_settings
    logged = Logged()
    if checkpoint is not None:
        where = Where(storage=checkpoint.storage, options=dict(job.options))
        logged = await _logged(run.name, where)
    spec = job.spec(**beginning(run, logged), run_id=run.run_id if checkpoint is not None else None)
    if checkpoint is not None:
        options = with_place_for_savepoints(spec.options, checkpoint.storage)
        spec = replace(spec, options=options)
    # Without checkpoints a run has no id of its own, but the operator has to know which run answers.
    spec = replace(spec, run=run.run_id, group_slots=run.slots)
    if run.mode != "External":
        # Its pods have the resources of the slots. Their nodes only say to which group the slots
        # belong.
        groups = spec.plan.slots_by_group
        spec = replace(
            spec, group_resources={group: node_resource_of(run, group) for group in groups}
        )
    return spec, logged.run == run.run_id


async def _logged(name: str, where: Where) -> Logged:
    try:
        view = (await stored_job(name, where)).view
    except JobNotFound:
        return Logged()
    return Logged(view.run, view.restore_from)


@dataclass(frozen=True, slots=True)
class OwnRay:
    """The node of Ray in this pod.

    Attributes:
        pod_ip: the IP of this pod.
        address: of the Ray cluster that this pod joins; empty: it is the head of a new one.
        gcs_volume: the mount path of the volume for Ray's control store; None: Ray keeps it in memory.
    """

    pod_ip: str
    address: str = ""
    gcs_volume: Path | None = None


async def run(manifest: Path, head: HeadRun, own: OwnRay) -> int:
    """Start Ray and run the job. Returns the exit code.

    Args:
        manifest: path of the StreamJob.
        head: the run.
        own: the node of Ray in this pod.

    Raises:
        HeadgateError: the job could not begin, or a newer coordinator took over.
    """
    reporter = make_reporter(head.name, PROGRESS_EVERY_S)
    with reporter:
        interrupts = Interrupts(reporter.note, checkpoints=True, hands_over=True)
        with interrupts:
            try:
                outcome = await _run(manifest, head, own, reporter, interrupts)
            except asyncio.CancelledError:
                if not interrupts.cancelled:
                    raise
                say("this pod has to end, and the job had not begun")
                return 0
    if outcome.error is not None:
        report(outcome.error)
    return 0


async def _run(
    manifest: Path,
    head: HeadRun,
    own: OwnRay,
    reporter: Reporter,
    interrupts: Interrupts,
) -> JobOutcome:
    spec, takes_over = await make_spec(manifest, head)
    interrupts.checkpoints = spec.checkpoint is not None
    address = await _resolved(own.address) if own.address else ""
    variables = {}
    if own.gcs_volume is not None:
        variables = environment(await prepare(own.gcs_volume, head.run_id))
    ray = await RayProcess.start(start_head(own.pod_ip, address), variables)
    try:
        await _until_up(ray, own.pod_ip)
        # Ray takes a moment to import, and has its settings from the environment.
        from ..runtime.cluster.ray_driver import host_here

        async def stay(outcome: JobOutcome) -> None:
            reporter.note(_last_words(spec, outcome))
            await _stay(interrupts)

        hosting = asyncio.ensure_future(
            host_here(
                spec,
                address or f"{own.pod_ip}:{ports.RAY_GCS.number}",
                console_stem=stem_in(CONSOLE),
                takes_over=takes_over,
                on_event=reporter.event,
                on_listening=interrupts.listening,
                on_connected=interrupts.connected,
                on_ended=stay,
            )
        )
        try:
            await asyncio.wait((hosting, ray.ended), return_when=asyncio.FIRST_COMPLETED)
            if not hosting.done():
                raise _ray_ended(ray)
            return hosting.result()
        finally:
            hosting.cancel()
            await asyncio.gather(hosting, return_exceptions=True)
    finally:
        await ray.stop()


async def _resolved(address: str) -> str:
    """Return `host:port` with the IP of the host.

    Raises:
        JobError: the name is not known (yet).
    """
    host, _, port = address.rpartition(":")
    found = await address_of(host)
    if not found:
        raise JobError(
            f"the host of the Ray cluster is not known address=`{address}`",
            fix="check kubernetes.ray.address; this pod tries again",
        )
    return f"{found}:{port}"


async def _until_up(ray: RayProcess, pod_ip: str) -> None:
    """Wait until Ray's node of this pod takes connections.

    Raises:
        JobError: Ray ended before that.
    """
    while not await listens(pod_ip, ports.RAY_NODE.number):
        await asyncio.wait({ray.ended}, timeout=LOOK_S)
        if ray.ended.done():
            raise _ray_ended(ray)


def _ray_ended(ray: RayProcess) -> JobError:
    return JobError(
        f"Ray has ended by itself in the head's pod: exit code {ray.ended.result()}",
        fix="its output is above; is kubernetes.coordinator.resources large enough?",
    )


def _last_words(spec: JobSpec, outcome: JobOutcome) -> str:
    if outcome.status == HANDED_OVER:
        return f"job {spec.name} is left to the next start of this pod"
    reason = f": {outcome.reason}" if outcome.reason else ""
    return f"job {spec.name} is {outcome.status}{reason}; this pod answers until it is deleted"


async def _stay(interrupts: Interrupts) -> None:
    """Wait for SIGTERM, unless SIGTERM has already ended the job."""
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    try:
        if not interrupts.stopping:
            await leave.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
