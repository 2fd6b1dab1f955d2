"""A subtask with two channels whose barriers overtake, moved by hand."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import headgate as hg
from headgate.connectors import function_sink, numbers
from headgate.errors import InternalError
from headgate.operators.elements import CheckpointBarrier, CheckpointOptions, EndOfData, ObjectBatch
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate
from headgate.runtime.exchange.hub import LocalOutputChannel
from headgate.runtime.exchange.settings import ExchangeSettings
from headgate.runtime.job import runnable
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.task.environment import TaskEnvironment, TaskSettings
from headgate.runtime.task.input_subtask import InputSubtask
from headgate.runtime.task.local_files import SubtaskDirectory
from headgate.state.snapshot import ChannelAddress

UNALIGNED = CheckpointOptions(unaligned=True)
RECORD_BYTES = 64
"""What a small record counts as."""


class Clock:
    def __init__(self):
        self.ms = 100_000

    def monotonic(self):
        return self.ms / 1000

    def now_ms(self):
        return self.ms


class Reports:
    def __init__(self):
        self.acks, self.declines = {}, {}

    def acked(self, checkpoint_id, snapshots, timing):
        self.acks[checkpoint_id] = (list(snapshots), timing)

    def declined(self, checkpoint_id, reason, text):
        self.declines[checkpoint_id] = reason


def metrics(*_):
    return SimpleNamespace(
        counter=lambda name: SimpleNamespace(inc=lambda amount=1: None),
        gauge=lambda name, read: None,
        histogram=lambda name: SimpleNamespace(observe=lambda value: None),
    )


class Bench:
    """The subtask is moved by hand, step by step; nothing runs beside but what it writes."""

    def __init__(self, path, threads):
        self.clock, self.reports, self.seen = Clock(), Reports(), []
        job = hg.Job("barriers")
        stream = job.read(numbers(1), name="numbers").rebalance()
        stream.map(self.see, name="see").write(function_sink(str, guarantee="none"), name="out")
        plan = runnable(job).spec().replan(1, 4)
        (vertex,) = [vertex for vertex in plan.vertices if vertex.head.name == "see"]
        env = TaskEnvironment(
            plan=plan,
            vertex=vertex,
            index=0,
            generation=1,
            attempt=1,
            restored_checkpoint=0,
            options={},
            settings=TaskSettings(),
            clock=self.clock,
            store=MemoryStore("barriers", {}),
            store_at=None,
            io_threads=threads,
            transfers=asyncio.Semaphore(1),
            directory=SubtaskDirectory(path),
            reports=self.reports,
            metrics_of=metrics,
            overtaking=True,
        )
        settings = ExchangeSettings(exclusive_buffers=8)
        specs = [InputChannelSpec(i, 0, self.address(i)) for i in range(2)]
        gate = InputGate(specs, settings, overtaking=True)
        self.channels = [LocalOutputChannel(i, settings) for i in range(2)]
        for channel in self.channels:
            channel.bind(gate)
        self.subtask = InputSubtask(env, {}, gate)

    def see(self, record):
        self.seen.append(record)
        return record

    @staticmethod
    def address(sender):
        return ChannelAddress(
            source="numbers", side="", target="see", input_index=0, sender=sender, receiver=0
        )

    def send(self, channel, *records):
        self.channels[channel].send(ObjectBatch(list(records)))

    def barrier(self, channel, checkpoint_id, options):
        self.channels[channel].send_control(
            CheckpointBarrier(checkpoint_id, self.clock.ms, options)
        )

    async def go_on(self):
        """Do all there is to do."""
        subtask = self.subtask
        while True:
            if subtask.queued_mails:
                await subtask._run_mail()
            elif not subtask.urgent() and not await subtask.step():
                return

    async def timing(self, checkpoint_id):
        await self.subtask.snapshots.drain()
        return self.reports.acks[checkpoint_id][1]


@pytest.fixture
def run(tmp_path):
    def run(script):
        async def main():
            with ThreadPoolExecutor(1) as threads:
                bench = Bench(tmp_path, threads)
                await bench.subtask.prepare(None, finished=False)
                try:
                    await script(bench)
                finally:
                    await bench.subtask.cancel()

        asyncio.run(main())

    return run


def test_the_alignment_of_an_unaligned_checkpoint_ends_with_its_last_barrier(run):
    async def script(bench):
        bench.barrier(0, 1, UNALIGNED)
        await bench.go_on()
        bench.clock.ms += 250
        bench.send(1, 5, 6)
        await bench.go_on()
        bench.barrier(1, 1, UNALIGNED)
        await bench.go_on()
        timing = await bench.timing(1)
        assert timing.alignment_ms == 250
        assert timing.processed_bytes == 2 * RECORD_BYTES
        assert bench.subtask.snapshots.alignment_ms == 250

    run(script)


def test_records_behind_the_end_of_data_are_refused(run):
    """Of the same channel: that of another is open yet."""

    async def script(bench):
        bench.channels[0].send_control(EndOfData())
        bench.send(1, 5)
        await bench.go_on()
        assert bench.seen == [5]
        bench.send(0, 6)
        with pytest.raises(InternalError, match="records behind the end of data"):
            await bench.go_on()
        assert bench.seen == [5]

    run(script)
