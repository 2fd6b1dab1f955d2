"""The shell around the checkpoint protocol: what reaches the log, what is kept, what is told."""

from __future__ import annotations

import asyncio
from typing import Any

from headgate.errors import StorageError


async def let_all_run() -> None:
    """Until nothing but held calls is left to do in the background."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_only_the_last_checkpoint_before_a_rescale_says_the_new_parallelism(driven: Any) -> None:
    """An older one, complete before it, is restored at the old parallelism if the last one fails."""

    async def main() -> None:
        job = driven()
        driver = await job.begin()
        driver.request("one")
        driver.request("rescale", stop=True, next_parallelism=8)
        await job.complete(1)
        assert job.log.view.parallelism == 1
        await job.complete(2)
        assert job.log.view.parallelism == 8
        await driver.close()

    asyncio.run(main())


def test_a_request_that_comes_too_late_does_not_undo_a_rescale(driven: Any) -> None:
    async def main() -> None:
        job = driven()
        driver = await job.begin()
        driver.request("rescale", stop=True, next_parallelism=8)
        assert driver.request("more").refused
        await job.complete(1)
        assert job.log.view.parallelism == 8
        assert not job.log.view.newest.is_final
        await driver.close()

    asyncio.run(main())


def test_a_trim_that_takes_long_deletes_nothing_that_a_later_checkpoint_builds_on(
    driven: Any,
) -> None:
    files = {id_: f"chk/1-{id_}/count-0-s-0.parquet" for id_ in range(1, 5)}

    async def main() -> None:
        job = driven()
        driver = await job.begin()
        for file in files.values():
            await job.store.write_file(file, b"x")
        driver.request("one")
        await job.complete(1, files[1])
        driver.request("two")
        job.store.hold("delete_files")
        await job.complete(2, files[2])  # the trim behind it waits for the store
        driver.request("three")
        await job.complete(3, files[3])  # this one for the trim before
        driver.request("four")
        driver.request("stop", stop=True)
        assert [message.options.base for message in job.triggered[3:]] == [3, 3]
        await job.complete(4, files[4])
        job.store.gates["delete_files"].set()
        await let_all_run()
        assert files[3] in job.store._objects, "the last checkpoint builds on it"
        await job.complete(5, files[3])
        await driver.close()
        assert files[3] in job.store._objects
        assert files[4] not in job.store._objects

    asyncio.run(main())


def test_what_piles_up_behind_a_slow_store_is_deleted_at_once(driven: Any) -> None:
    """Not by one trim for each checkpoint that completed meanwhile."""
    files = {id_: f"chk/1-{id_}/count-0-s-0.parquet" for id_ in range(1, 21)}
    trims: list[int] = []

    async def main() -> None:
        job = driven()
        driver = await job.begin()
        trim = job.log.trim

        async def counted(retain: int, keep_from: int | None = None) -> Any:
            trims.append(len(job.log.view.checkpoints))
            return await trim(retain, keep_from)

        job.log.trim = counted
        for id_, file in files.items():
            await job.store.write_file(file, b"x")
            if id_ == 3:
                job.store.hold("delete_files")
            driver.request(str(id_))
            await job.complete(id_, file)
            if id_ < 3:
                await let_all_run()
        job.store.gates["delete_files"].set()
        await let_all_run()
        assert trims == [1, 2, 2, 18]
        assert set(files.values()) & job.store._objects.keys() == {files[20]}
        await driver.close()

    asyncio.run(main())


def test_without_storage_a_stop_leaves_no_checkpoint(driven: Any) -> None:
    async def main() -> None:
        job = driven(log=False)
        driver = await job.begin()
        driver.request("stop", stop=True, savepoint="memory://elsewhere/savepoint")
        await job.complete(1)
        outcome = await job.complete(2)
        assert [done.token for done in outcome.done] == ["stop"]
        assert driver.last_completed == driver.completed == 0
        assert [kind for kind, _ in job.announced] == ["savepoint"]
        await driver.close()

    asyncio.run(main())


def test_a_savepoint_that_fails_is_no_failed_checkpoint(driven: Any) -> None:
    async def main() -> None:
        job = driven(timeout_ms=10)
        driver = await job.begin()
        driver.request("mine", savepoint="memory://elsewhere/savepoint")
        job.clock.now += 10
        outcome = driver.tick()
        assert [refused.token for refused in outcome.refused] == ["mine"]
        assert driver.failed == 0
        assert not [text for kind, text in job.announced if kind == "checkpoint"]
        driver.request("next")
        job.clock.now += 10
        assert driver.tick().fail is not None
        assert driver.failed == 1
        await driver.close()

    asyncio.run(main())


def test_a_savepoint_is_complete_only_for_who_still_wants_it(driven: Any) -> None:
    async def main() -> None:
        job = driven()
        driver = await job.begin()
        job.elsewhere.hold("create_if_absent")
        driver.request("mine", savepoint="memory://elsewhere/savepoint")
        job.ack(1)
        assert [refused.token for refused in driver.job_failed().refused] == ["mine"]
        job.elsewhere.gates["create_if_absent"].set()
        await job.answer()
        await driver.close()
        assert not job.elsewhere._objects
        assert not job.announced
        assert not driver.savepoints

    asyncio.run(main())


def test_a_store_that_refuses_says_so(driven: Any) -> None:
    async def main() -> None:
        job = driven(tolerable_failures=1)
        driver = await job.begin()

        async def refuse(name: str, data: bytes) -> None:
            raise StorageError("full")

        job.store.create_if_absent = refuse
        driver.request("one")
        outcome = await job.complete(1)
        assert outcome.fail is None
        assert [refused.token for refused in outcome.refused] == ["one"]
        assert (driver.completed, driver.failed) == (0, 1)
        await driver.close()

    asyncio.run(main())


def test_the_history_follows_what_happens(driven: Any) -> None:
    async def main() -> None:
        job = driven()
        driver = await job.begin()
        driver.request("one")
        await job.complete(1)
        driver.request("two")
        driver.job_failed()
        first, second = driver.history.records
        assert (first.status, len(first.parts), first.missing) == ("COMPLETED", 1, [])
        assert (second.status, second.missing) == ("FAILED", [(job.plan.vertices[0].name, 0)])
        assert "the job failed while the checkpoint was under way" in second.failure
        await driver.close()

    asyncio.run(main())
