"""A subtask with two channels whose barriers overtake, moved by hand."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import headgate as hg
from headgate.connectors import function_sink, numbers
from headgate.errors import InternalError
from headgate.operators.elements import CheckpointBarrier, CheckpointOptions, EndOfData, ObjectBatch
from headgate.runtime.exchange.channel_state import decode
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate, LocalOutputChannel
from headgate.runtime.exchange.settings import ExchangeSettings
from headgate.runtime.task.input_subtask import FRESH_OBJECTS_MAX, InputSubtask
from headgate.state.snapshot import ChannelAddress
from headgate.tests.support.tasks import Reports, planned, task_environment

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


class Bench:
    """The subtask is moved by hand, step by step; nothing runs beside but what it writes."""

    def __init__(self, path, threads):
        self.clock, self.reports, self.seen = Clock(), Reports(), []
        job = hg.Job("barriers")
        stream = job.read(numbers(1), name="numbers").rebalance()
        stream.map(self.see, name="see").write(function_sink(str, guarantee="none"), name="out")
        plan, vertex = planned(job, "see")
        env = task_environment(
            plan,
            vertex,
            path,
            threads,
            clock=self.clock,
            reports=self.reports,
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

    async def run_until_idle(self):
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
        await bench.run_until_idle()
        bench.clock.ms += 250
        bench.send(1, 5, 6)
        await bench.run_until_idle()
        bench.barrier(1, 1, UNALIGNED)
        await bench.run_until_idle()
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
        await bench.run_until_idle()
        assert bench.seen == [5]
        bench.send(0, 6)
        with pytest.raises(InternalError, match="records behind the end of data"):
            await bench.run_until_idle()
        assert bench.seen == [5]

    run(script)


def test_the_rest_of_a_merged_slice_is_in_flight_under_its_channel(run):
    async def script(bench):
        bench.subtask._slices.rows = 5
        bench.send(0, 0, 1, 2)
        bench.send(1, 10, 11, 12, 13)
        await bench.subtask.step()
        assert bench.seen == [0, 1, 2, 10, 11]
        bench.barrier(0, 1, UNALIGNED)
        bench.send(0, 3)
        assert bench.subtask.urgent()
        kept = [
            (channel, [record for batch in decode(data) for record in batch.records])
            for channel, data, _ in bench.subtask._capture.records.encoded()
        ]
        assert kept == [(bench.address(1), [12, 13])]
        bench.barrier(1, 1, UNALIGNED)
        await bench.run_until_idle()
        await bench.timing(1)
        assert bench.seen == [0, 1, 2, 10, 11, 12, 13, 3]

    run(script)


def test_records_of_arrays_are_made_in_slices_and_the_rest_is_in_flight(run):
    """They fit into a core's cache; in a checkpoint they are objects, as all records in flight are."""
    count = FRESH_OBJECTS_MAX + 2

    async def script(bench):
        bench.subtask._slices.rows = 10 * count
        arrays = ObjectBatch.of_numbers((np.arange(count), np.arange(count) / 2))
        wanted = [(n, n / 2) for n in range(count)]
        bench.channels[0].send(arrays)
        bench.channels[1].send(ObjectBatch.of_numbers((np.arange(2), np.arange(2) > 0)))
        await bench.subtask.step()
        assert bench.seen == wanted[:FRESH_OBJECTS_MAX]
        bench.barrier(0, 1, UNALIGNED)
        assert bench.subtask.urgent()
        kept = {
            channel.sender: [record for batch in decode(data) for record in batch.records]
            for channel, data, _ in bench.subtask._capture.records.encoded()
        }
        assert kept == {0: wanted[FRESH_OBJECTS_MAX:], 1: [(0, False), (1, True)]}
        assert type(kept[1][0][1]) is bool
        bench.barrier(1, 1, UNALIGNED)
        await bench.run_until_idle()
        await bench.timing(1)
        assert sorted(bench.seen) == sorted([*wanted, (0, False), (1, True)])
        assert [pair for pair in bench.seen if type(pair[1]) is float] == wanted

    run(script)


def test_records_behind_a_barrier_are_not_merged(run):
    """Records of the other channel in front of its barrier belong to the checkpoint, and are."""

    async def script(bench):
        bench.send(0, 0)
        bench.barrier(0, 1, CheckpointOptions())
        bench.send(0, 1)
        bench.send(1, 10)
        await bench.subtask.step()
        assert bench.seen == [0, 10]
        bench.send(1, 11)
        await bench.subtask.step()  # the barrier
        await bench.subtask.step()
        assert bench.seen == [0, 10, 11]
        assert not await bench.subtask.step()
        bench.barrier(1, 1, CheckpointOptions())
        await bench.run_until_idle()
        assert bench.seen == [0, 10, 11, 1]
        await bench.timing(1)

    run(script)
