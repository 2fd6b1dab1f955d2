"""State that a worker keeps on its own machine and in memory (runtime/worker)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from headgate.errors import StorageError, UserCodeError
from headgate.operators.base import Operator
from headgate.runtime.options.registry import Options
from headgate.runtime.protocol.debloating import DebloatSettings
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.storage.open_store import SharedStores
from headgate.runtime.task.chain import ChainedOperator, ChainOutput, OperatorChain, call_and_wait
from headgate.runtime.task.environment import task_settings
from headgate.runtime.worker.local_directories import LocalDirectories, local_dirs
from headgate.runtime.worker.reports import REPORT_S, RestoreMeter
from headgate.tests.support.clocks import MovedClock


def files_below(path):
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())


def test_each_subtask_has_its_own_directory_and_all_go_in_the_end(tmp_path):
    directories = LocalDirectories([tmp_path / "a", tmp_path / "b"], "worker 1")
    first, second = directories.subtask(7, 0, 0), directories.subtask(7, 0, 1)
    assert not first.path.exists(), "made on first use"
    (first.of_operator("count") / "state").write_text("x")
    first.temporary_file().write_text("x")
    assert first.temporary_file() != first.temporary_file()
    (second.of_operator("count") / "state").write_text("y")
    assert tmp_path / "a" in first.path.parents, "spread over the disks"
    assert tmp_path / "b" in second.path.parents
    assert first.of_operator("a b") != first.of_operator("a-b")
    first.delete()
    assert not first.path.exists()
    assert (second.of_operator("count") / "state").exists()
    directories.close()
    assert [name for name in files_below(tmp_path) if not name.endswith("/lock")] == []


HOLDER = """
import sys
from pathlib import Path
from headgate.runtime.worker.local_directories import LocalDirectories
held = LocalDirectories([Path(sys.argv[1])], "doomed")
(held.subtask(1, 0, 0).of_operator("count") / "leftover").write_text("x")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_new_worker_sweeps_up_after_dead_ones_and_leaves_the_living_alone(tmp_path):
    living = LocalDirectories([tmp_path], "living")
    (living.subtask(1, 0, 0).of_operator("count") / "kept").write_text("x")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    LocalDirectories([tmp_path], "third").close()
    assert any(name.endswith("leftover") for name in files_below(tmp_path)), "it still lives"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert any(name.endswith("leftover") for name in files_below(tmp_path))
    newcomer = LocalDirectories([tmp_path], "newcomer")
    assert not any(name.endswith("leftover") for name in files_below(tmp_path))
    assert any(name.endswith("kept") for name in files_below(tmp_path))
    newcomer.close()
    living.close()


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file") as refused:
        LocalDirectories([tmp_path, tmp_path / "file"], "worker")
    assert "io.tmp.dirs" in str(refused.value)
    assert not list(tmp_path.rglob("worker-*"))


def test_options_reach_the_rooms_that_obey_them(tmp_path):
    options = Options(
        {
            "io.tmp.dirs": f"{tmp_path}/a, {tmp_path}/b,",
            "state.storage.fs.memory-threshold": "1 kb",
            "headgate.checkpoint.delta-chain-max": "3",
        }
    )
    assert local_dirs(options) == (tmp_path / "a", tmp_path / "b")
    assert len(local_dirs(Options())) == 1
    settings = task_settings(options)
    assert (settings.inline_bytes_max, settings.delta_chain_max) == (1024, 3)
    assert settings.debloat is None


def test_options_of_debloating_reach_the_task():
    key = "taskmanager.network.memory.buffer-debloat"
    plain = task_settings(Options({f"{key}.enabled": "true"})).debloat
    assert plain == DebloatSettings(
        size_max=1 << 20,
        size_min=256,
        target_ms=1000,
        period_ms=200,
        samples=20,
        threshold_percentages=25,
    )
    options = {
        f"{key}.enabled": "true",
        f"{key}.target": "2 s",
        f"{key}.period": "500 ms",
        f"{key}.samples": "7",
        f"{key}.threshold-percentages": "10",
        "taskmanager.memory.min-segment-size": "1 kb",
        "headgate.buffer.max-size": "64 kb",
    }
    assert task_settings(Options(options)).debloat == DebloatSettings(
        size_max=65_536,
        size_min=1024,
        target_ms=2000,
        period_ms=500,
        samples=7,
        threshold_percentages=10,
    )


class CountingStore(MemoryStore):
    def __init__(self, log, address):
        super().__init__(address, {})
        self.log = log

    async def open(self, *, writable=True):
        self.log.append(("open", writable))
        await asyncio.sleep(0)

    async def close(self):
        self.log.append(("close",))


def test_a_savepoints_store_is_open_while_anybody_uses_it():
    async def main():
        log = []
        stores = SharedStores(lambda address, options: CountingStore(log, address), {})
        leave = asyncio.Event()

        async def use():
            async with stores.at("memory://s") as store:
                await leave.wait()
                return store

        users = [asyncio.ensure_future(use()) for _ in range(3)]
        async with stores.at("memory://s"):
            assert log == [("open", True)]
        assert log == [("open", True)]
        leave.set()
        assert len(set(await asyncio.gather(*users))) == 1
        assert log == [("open", True), ("close",)]
        async with stores.at("memory://s", writable=False):
            assert log[2:] == [("open", False)]

    asyncio.run(main())


def test_progress_is_reported_now_and_then_and_at_the_end():
    clock, reports = MovedClock(), []
    meter = RestoreMeter(1000, clock, lambda done, total: reports.append((done, total)))
    for _ in range(99):
        meter.advance(10)
        clock.now_s += REPORT_S / 10
    meter.advance(10)
    assert reports[0] == (10, 1000)
    assert reports[-1] == (1000, 1000)
    assert 10 <= len(reports) <= 12


class Slow(Operator):
    """Its `finish` goes on in the background."""

    def __init__(self, name, log, error=None):
        self.name, self.log, self.error = name, log, error

    def finish(self):
        self.log.append(f"{self.name} begins")

        async def rest():
            await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            self.log.append(f"{self.name} ends")

        return rest()


def chained(operator):
    return ChainedOperator(0, operator.name, operator, ChainOutput(operator.name))


def test_what_finish_returns_is_awaited_before_the_next_operator_finishes():
    log = []
    chain = OperatorChain([chained(Slow("a", log)), chained(Slow("b", log))], [])
    asyncio.run(chain.finish())
    assert log == ["a begins", "a ends", "b begins", "b ends"]


def test_an_error_in_what_was_awaited_names_the_operator():
    async def main():
        operator = chained(Slow("count", [], ValueError("too late")))
        with pytest.raises(UserCodeError, match=r"operator `count` failed: ValueError: too late"):
            await call_and_wait(operator, operator.operator.finish)

    asyncio.run(main())


def test_a_cancelled_call_is_waited_for():
    """Else the next attempt would begin while a thread of the last one still writes."""

    async def main():
        log, begun, go_on = [], asyncio.Event(), asyncio.Event()

        async def rest():
            begun.set()
            await go_on.wait()
            log.append("ended")

        operator = chained(Slow("count", []))
        call = asyncio.ensure_future(call_and_wait(operator, rest))
        await begun.wait()
        call.cancel()
        await asyncio.sleep(0)
        assert not call.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert log == ["ended"]

    asyncio.run(main())
