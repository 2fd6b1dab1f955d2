"""Coordinator and workers find the place of each subtask by the same rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import blackhole, generator, sequence
from headgate.runtime.cluster.launch import crowding
from headgate.runtime.control.messages import Deploy, DeployCommon
from headgate.runtime.exchange.hub import WorkerAddress, addresses_for_peers
from headgate.runtime.job import runnable
from headgate.runtime.plan import JobSpec
from headgate.runtime.slots import Placement, SlotsByGroup, worker_groups


def plan(*vertices: tuple[str, int]) -> Any:
    made = [SimpleNamespace(group=group, parallelism=width) for group, width in vertices]
    slots: dict[str, int] = {}
    for group, width in vertices:
        slots[group] = max(slots.get(group, 0), width)
    return SimpleNamespace(vertices=made, slots_by_group=slots)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_each_subtask_has_one_place(slots: int) -> None:
    made = plan(("default", 5), ("big", 3), ("default", 2), ("big", 1))
    sizes = SlotsByGroup(default=slots, big=2)
    groups = worker_groups(made, sizes)
    workers = [f"worker-{number}" for number in range(len(groups))]
    placement = Placement(made, workers, sizes)
    found = [(subtask, worker) for worker in workers for subtask in placement.subtasks_of(worker)]
    everyone = {
        (number, index) for number, v in enumerate(made.vertices) for index in range(v.parallelism)
    }
    assert len(found) == len(everyone)
    assert {subtask for subtask, _ in found} == everyone
    for (vertex, index), worker in found:
        assert placement.worker_of(vertex, index) == worker
        assert groups[workers.index(worker)] == made.vertices[vertex].group


def spec_of(parallelism: int, options: dict[str, str] | None = None) -> JobSpec:
    job = hg.Job("slots", parallelism=parallelism, options=options)
    rows = job.read(generator({"n": sequence()}, rows=10), name="rows")
    rows.key_by("n").agg(c=hg.count(), name="counts").write(blackhole(), name="out")
    return runnable(job).spec()


def test_an_option_says_how_many_slots_a_worker_has() -> None:
    one, four = spec_of(8), spec_of(8, {"taskmanager.numberOfTaskSlots": "4"})
    assert len(worker_groups(one.plan, one)) == 8
    assert len(worker_groups(four.plan, four)) == 2


def test_more_worker_processes_than_cpus_are_pointed_out() -> None:
    assert crowding(spec_of(2), cpus=2) == ""
    assert crowding(spec_of(8, {"taskmanager.numberOfTaskSlots": "4"}), cpus=2) == ""
    assert crowding(spec_of(7), cpus=2).startswith(
        "7 worker processes share 2 CPUs; with taskmanager.numberOfTaskSlots=4 there are 2,"
    )


def test_workers_that_no_option_makes_fewer_are_not_pointed_out() -> None:
    """Each slot sharing group has a worker of its own, however many slots that has."""
    made = plan(("a", 1), ("b", 1), ("c", 1))
    made.slots = 3
    spec: Any = SimpleNamespace(plan=made, slots_of=lambda group: 1)
    assert len(worker_groups(made, spec)) == 3
    assert crowding(spec, cpus=2) == ""


def address(number: int, host: str) -> bytes:
    return WorkerAddress(f"worker-{number}", "10.0.0.1", f"/tmp/{number}", number, host).encode()


def test_only_workers_with_a_neighbour_have_a_unix_socket() -> None:
    given = [address(0, "a"), address(1, "b"), address(2, "a")]
    sent = [WorkerAddress.decode(data) for data in addresses_for_peers(given)]
    assert [each.uds_path for each in sent] == ["/tmp/0", None, "/tmp/2"]
    assert [each.host_id for each in sent] == ["a", "", "a"]
    assert [each.tcp_port for each in sent] == [0, 1, 2]


def test_what_all_workers_get_is_packed_once() -> None:
    common = DeployCommon(
        job=b"plan", workers=(address(0, "a"),), slots={"default": 8}, settings={"key": "value"}
    )
    packed, size = common.packed()
    message = Deploy(attempt=1, generation=1, plan="", common=packed, common_size=size, subtasks=())
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Deploy)
    assert DeployCommon.unpacked(received) == common
