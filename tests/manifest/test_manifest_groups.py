"""Slot sharing groups in a manifest: the same as in Python, and each mistake with its line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import headgate as hg
from headgate.api.job_definition import definition_of
from headgate.api.resources import sharing_groups
from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job

Manifest = Callable[..., str]
ProblemsOf = Callable[..., list[str]]

SPEC = """
resources:
  io: {}
  gpu: {cpu: 1.5, memory: 8Gi, gpu: 1, custom: {disk: 2}}
"""
SOURCE = """\
  sources:
    orders:
      generator: {fields: {id: sequence, price: float, at: timestamp}, rows: 10}
      eventTime: {column: at, maxOutOfOrder: 1s}
      slotSharingGroup: io
"""


def test_groups_are_those_of_python(manifest: Manifest) -> None:
    text = manifest(
        """
        cheap: {from: orders, filter: "price < 1"}
        model: {from: cheap, filter: "price > 0", slotSharingGroup: gpu, parallelism: 2}
        after: {from: model, select: [id]}
        """,
        "cheap",
        spec=SPEC,
        sources=SOURCE,
        sinks="sink: {from: after, blackhole: , slotSharingGroup: default}",
    )
    job: Any = load_job(text, env={})
    assert job.resources == {
        "io": hg.Resources(),
        "gpu": hg.Resources(cpu=1.5, memory="8Gi", gpu=1, custom={"disk": 2}),
    }
    assert str(job.resources["gpu"]) == "1.5 CPUs, 8gb memory, 1 GPU, 2 disk"
    graph = definition_of(job).graph
    found = sharing_groups(graph)
    assert {node.name: found[node.id] for node in graph.nodes} == {
        "orders": "io",
        "event_time": "io",
        "cheap": "io",
        "model": "gpu",
        "after": "gpu",
        "out0": "io",
        "sink": "default",
    }
    assert runnable(job).spec().plan.slots_by_group == {"io": 1, "gpu": 2, "default": 1}


def test_every_mistake_has_its_line(manifest: Manifest, problems_of: ProblemsOf) -> None:
    text = manifest(
        "model: {from: orders, filter: 'price > 0', slotSharingGroup: gqu}\n"
        "other: {from: model, filter: 'price > 1', slotSharingGroup: gpu}",
        "other",
        spec="""
        resources:
          gpu: {cpu: -1, memory: 8, gpus: 1}
          half: {gpu: 1.5}
          BIG: {cpu: 1}
        """,
        sinks="sink: {from: model, blackhole: , slotSharingGroup: nope}",
    )
    found = problems_of(text)
    memory = next(each for each in found if "memory" in each)
    assert "memory must be a size with a unit such as `64mb`, not the number `8`" in memory
    assert [each.partition(" | ")[0] for each in found if each is not memory] == [
        "7: cpu must be a number of at least 0, not the number `-1`",
        "7: unknown field in resources field=`gpus`",
        "8: resources: gpu must be a whole number, or below 1 value=`1.5`",
        "9: a key must be a name of at most 30 lower-case letters, digits and `-`, not the text `BIG`",
        "21: no such slot sharing group name=`gqu`",
        "25: no such slot sharing group name=`nope`",
    ]
    assert found[-1].endswith("name one of default, gpu, half")


def test_a_group_without_steps_is_named_with_its_line(
    manifest: Manifest, problems_of: ProblemsOf
) -> None:
    text = manifest("", "orders", spec="resources:\n  gpu: {gpu: 1}\n")
    assert problems_of(text) == [
        "6: no step is in the slot sharing group `gpu` | "
        "name the group at a step, or remove its resources"
    ]


def test_a_loop_has_no_group_of_its_own(manifest: Manifest, problems_of: ProblemsOf) -> None:
    text = manifest(
        "loop: {from: orders, iterate: {body: 'builtins:print'}, slotSharingGroup: gpu}",
        "loop",
        spec="resources: {gpu: {}}\n",
    )
    assert "a loop is in the slot sharing group of its input | name another one in its body" in str(
        problems_of(text)
    )


def test_a_manifest_in_a_file_can_be_checked(manifest: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(manifest("", "orders", spec="resources: {default: {cpu: 1}}\n"))
    assert str(load_job(path, env={}).resources["default"]) == "1 CPU"
