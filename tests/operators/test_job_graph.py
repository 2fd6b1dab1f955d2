"""The job as a whole: settings, and what is checked before anything starts."""

from __future__ import annotations

from datetime import timedelta

import pytest

from headgate.api.job_definition import WrittenJob, definition_of
from headgate.api.settings import CheckpointSettings, FixedDelay
from headgate.errors import PlanError, UsageError
from headgate.operators.sink import Guarantee


def complete(world, guarantee=Guarantee.NONE):
    world.stream().write(world.sink(guarantee), name="out")
    return world.job


def test_settings_are_plain_numbers():
    job = WrittenJob("flights", parallelism=2, options={"key": "1"})
    job.checkpoint(every="10s", storage="s3://b/p", timeout=timedelta(minutes=5), retain=3)
    job.restart(attempts=5, delay="2s")
    assert definition_of(job).checkpoint_settings == CheckpointSettings(
        every_ms=10_000,
        storage="s3://b/p",
        timeout_ms=300_000,
        min_pause_ms=0,
        max_concurrent=1,
        tolerable_failures=0,
        retain=3,
    )
    assert definition_of(job).restart_settings == FixedDelay(attempts=5, delay_ms=2_000)
    assert job.options == {"key": "1"}


def test_what_is_not_said_is_none():
    job = WrittenJob("flights")
    assert (job.parallelism, job.max_parallelism) == (1, None)
    assert definition_of(job).checkpoint_settings is None
    assert definition_of(job).restart_settings is None


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "x" * 101, None, 3])
def test_job_names(name):
    with pytest.raises(PlanError, match="not a name for a job"):
        WrittenJob(name)


@pytest.mark.parametrize("parallelism", [0, -1, 1.5, True, "2"])
def test_parallelism_is_a_whole_number(parallelism):
    with pytest.raises(PlanError, match="parallelism must be a whole number of at least 1"):
        WrittenJob("flights", parallelism=parallelism)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"every": 10}, "checkpoint interval needs a unit value=`10`"),
        ({"every": "0s"}, r"checkpoint\(every=...\) must be positive"),
        ({"timeout": "0s"}, r"checkpoint\(timeout=...\) must be positive"),
        ({"retain": 0}, r"checkpoint\(retain=...\) must be positive"),
        ({"max_concurrent": 0}, r"checkpoint\(max_concurrent=...\) must be positive"),
        ({"tolerable_failures": -1}, r"checkpoint\(tolerable_failures=...\) must not be negative"),
        ({"storage": " "}, "checkpoint needs a place to store"),
    ],
)
def test_checkpoint_mistakes(given, text):
    job = WrittenJob("flights")
    with pytest.raises(UsageError, match=text) as caught:
        job.checkpoint(**{"every": "10s", "storage": "dir", **given})
    assert "test_job_graph.py" in caught.value.where
    assert definition_of(job).checkpoint_settings is None


@pytest.mark.parametrize("attempts", [-1, 1.5, True])
def test_restart_attempts(attempts):
    with pytest.raises(PlanError, match="must be a whole number from 0"):
        WrittenJob("flights").restart(attempts=attempts)


def test_a_job_reads_and_writes(world):
    with pytest.raises(PlanError, match="job `test` reads nothing"):
        world.job.validate()
    world.stream()
    with pytest.raises(PlanError, match="job `test` writes nothing"):
        world.job.validate()


def test_a_complete_job_is_valid(world):
    complete(world).validate()
    assert [node.name for node in world.definition.plan().nodes] == ["src", "out"]


@pytest.mark.parametrize("guarantee", [Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE])
def test_a_promise_needs_checkpoints(world, guarantee):
    class Able(world.sink):
        guarantees = frozenset(Guarantee)

    world.stream().write(Able(guarantee), name="out")
    with pytest.raises(PlanError) as caught:
        world.job.validate()
    assert caught.value.message == (
        f"sink `out` promises {guarantee.value}, but the job takes no checkpoints"
    )
    assert "test_job_graph.py" in caught.value.where
    assert caught.value.fix == (
        'add job.checkpoint(every="10s", storage="..."), or give the sink guarantee="none"'
    )
    world.job.checkpoint(every="10s", storage="dir")
    world.job.validate()


def test_parallelism_above_the_key_groups(world):
    world.definition.max_parallelism = 4
    world.stream().filter("ok").parallel(5).write(world.sink(Guarantee.NONE), name="out")
    with pytest.raises(PlanError, match="above the number of key groups") as caught:
        world.job.validate()
    assert "test_job_graph.py" in caught.value.where


def test_key_groups_follow_the_widest_step(world):
    complete(world)
    assert world.definition.effective_max_parallelism() == 128
    world.graph.nodes[0].parallelism = 100
    assert world.definition.effective_max_parallelism() == 256
    world.definition.max_parallelism = 7
    assert world.definition.effective_max_parallelism() == 7


def test_planning_leaves_the_job_as_written(world):
    stream = world.stream().filter("n > 1").select("n")
    stream.write(world.sink(Guarantee.NONE), name="out")
    before = [(node.id, node.name, node.schema, node.inputs) for node in world.graph.nodes]
    assert len(world.definition.plan().nodes) < len(world.graph.nodes)
    assert [(n.id, n.name, n.schema, n.inputs) for n in world.graph.nodes] == before


def test_what_is_read_must_be_a_source(world):
    with pytest.raises(PlanError, match="read needs a source, got `str`"):
        world.job.read("clicks", name="clicks")
