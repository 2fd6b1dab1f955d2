"""A file of the newest checkpoint is gone: the one before, which shares most files with it, is restored."""

from __future__ import annotations

from typing import Any

import pytest


def shared_and_own(retained: list[Any]) -> tuple[list[str], list[str]]:
    """Return the files that the newest checkpoint shares with the one before, and its own.

    There may be none of either, depending on whether the newest has a new base.
    """
    if len(retained) != 2:
        return [], []
    before, newest = (manifest.files() for manifest in retained)
    return sorted(before & newest), sorted(newest - before)


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_the_chain_of_the_checkpoint_before_is_whole(lab: Any, shop: Any, backend: str) -> None:
    goods = shop(backend=backend, retain=2, every="1h")  # the script asks for each checkpoint

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        while not (goods.loaded() and all(shared_and_own(lab.disk.retained()))):
            await job.request("checkpoint")
        await job.request("cancel")

    assert lab.run(goods.job(), script).outcome.status == "CANCELED"
    before, newest = lab.disk.retained()
    _, own = shared_and_own([before, newest])
    del lab.disk.objects[own[0]]

    refused = lab.run(goods.job(hurried=True))
    assert refused.outcome.status == "FAILED"
    assert own[0] in str(refused.outcome.error)

    ran = lab.run(goods.job(hurried=True, **{"headgate.restore.fallback": "true"}))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert ran.restores == [before.checkpoint_id]
    # Output that was committed between the two is written again; state is exact.
    goods.check_at_least_once()
    assert not lab.disk.violations
    assert not lab.disk.unreachable()
