"""Goal: a request that is sent again to the coordinator that has taken over is still one operation.

Method: a coordinator dies between accepting an operation and answering it, at a point that the test holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.errors import JobNotReady, UsageError
from headgate.runtime.rest import answers
from headgate.runtime.savepoint import store as savepoints
from headgate.tests.rest.conftest import serving

Publish = Callable[..., Awaitable[None]]
AT_ONCE = {"headgate.rest.close-timeout": "0s"}


class Crash:
    """A job whose coordinator dies while it publishes a savepoint, and its successor."""

    def __init__(self, lab: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab, self.directory, self.monkeypatch = lab, directory, monkeypatch
        self.command = answers.SavepointCommand(trigger_id="nightly", savepoint=str(directory))

    def run(self, job: hg.Job, then: Callable[[Any], Awaitable[None]], *, written: bool) -> None:
        """`then` gets the client of the successor. `written`: the savepoint was complete already."""
        real = savepoints.publish

        async def script(running: Any) -> None:
            reached, over = asyncio.Event(), asyncio.Event()

            async def publish(store: Any, savepoint: Any) -> None:
                if written:
                    await real(store, savepoint)
                reached.set()
                await over.wait()

            await running.until("status", status="RUNNING")
            self.monkeypatch.setattr(savepoints, "publish", publish)
            async with serving(running, **AT_ONCE) as api, api.client() as client:
                run = (await client.job()).run
                await client.begin(self.command)
                await reached.wait()
                self.monkeypatch.setattr(savepoints, "publish", real)
                await running.crash_coordinator()
            await running.until("status", status="RUNNING")
            async with serving(running) as api, api.client() as client:
                assert (await client.job()).run == run
                await then(client)
            over.set()

        self.lab.run(job, script, batches=2)


@pytest.fixture
def crash(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Crash:
    return Crash(lab, tmp_path / "savepoints", monkeypatch)


def complete(directory: Path) -> list[str]:
    return [str(path.parent) for path in directory.glob("*/_metadata")]


def test_a_savepoint_that_was_complete_is_the_same_one(
    crash: Crash, make_job: Callable[[], hg.Job]
) -> None:
    async def then(client: Any) -> None:
        (taken,) = complete(crash.directory)
        with pytest.raises(UsageError, match="send the request again, with the same triggerId"):
            await client.operation("nightly")
        done = await client.carry_out(crash.command)
        assert done["savepoint"] == taken
        assert done["size_bytes"] > 0
        assert complete(crash.directory) == [taken]
        assert (await client.operation("nightly")).status == "COMPLETED"
        # With another id it is another one.
        other = answers.SavepointCommand(trigger_id="other", savepoint=str(crash.directory))
        assert (await client.carry_out(other))["savepoint"] != taken

    crash.run(make_job(), then, written=True)


def test_a_savepoint_that_was_not_complete_is_taken(
    crash: Crash, make_job: Callable[[], hg.Job]
) -> None:
    async def then(client: Any) -> None:
        (left,) = crash.directory.iterdir()
        done = await client.carry_out(crash.command)
        assert complete(crash.directory) == [done["savepoint"]]
        # Workers of before may still write into the directory of before.
        assert done["savepoint"] != str(left)

    crash.run(make_job(), then, written=False)


def test_a_rescale_that_was_done_is_done(lab: Any, make_job: Callable[[], hg.Job]) -> None:
    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        command = answers.RescaleCommand(trigger_id="less", parallelism=1)
        async with serving(running) as api, api.client() as client:
            await client.carry_out(command)
            await running.crash_coordinator()
        async with serving(running) as api, api.client() as client:
            done: dict[str, Any] = {}
            while not done:
                try:
                    done = await client.carry_out(command)
                except JobNotReady:  # which does not use up the id
                    await running.tick()
            assert done["parallelism"] == 1
            assert (await client.job()).parallelism == 1

    lab.run(make_job(), script, batches=2)


def test_a_savepoint_whose_operation_was_forgotten_is_the_same_one(
    lab: Any, make_job: Callable[[], hg.Job], tmp_path: Path
) -> None:
    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        command = answers.SavepointCommand(trigger_id="nightly", savepoint=str(tmp_path))
        one = {"headgate.rest.operations": "1"}
        async with serving(running, **one) as api, api.client() as client:
            taken = await client.carry_out(command)
            await client.carry_out(answers.CheckpointCommand(trigger_id="more"))
            assert await client.carry_out(command) == taken
            assert complete(tmp_path) == [taken["savepoint"]]

    lab.run(make_job(), script, batches=2)


def test_a_client_that_waits_asks_the_successor_again(
    lab: Any, make_job: Callable[[], hg.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        async with serving(running) as api, api.client() as client:
            begin, operation = client.begin, client.operation
            begun = 0

            async def count(command: Any) -> Any:
                nonlocal begun
                begun += 1
                return await begin(command)

            async def forgotten(trigger_id: str, **more: Any) -> Any:
                # Answers of a successor that does not know the operation.
                return await operation("unknown" if begun == 1 else trigger_id, **more)

            monkeypatch.setattr(client, "begin", count)
            monkeypatch.setattr(client, "operation", forgotten)
            done = await client.carry_out(answers.CheckpointCommand(trigger_id="c"))
            assert (begun, done["checkpoint"]) == (2, 1)

    lab.run(make_job(), script, batches=2)
