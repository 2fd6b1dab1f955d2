"""Jobs whose steps are in several slot sharing groups: each worker has steps of one group alone, and
nothing is lost or twice when workers die, the job is rescaled, or its steps change their groups."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.errors import JobError

ROWS = 1200
KEYS = 50
GROUPS = {"state": hg.Resources(cpu=1), "model": hg.Resources(gpu=1, memory="1gb")}


def make_job(
    lab: Any, sink: Any, parallelism: int, *, count: str, model: str, **options: str
) -> Any:
    """Reads in the default group, counts in the group `count`, and writes in the group `model`."""
    texts = {key.replace("_", "."): text for key, text in options.items()}
    used = {name: each for name, each in GROUPS.items() if name in (count, model)}
    job = hg.Job("job", parallelism=parallelism, max_parallelism=12, options=texts, resources=used)
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=5, delay="10ms")
    (
        job.read(numbers(ROWS, rate=600, batch_rows=10, splits=8), name="numbers")
        .map(lambda n: (n % KEYS, 1), name="pairs")
        .key_with(lambda r: r[0])
        .reduce(lambda a, b: (a[0], a[1] + b[1]), name="count")
        .slot_sharing_group(count)
        .map(lambda r: r, name="model")
        .slot_sharing_group(model)
        .write(sink, name="out")
    )
    return job


def expected() -> Counter[tuple[int, int]]:
    return Counter((n % KEYS, n // KEYS + 1) for n in range(ROWS))


def check_apart(job: Any, slots: dict[str, int], slots_per_worker: int = 1) -> None:
    """Each subtask is on a worker of its own group, and each group has the workers for its slots."""
    context = job.coordinator._context
    live = context.pool.live
    placement = context.attempt.executions.placement
    assert placement
    for subtask, worker_id in placement.items():
        assert live[worker_id].group == context.attempt.plan.vertices[subtask.vertex].group
        # Chains and slots: subtask i of each vertex of a group shares a worker with the others of index i.
        same_slot = {
            other
            for each, other in placement.items()
            if each.index == subtask.index
            and context.attempt.plan.vertices[each.vertex].group == live[worker_id].group
        }
        assert same_slot == {worker_id}
    needed = {group: -(-count // slots_per_worker) for group, count in slots.items()}
    assert Counter(live[each].group for each in set(placement.values())) == needed


@pytest.mark.parametrize("parallelism", [1, 2, 4])
@pytest.mark.parametrize("slots_per_worker", [1, 2])
def test_workers_of_every_group_die(lab: Any, parallelism: int, slots_per_worker: int) -> None:
    sink, groups = collect(guarantee="exactly_once"), ("default", "state", "model")
    slots = dict.fromkeys(groups, parallelism)

    async def script(job: Any) -> None:
        for group in groups:
            await job.checkpoint()
            await job.checkpoint()
            check_apart(job, slots, slots_per_worker)
            of_group = {id_ for id_, w in job.coordinator._pool.live.items() if w.group == group}
            victim = next(each for each in job.live() if each.worker_id in of_group)
            victim.kill()
            await job.until("restored")
            await job.until("status", status="RUNNING")
        check_apart(job, slots, slots_per_worker)

    made = make_job(lab, sink, parallelism, count="state", model="model")
    ran = lab.run(made, script, slots_per_worker=slots_per_worker)
    assert ran.outcome.status == "FINISHED"
    assert len(ran.failures) == len(groups)
    assert Counter(sink.rows) == expected()


@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 3), (4, 1)])
def test_all_groups_are_rescaled(lab: Any, before: int, after: int) -> None:
    sink, groups = collect(guarantee="exactly_once"), ("default", "model")

    async def script(job: Any) -> None:
        await job.checkpoint()
        check_apart(job, dict.fromkeys(groups, before))
        await job.request("rescale", parallelism=after)
        check_apart(job, dict.fromkeys(groups, after))
        assert Counter(each["group"] for each in (await job.status())["workers"]) == dict.fromkeys(
            groups, after
        )
        await job.checkpoint()
        job.kill(random.Random(after))
        await job.until("restored")
        await job.until("status", status="RUNNING")
        check_apart(job, dict.fromkeys(groups, after))

    ran = lab.run(make_job(lab, sink, before, count="model", model="model"), script)
    assert ran.outcome.status == "FINISHED"
    assert Counter(sink.rows) == expected()


def test_a_group_with_a_parallelism_of_its_own_keeps_it(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")
    job = hg.Job("job", parallelism=3, max_parallelism=12, resources={"model": hg.Resources()})
    job.checkpoint(every="50ms", storage=lab.storage)
    stream = job.read(numbers(ROWS, rate=600, batch_rows=10, splits=8), name="numbers")
    stream.map(lambda n: n, name="model").parallel(2).slot_sharing_group("model").write(
        sink, name="out", parallelism=1
    )

    async def script(job: Any) -> None:
        await job.checkpoint()
        check_apart(job, {"default": 3, "model": 2})
        await job.request("rescale", parallelism=1)
        check_apart(job, {"default": 1, "model": 2})
        await job.checkpoint()

    ran = lab.run(job, script)
    assert ran.outcome.status == "FINISHED"
    assert sorted(sink.rows) == list(range(ROWS))


def test_state_moves_when_steps_change_their_groups(lab: Any) -> None:
    """A run stops, and the next has its steps in other groups: state goes by the step's name."""
    sink = collect(guarantee="exactly_once")

    async def stop(job: Any) -> None:
        await job.checkpoint()
        await job.request("stop")

    changes = [
        ("default", "default"),
        ("state", "model"),
        ("model", "default"),
        ("default", "state"),
    ]
    for count, model in changes[:-1]:
        lab.run(make_job(lab, sink, 2, count=count, model=model), stop, batches=5)
    count, model = changes[-1]
    ran = lab.run(make_job(lab, sink, 2, count=count, model=model))
    assert ran.outcome.status == "FINISHED"
    assert Counter(sink.rows) == expected()


def test_spares_are_kept_for_every_group(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")

    def spares(job: Any) -> Counter[str]:
        pool = job.coordinator._pool
        return Counter(w.group for id_, w in pool.live.items() if id_ not in pool._working)

    async def script(job: Any) -> None:
        await job.checkpoint()
        while spares(job) != {"default": 1, "model": 1}:
            await job.tick()
        working = job.coordinator._pool._working
        victim = next(each for each in job.live() if working.get(each.worker_id) == "model")
        (spare,) = (
            id_
            for id_, worker in job.coordinator._pool.live.items()
            if worker.group == "model" and id_ not in working
        )
        victim.kill()
        await job.until("restored")
        await job.until("status", status="RUNNING")
        assert job.coordinator._pool._working[spare] == "model"
        check_apart(job, {"default": 2, "model": 2})

    made = make_job(
        lab,
        sink,
        2,
        count="default",
        model="model",
        **{"slotmanager_redundant-taskmanager-num": "1"},
    )
    assert lab.run(made, script).outcome.status == "FINISHED"
    assert Counter(sink.rows) == expected()


def test_no_room_for_a_group_refuses_the_rescale(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")

    async def script(job: Any) -> None:
        await job.checkpoint()
        start = job.cluster.start_worker

        async def without_cards(worker_id: str, control: Any, group: str) -> Any:
            if group == "model":
                raise JobError("all cards are taken")
            return await start(worker_id, control, group)

        job.cluster.start_worker = without_cards
        with pytest.raises(JobError, match="no workers for parallelism 3: all cards are taken"):
            await job.request("rescale", parallelism=3)
        check_apart(job, {"default": 2, "model": 2})
        await job.checkpoint()

    ran = lab.run(make_job(lab, sink, 2, count="default", model="model"), script)
    assert ran.outcome.status == "FINISHED"
    assert not ran.failures
    assert Counter(sink.rows) == expected()
