"""A file of the newest checkpoint is gone: the one before, which shares most files with it, is restored."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_the_chain_of_the_checkpoint_before_is_whole(lab: Any, shop: Any, backend: str) -> None:
    goods = shop(backend=backend, retain=2)

    async def script(job: Any) -> None:
        while not goods.loaded():
            await job.checkpoint()
        completed = lab.disk.counts["completed"]
        while lab.disk.counts["completed"] < completed + 6:
            await job.checkpoint()
        await job.request("stop")

    assert lab.run(goods.job(), script).outcome.status == "SUSPENDED"
    before, newest = lab.disk.retained()
    assert before.files() & newest.files()
    own = sorted(newest.files() - before.files())
    del lab.disk.objects[own[0]]

    refused = lab.run(goods.job(hurried=True))
    assert refused.outcome.status == "FAILED"
    assert own[0] in str(refused.outcome.error)

    ran = lab.run(goods.job(hurried=True, **{"headgate.restore.fallback": "true"}))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert ran.restores == [before.checkpoint_id]
    # What was committed between the two is written again; state is exact.
    goods.check_at_least_once()
    assert not lab.disk.violations
    assert not lab.disk.unreachable()
