"""The costs of a coordinator as its job gets wider: the real one, with workers that only answer.

    python benchmarks/scale/coordinator.py [--workers 5x1 50x1 500x1 625x8]

The coordinator and its log are those of every job; the log is on a local directory. Workers are stand-ins
whose links encode and decode each message, as sockets do: they deploy, acknowledge, and run nothing. The
time that they take is not counted. The job is a source, a shuffle, and an aggregate by key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

import headgate as hg
from headgate.connectors import blackhole
from headgate.connectors.generator import generator, random_int, sequence
from headgate.operators.clock import SystemClock
from headgate.runtime.cluster.launch import InProcessCluster
from headgate.runtime.control.cluster import ControlEndpoint
from headgate.runtime.control.job_client import PublishedEvent
from headgate.runtime.control.link import MemoryLink
from headgate.runtime.control.messages import (
    Cancel,
    Cancelled,
    CheckpointAcked,
    Deploy,
    Deployed,
    Heartbeat,
    Hello,
    Messages,
    Shutdown,
    SubtaskAck,
    SubtaskAssignment,
    TriggerCheckpoint,
    decode,
    encode,
)
from headgate.runtime.coordinator.clients import LocalClient
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.exchange.hub import WorkerAddress
from headgate.runtime.job import runnable
from headgate.runtime.protocol import names
from headgate.runtime.storage.open_store import open_store
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import OperatorSnapshot, StateHandle, state_info

WORKERS = ("5x1", "50x1", "500x1", "625x8")
CHECKPOINTS = 2
DELTAS = 3
"""An aggregate acknowledges a table and this number of deltas, each in a file."""
FILE_BYTES = 5_000_000
KEY_GROUPS = 32_768
STATE = state_info(
    "running",
    "running",
    pa.schema(
        [
            pa.field("key_group", pa.int32()),
            pa.field("k", pa.int64()),
            pa.field("value", pa.int64(), metadata={"aggregate": "sum(n)"}),
        ],
        metadata={"headgate.meaning": '{"aggregate `value`":"sum(n)"}'},
    ),
    ("k",),
)
"""The description of the state of the aggregate."""


@dataclass
class Traffic:
    """The messages of a coordinator by kind, and the time that its workers took."""

    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    workers_s: float = 0.0

    def coded(self, message: Messages) -> Messages:
        """Return the message as its receiver gets it."""
        data, kind = encode(message), type(message).__name__
        self.messages[kind] += 1
        self.bytes[kind] += len(data)
        return decode(data)

    @contextmanager
    def of_workers(self) -> Iterator[None]:
        """Take the time in the block for that of workers."""
        before = time.process_time()
        yield
        self.workers_s += time.process_time() - before


class CodedLink(MemoryLink):
    """The coordinator's end of a link, on which messages are bytes."""

    def __init__(self, link: MemoryLink, traffic: Traffic) -> None:
        self._link = link
        self._traffic = traffic

    def send(self, message: Messages) -> None:
        self._link.send(self._traffic.coded(message))

    async def receive(self) -> Messages | None:
        message = await self._link.receive()
        return None if message is None else self._traffic.coded(message)

    def close(self) -> None:
        self._link.close()


class StandIn:
    """A worker that answers as if its subtasks ran."""

    def __init__(self, worker_id: str, number: int, token: str, traffic: Traffic) -> None:
        self.worker_id = worker_id
        self._link, far = MemoryLink.pair()
        self.far = CodedLink(far, traffic)
        self._number = number
        self._traffic = traffic
        self._subtasks: list[SubtaskAssignment] = []
        running = self._run(self._hello(token))
        self._task = asyncio.get_running_loop().create_task(running, name=worker_id)

    async def died(self) -> str:
        outcome = (await asyncio.gather(self._task, return_exceptions=True))[0]
        return repr(outcome)

    def kill(self, pid: int = 0) -> None:
        self._link.close()
        self._task.cancel()

    def _hello(self, token: str) -> Hello:
        number = self._number
        address = WorkerAddress(
            self.worker_id,
            f"10.{number // 65_536}.{number // 256 % 256}.{number % 256}",
            f"/tmp/headgate-{number * 40_503 % 2**32:08x}/{self.worker_id}.sock",
            20_000 + number * 7_919 % 40_000,
            f"node-{number}/{number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128:032x}",
        )
        return Hello(
            token=token, role="worker", worker_id=self.worker_id, pid=number,
            address=address.encode(),
        )  # fmt: skip

    async def _run(self, hello: Hello) -> None:
        self._link.send(hello)
        while (message := await self._link.receive()) is not None:
            if isinstance(message, Shutdown):
                return
            with self._traffic.of_workers():
                for answer in self._answers(message):
                    self._link.send(answer)

    def _answers(self, message: Messages) -> Iterator[Messages]:
        match message:
            case Heartbeat():
                yield message
            case Deploy(attempt=attempt, subtasks=subtasks):
                self._subtasks = [
                    msgspec.msgpack.decode(each, type=SubtaskAssignment) for each in subtasks
                ]
                yield Deployed(attempt=attempt)
            case Cancel(attempt=attempt, regions=regions):
                yield Cancelled(attempt=attempt, regions=regions)
            case TriggerCheckpoint(attempt=attempt, checkpoint_id=id_):
                acks = tuple(acknowledgement(id_, s.vertex, s.index) for s in self._subtasks)
                yield CheckpointAcked(attempt=attempt, checkpoint_id=id_, subtasks=acks)


class StandIns(InProcessCluster):
    """Starts stand-ins for workers. All of them get the messages for sources."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.started: list[StandIn] = []

    async def start_worker(self, worker_id: str, control: ControlEndpoint, group: str) -> Any:
        worker = StandIn(worker_id, len(self.started), control.token, self.traffic)
        self.started.append(worker)
        control.accept(worker.far)
        return worker

    async def close(self) -> None:
        for worker in self.started:
            worker.kill()
            await worker.died()


def acknowledgement(id_: int, vertex: int, index: int) -> SubtaskAck:
    """Return what a subtask acknowledges: the split of a source, or a table and what changed since."""
    if vertex == 0:
        split = StateHandle(
            state="splits", kind="items", size_bytes=60, checksum=f"{index:016x}", rows=1, inline=bytes(60)
        )  # fmt: skip
        snapshot = OperatorSnapshot(
            operator="read", handles=(split,), states=(state_info("splits", "split"),)
        )
    else:
        handles = tuple(
            changes(index, id_ - back, back == DELTAS) for back in range(DELTAS, -1, -1)
        )
        snapshot = OperatorSnapshot(operator="sums", handles=handles, states=(STATE,))
    return SubtaskAck(
        vertex=vertex, index=index, snapshots=(snapshot,), finished=False, sync_ms=1.5,
        async_ms=12.25, alignment_ms=0.5, written_bytes=FILE_BYTES, held_ms=3.25,
    )  # fmt: skip


def changes(index: int, id_: int, base: bool) -> StateHandle:
    """Return the handle of what one checkpoint wrote of the state of a subtask."""
    digest = f"{((id_ + 9) * 65_537 + index) * 0x9E3779B97F4A7C15 % 2**64:016x}"
    groups = key_group_range(index, KEY_GROUPS, KEY_GROUPS)
    return StateHandle(
        state="running", kind="table" if base else "delta", size_bytes=FILE_BYTES + index,
        checksum=digest, rows=100_000,
        file=names.checkpoint_file(1, 9 + id_, "sums", index, "running", "delta"),
        first_key_group=groups.first, last_key_group=groups.last, keys=("k",),
        footer=(2_048, digest[::-1]),
    )  # fmt: skip


def scale_job(width: int, storage: str) -> hg.Job:
    """Return the job."""
    job = hg.Job("scale", parallelism=width, max_parallelism=KEY_GROUPS)
    job.checkpoint(every="1h", storage=storage)
    read = job.read(generator({"n": sequence(), "k": random_int(0, 9)}), name="read")
    read.key_by("k").agg(value=hg.sum("n"), name="sums").write(blackhole(), name="out")
    return job


@dataclass(frozen=True)
class Figures:
    """The costs of a job for its coordinator: seconds of its processor, messages and bytes."""

    subtasks: int
    deploy_s: float
    deploy_bytes: int
    checkpoint_s: float
    ack_messages: int
    ack_bytes: int
    entry_bytes: int
    longest_turn_s: float
    """The longest time of a checkpoint in which nothing else had the event loop."""
    restart_s: float


class Measured:
    """A job of stand-ins under way."""

    def __init__(self, workers: int, slots: int, directory: str) -> None:
        spec = runnable(scale_job(workers * slots, directory)).spec()
        self.traffic = Traffic()
        self.cluster = StandIns(self.traffic)
        self.coordinator = JobCoordinator(
            replace(spec, slots_per_worker=slots),
            cluster=self.cluster, clock=SystemClock(), open_store=open_store,
        )  # fmt: skip
        self.coordinator.on_event = self._note
        self._directory = Path(directory)
        self._runs, self._stopped = asyncio.Event(), asyncio.Event()

    def _note(self, event: PublishedEvent) -> None:
        if event.kind == "status":
            if json.loads(event.body)["status"] == "RUNNING":
                self._runs.set()
            else:
                self._runs.clear()
                self._stopped.set()

    async def running(self) -> None:
        """Wait until the job runs."""
        await self._runs.wait()

    async def checkpoint(self) -> None:
        """Take a checkpoint."""
        client = LocalClient(self.coordinator.clients, asyncio.get_running_loop())
        await client.request("checkpoint")

    async def restart(self) -> None:
        """Lose a worker, and wait until the job runs again."""
        self._stopped.clear()
        self.cluster.started[0].kill()
        await self._stopped.wait()
        await self.running()

    def entry_bytes(self) -> int:
        """Return the size of the largest entry of the job log."""
        return max(path.stat().st_size for path in self._directory.glob("*/log/*.json"))

    async def longest_turn(self, work: Any) -> float:
        """Return the longest time in which the event loop did nothing else but `work`."""
        longest = 0.0
        working = asyncio.ensure_future(work)
        while not working.done():
            longest = max(longest, await self.cpu_of(asyncio.sleep(0)))
        await working
        return longest

    async def cpu_of(self, work: Any) -> float:
        """Return the seconds of processor time that the coordinator takes for `work`."""
        workers_s, before = self.traffic.workers_s, time.process_time()
        await work
        return time.process_time() - before - (self.traffic.workers_s - workers_s)


async def measure(workers: int, slots: int) -> Figures:
    """Deploy a job, take checkpoints, and lose a worker."""
    with tempfile.TemporaryDirectory(prefix="hg-bench-scale-") as directory:
        job = Measured(workers, slots, directory)
        task = asyncio.get_running_loop().create_task(job.coordinator.run())
        try:
            deploy_s = await job.cpu_of(job.running())
            deploy_bytes = job.traffic.bytes["Deploy"]
            spent = [await job.cpu_of(job.checkpoint()) for _ in range(CHECKPOINTS)]
            return Figures(
                subtasks=2 * workers * slots,
                deploy_s=deploy_s,
                deploy_bytes=deploy_bytes,
                checkpoint_s=min(spent),
                ack_messages=job.traffic.messages["CheckpointAcked"] // CHECKPOINTS,
                ack_bytes=job.traffic.bytes["CheckpointAcked"] // CHECKPOINTS,
                entry_bytes=job.entry_bytes(),
                longest_turn_s=await job.longest_turn(job.checkpoint()),
                restart_s=await job.cpu_of(job.restart()),
            )
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await job.coordinator.close()
            await job.cluster.close()


def main() -> None:
    """Measure each size, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", default=WORKERS, help="numbers of workers x slots")
    for size in parser.parse_args().workers:
        workers, slots = map(int, size.split("x"))
        figures = asyncio.run(measure(workers, slots))
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(figures).items()}
        print(size, *(f"{name}={value:,}" for name, value in shown.items()), flush=True)


if __name__ == "__main__":
    main()
