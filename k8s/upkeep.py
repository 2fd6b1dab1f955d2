"""The children of a StreamJob: missing ones are made again, and all are removed in a safe order.

A job never runs twice: pods of a run are made only when no pod, and no object that makes pods, of another
run is left. Names protect as well: there is only one StatefulSet with a job's name, and only one pod with
its name, so an operator with old observations cannot make a second head.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import yaml

from . import objects
from .actions import Create, Delete, Object, Replace, Scale
from .context import POD_MAKERS, Context, revision_label
from .modes import pod_makers, with_replicas
from .objects import CONTENT, REVISION
from .spec import Job, Problem, WorkerGroup, parse_job
from .status import Run

MANIFESTS_CACHED_MAX: Final = 256
"""Parsed manifests of revisions, by their text."""


def stored_job(context: Context, revision: str) -> Job | None:
    """Return the spec of a revision, from its ConfigMap."""
    config_map = context.config_map(revision)
    if config_map is None or not is_own(context, config_map):
        return None
    text = config_map.get("data", {}).get(objects.MANIFEST_KEY, "")
    job = _parsed(text)
    return job if isinstance(job, Job) and job.revision == revision else None


@functools.lru_cache(maxsize=MANIFESTS_CACHED_MAX)
def _parsed(text: str) -> Job | list[Problem]:
    return parse_job(yaml.safe_load(text))


def is_own(context: Context, child: Object) -> bool:
    """Return True if the StreamJob owns the object, and not an earlier one of the same name."""
    return objects.owned_by(child, context.uid)


def drain(context: Context, keep: Run | None = None) -> bool:
    """Remove the pods of all runs except `keep`, and their makers; return True once none of them is left.

    First every maker is scaled to 0. It is deleted only when its controller has observed that, and no pod
    is left, so that no pod can come back.
    """
    makers = [
        child
        for (kind, _), child in sorted(context.observed.children.items())
        if kind in POD_MAKERS and not (keep is not None and context.is_of(child, keep))
    ]
    strangers = [
        pod for pod in context.observed.pods if not (keep is not None and context.is_of(pod, keep))
    ]
    for child in makers:
        metadata = child["metadata"]
        if not is_own(context, child) or "deletionTimestamp" in metadata:
            continue
        if child["kind"] == "RayCluster":
            context.act(Delete(child["kind"], metadata["name"], metadata["uid"]))
        elif child["spec"].get("replicas", 1) != 0:
            version = metadata["resourceVersion"]
            context.act(Scale(child["kind"], metadata["name"], {"replicas": 0}, version))
    if strangers:
        names = ", ".join(sorted(str(pod["metadata"]["name"]) for pod in strangers))
        context.wait(f"these pods still have to end: {names}")
        return False
    for child in makers:
        metadata = child["metadata"]
        if _is_empty(child) and is_own(context, child) and "deletionTimestamp" not in metadata:
            context.act(Delete(child["kind"], metadata["name"], metadata["uid"]))
    if makers:
        names = ", ".join(f"{each['kind']} {each['metadata']['name']}" for each in makers)
        context.wait(f"these objects still have to be deleted: {names}")
    return not makers


def _is_empty(child: Object) -> bool:
    """Return True if the controller has observed that there should be no replicas, and there are none."""
    status = child.get("status", {})
    seen = status.get("observedGeneration", 0) >= child["metadata"].get("generation", 0)
    none = child.get("spec", {}).get("replicas", 1) == 0 and not status.get("replicas", 0)
    return bool(seen and none)


def keep_up(context: Context, job: Job, run: Run) -> None:
    """Make sure that all objects of the run exist, in the right form."""
    deployment = context.deployment(job, run)
    if context.config_map(run.revision) is None:
        context.act(Create(objects.manifest(deployment)))
    own_token = job.kubernetes.ray.token_secret_ref is None
    if own_token and context.child("Secret", deployment.token_secret) is None:
        context.act(Create(objects.token(deployment), token_key=objects.TOKEN_KEY))
    for wanted in objects.supporting(deployment):
        _keep_current(context, wanted)
    if not drain(context, keep=run) or _waits_for_strangers(context, deployment):
        return
    for wanted in pod_makers(deployment):
        _keep_made(context, wanted)


def _waits_for_strangers(context: Context, deployment: objects.Deployment) -> bool:
    """Return True while the manifest or the token belongs to an earlier StreamJob of this name.

    It is deleted with that StreamJob. Pods that start with its token could not talk to those that start
    later.
    """
    used = [("ConfigMap", objects.manifest_name(context.name, deployment.run.revision))]
    if deployment.job.kubernetes.ray.token_secret_ref is None:
        used.append(("Secret", deployment.token_secret))
    for kind, name in used:
        found = context.child(kind, name)
        if found is not None and not is_own(context, found):
            context.wait(
                f"{kind} {name} of an earlier StreamJob has to be deleted first; if it stays, delete it"
            )
            return True
    return False


def _keep_current(context: Context, wanted: dict[str, Any]) -> None:
    found = context.child(wanted["kind"], wanted["metadata"]["name"])
    if found is None:
        context.act(Create(wanted))
    elif _content(found) != _content(wanted) and "deletionTimestamp" not in found["metadata"]:
        context.act(Replace(wanted, found["metadata"]["resourceVersion"]))


def _content(child: Object) -> Any:
    return child["metadata"].get("annotations", {}).get(CONTENT)


def _keep_made(context: Context, wanted: dict[str, Any]) -> None:
    """Make an object that makes pods, or set its replicas; nothing else is changed while the run lasts.

    So a newer operator, which would make other pods, does not touch the running ones.
    """
    found = context.child(wanted["kind"], wanted["metadata"]["name"])
    if found is None:
        context.act(Create(wanted | {"spec": wanted["spec"] | _scaled(context, wanted)}))
        return
    metadata, scaled = found["metadata"], _scaled(context, found)
    if found["spec"] | scaled == found["spec"] or "deletionTimestamp" in metadata:
        return
    context.act(Scale(wanted["kind"], metadata["name"], scaled, metadata["resourceVersion"]))


def _scaled(context: Context, maker: Object) -> Object:
    """Return the fields of its spec with the number of pods that an object should make."""
    if maker["kind"] == "StatefulSet":
        return {"replicas": 1}
    run, job = context.status.run, context.running_job
    replicas: dict[str, int] = {}
    if run is not None and job is not None:
        groups = job.groups.values()
        replicas = {group.name: workers_wanted(context, run, group) for group in groups}
    if maker["kind"] == "RayCluster":
        return {"workerGroupSpecs": with_replicas(maker["spec"]["workerGroupSpecs"], replicas)}
    name = maker["metadata"]["name"]
    wanted = (
        n for group, n in replicas.items() if objects.workers_name(context.name, group) == name
    )
    return {"replicas": next(wanted, 0)}


def workers_wanted(context: Context, run: Run, group: WorkerGroup) -> int:
    """Return the workers that a group needs, during a rescale for both parallelisms."""
    wanted = context.job.parallelism if context.job is not None else run.parallelism
    now = context.report.parallelism if context.report is not None else run.parallelism
    in_force = context.job.groups.get(group.name) if context.job is not None else group
    if in_force is not None and in_force.workers.replicas:
        return in_force.workers.replicas
    return max(map(group.needed, (now, wanted, run.parallelism)))


def drop_old_manifests(context: Context) -> None:
    """Delete ConfigMaps of revisions that are not running, not wanted, and not needed for a rollback."""
    status = context.status
    kept = {each.revision for each in (status.run, status.stable) if each is not None}
    if context.job is not None:
        kept.add(context.job.revision)
    for (kind, name), child in sorted(context.observed.children.items()):
        metadata = child["metadata"]
        if kind != "ConfigMap" or REVISION not in metadata.get("labels", {}):
            continue
        unused = revision_label(child) not in kept and "deletionTimestamp" not in metadata
        if unused and is_own(context, child):
            context.act(Delete(kind, name, metadata["uid"]))
