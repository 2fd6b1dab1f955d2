"""A StreamJob as the API server has it, and its run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from headgate.k8s.objects import Deployment, Settings
from headgate.k8s.spec import Job, parse_job
from headgate.k8s.status import Run, Start

RESOURCE: dict[str, Any] = {
    "apiVersion": "headgate.io/v1alpha1",
    "kind": "StreamJob",
    "metadata": {"name": "flights", "namespace": "air", "uid": "u-1", "generation": 1},
    "spec": {
        "parallelism": 3,
        "checkpoint": {"every": "10s", "storage": "s3://bucket/x"},
        "sources": {"numbers": {"generator": {"fields": {"n": "sequence"}, "rows": 10}}},
        "sinks": {"out": {"from": "numbers", "print": {}}},
    },
}
IN_GROUPS: dict[str, Any] = {
    "resources": {"gpu": {"gpu": 1}},
    "sinks": {"out": {"from": "numbers", "print": {}, "slotSharingGroup": "gpu"}},
}
"""Fields that make it a job with two slot sharing groups."""


@pytest.fixture
def deployment() -> Callable[..., Deployment]:
    """A run of the job, with these fields in its section `kubernetes`."""

    def make(settings: Settings | None = None, **kubernetes: Any) -> Deployment:
        resource = copy.deepcopy(RESOURCE)
        resource["spec"]["kubernetes"] = {"image": "registry/flights:7", **kubernetes}
        job = parse_job(resource)
        assert isinstance(job, Job), job
        run = Run(4, job.revision, 3, Start("Path", "s3://bucket/sp"), "2026-01-01T00:00:00Z")
        return Deployment("flights", "air", "u-1", job, run, settings or Settings())

    return make
