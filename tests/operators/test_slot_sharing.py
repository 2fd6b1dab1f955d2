"""Slot sharing groups: which group a step is in, what that does to the plan, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import headgate as hg
from headgate.api.resources import Resources, sharing_groups
from headgate.connectors import blackhole, numbers
from headgate.errors import PlanError, UsageError
from headgate.runtime.job import runnable
from headgate.runtime.plan import PhysicalPlan

CPU, GPU = hg.Resources(cpu=2, memory="8gb"), hg.Resources(gpu=1, custom={"disk": 2})


def new_job(parallelism: int = 1, **resources: Resources) -> hg.Job:
    return hg.Job("groups", parallelism=parallelism, resources=resources)


def read(job: hg.Job, name: str = "numbers") -> hg.Stream[Any]:
    return job.read(numbers(10), name=name)


def groups_of(job: hg.Job) -> dict[str, str]:
    graph = runnable(job).graph
    found = sharing_groups(graph)
    return {node.name: found[node.id] for node in graph.nodes}


def plan_of(job: hg.Job) -> PhysicalPlan:
    return runnable(job).spec().plan


def same(value: Any) -> Any:
    return value


def test_steps_stay_in_the_group_of_their_input() -> None:
    job = new_job(gpu=GPU)
    stream = read(job).map(same, name="before").map(same, name="model").slot_sharing_group("gpu")
    stream.map(same, name="after").write(blackhole(), name="out")
    stream.map(same, name="back").slot_sharing_group("default").write(blackhole(), name="other")
    assert groups_of(job) == {
        "numbers": "default",
        "before": "default",
        "model": "gpu",
        "after": "gpu",
        "out": "gpu",
        "back": "default",
        "other": "default",
    }


def test_a_step_that_reads_several_groups_is_in_the_default_one() -> None:
    job = new_job(io=CPU, gpu=GPU)
    one = read(job, "one").slot_sharing_group("io")
    two = read(job, "two").slot_sharing_group("io")
    three = read(job, "three").slot_sharing_group("gpu")
    one.union(two).map(same, name="equal").write(blackhole(), name="out")
    one.union(three).map(same, name="mixed").write(
        blackhole(), name="sink", slot_sharing_group="gpu"
    )
    found = groups_of(job)
    assert (found["equal"], found["out"]) == ("io", "io")
    assert (found["mixed"], found["sink"]) == ("default", "gpu")


def test_a_loop_ends_in_the_slots_it_begins_in() -> None:
    job = new_job(2, gpu=GPU)

    def body(stream: Any) -> Any:
        model = stream.map(same, name="model").slot_sharing_group("gpu")
        return model.filter(lambda n: n < 0), model

    read(job).iterate(body, name="loop").write(blackhole(), name="out")
    plan = plan_of(job)
    (loop,) = plan.loops
    assert plan.vertices[loop.head].group == plan.vertices[loop.tail].group == "default"
    assert plan.slots_by_group == {"default": 2, "gpu": 2}


def test_groups_share_no_chain_and_no_slot() -> None:
    job = new_job(4, gpu=GPU)
    stream = read(job).map(same, name="before")
    model = stream.map(same, name="model").slot_sharing_group("gpu").parallel(2)
    model.map(same, name="after").write(blackhole(), name="out")
    plan = plan_of(job)
    assert [(vertex.name, vertex.group) for vertex in plan.vertices] == [
        ("numbers -> before", "default"),
        ("model", "gpu"),
        ("after -> out", "gpu"),
    ]
    assert plan.slots_by_group == {"default": 4, "gpu": 4}
    assert plan.slots == 8


def test_the_plan_of_other_groups_is_another_plan() -> None:
    def fingerprint(group: str) -> str:
        job = new_job(gpu=GPU, cpu=CPU)
        stream = read(job).slot_sharing_group("cpu").rebalance().map(same, name="map")
        stream.slot_sharing_group(group).map(same, name="last").slot_sharing_group("gpu").write(
            blackhole(), name="out"
        )
        return plan_of(job).fingerprint()

    assert fingerprint("cpu") != fingerprint("gpu")


def test_expressions_of_two_groups_are_not_joined() -> None:
    fields = {"a": {"kind": "sequence"}, "b": {"kind": "sequence"}}

    def names(group: str) -> list[str]:
        from headgate.connectors import generator

        job = new_job(gpu=GPU)
        stream = job.read(generator(fields, rows=5), name="rows").filter("a > 1", name="one")
        stream = stream.filter("b > 1", name="two").slot_sharing_group(group)
        stream.write(blackhole(), name="out", slot_sharing_group="gpu")
        return [node.name for vertex in plan_of(job).vertices for node in vertex.nodes]

    assert names("default") == ["rows", "two", "out"]
    assert names("gpu") == ["rows", "one", "two", "out"]


def test_explain_shows_the_groups_and_what_their_slots_take() -> None:
    job = new_job(2, gpu=hg.Resources(cpu=1, memory="8gb", gpu=0.5, custom={"disk": 2}))
    stream = read(job).map(same, name="model").slot_sharing_group("gpu")
    stream.parallel(1).write(blackhole(), name="out", parallelism=1)
    text = job.explain()
    assert "physical graph: 2 vertices, 3 subtasks, 3 slots" in text
    assert "\n  [1] model -> out  x1 in gpu" in text
    assert (
        "\nslot sharing groups\n"
        "  default: 2 slots\n"
        "  gpu: 1 slot, each with 1 CPU, 8gb memory, 0.5 GPUs, 2 disk\n"
    ) in text
    plain = new_job()
    read(plain).write(blackhole(), name="out")
    assert "slot sharing groups" not in plain.explain()


def test_a_stream_of_a_group_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    job = new_job(gpu=GPU)
    read(job).map(same, name="model").slot_sharing_group("gpu").show(3)
    assert "0" in capsys.readouterr().out


# -- mistakes -----------------------------------------------------------------------------------------


def line_of(action: Callable[[], Any], text: str) -> int:
    """The number of the line of `action` that has the text."""
    lines, first = inspect.getsourcelines(action)
    return first + next(number for number, line in enumerate(lines) if text in line)


def refused(action: Callable[[], Any], text: str) -> PlanError:
    with pytest.raises(UsageError) as caught:
        action()
    assert isinstance(caught.value, PlanError)
    assert f"test_slot_sharing.py:{line_of(action, text)}" in caught.value.where
    return caught.value


def test_a_group_must_be_declared() -> None:
    def action() -> None:
        job = new_job(gpu=GPU)
        read(job).map(same).slot_sharing_group("gqu")

    error = refused(action, "gqu")
    assert error.message == "no such slot sharing group name=`gqu`"
    assert "name one of default, gpu" in error.fix

    def at_a_sink() -> None:
        read(new_job()).write(blackhole(), name="out", slot_sharing_group="gpu")

    refused(at_a_sink, "gpu")


def test_a_group_must_have_a_step() -> None:
    def action() -> None:
        job = hg.Job("groups", resources={"gpu": GPU})
        read(job).write(blackhole(), name="out")
        job.validate()

    assert refused(action, "hg.Job").message == "no step is in the slot sharing group `gpu`"


def test_event_time_is_made_in_the_slots_of_its_source() -> None:
    fields = {"at": {"kind": "timestamp", "every": "1s"}}

    def action() -> None:
        from headgate.connectors import generator

        job = new_job(gpu=GPU)
        stream = job.read(generator(fields, rows=5), name="rows")
        stream.event_time("at").slot_sharing_group("gpu").write(blackhole(), name="out")
        job.validate()

    error = refused(action, '.event_time("at")')
    assert "has to share slots with the source before it" in error.message
    assert "group=`gpu` group_before=`default`" in error.message


def test_the_group_is_that_of_a_step() -> None:
    def action() -> None:
        read(new_job()).rebalance().slot_sharing_group("default")

    assert "must directly follow it" in refused(action, "rebalance").message


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cpu": -1}, "cpu must be a number from 0 on value=`-1`"),
        ({"cpu": True}, "cpu must be a number from 0 on value=`True`"),
        ({"cpu": float("nan")}, "cpu must be a number from 0 on"),
        ({"cpu": float("inf")}, "cpu must be a number from 0 on"),
        ({"cpu": 0.00001}, "cpu must be a number from 0 on"),
        ({"cpu": 10**7}, "cpu must be at most 1,000,000"),
        ({"gpu": 1.5}, "gpu must be a whole number, or below 1 value=`1.5`"),
        ({"gpu": "1"}, "gpu must be a number from 0 on value=`'1'`"),
        ({"memory": "8"}, "memory is not a size with a unit value=`8`"),
        ({"memory": 8}, "memory is not a size with a unit value=`8`"),
        ({"custom": ["disk"]}, "custom is a mapping, got `list`"),
        ({"custom": {"GPU": 1}}, "`GPU` is no custom resource"),
        ({"custom": {"node:1": 1}}, "not a name for a resource value=`node:1`"),
        ({"custom": {"disk": -1}}, "custom resource `disk` must be a number from 0 on"),
        ({"custom": {"disk": 2.5}}, "custom resource `disk` must be a whole number, or below 1"),
    ],
)
def test_nonsense_is_no_resource(arguments: dict[str, Any], text: str) -> None:
    def action() -> None:
        hg.Resources(**arguments)

    assert text in refused(action, "hg.Resources").message


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        ({"GPU": GPU}, "not a name for a slot sharing group value=`GPU`"),
        ({"a" * 31: GPU}, "not a name for a slot sharing group"),
        ({1: GPU}, "not a name for a slot sharing group value=`1`"),
        ({"gpu": {"gpu": 1}}, "those of the group `gpu` are hg.Resources, got `dict`"),
        ([GPU], "of a job they are a mapping, got `list`"),
    ],
)
def test_nonsense_is_no_group(resources: Any, text: str) -> None:
    def action() -> None:
        hg.Job("groups", resources=resources)

    assert text in refused(action, "hg.Job").message


def test_resources_as_text_and_bytes() -> None:
    assert str(hg.Resources()) == ""
    assert str(hg.Resources(cpu=2, memory="1536 mb", gpu=1)) == "2 CPUs, 1536mb memory, 1 GPU"
    assert hg.Resources(memory="8Gi").memory_bytes == 8 << 30
