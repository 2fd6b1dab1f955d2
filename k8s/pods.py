"""The pods of a job. Every one of them passes Kubernetes' restricted Pod Security Standard."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from . import ports
from .objects import (
    FENCED,
    HEAD,
    JOB,
    MANIFEST_KEY,
    PREFIX,
    REVISION,
    RUN,
    TOKEN_KEY,
    WORKER,
    Deployment,
    Settings,
    head_name,
    labels,
    manifest_name,
    owner,
)
from .spec import CONTAINER, Job, Resources, WorkerGroup
from .status import Runtime

USER: Final = 10001
GRACE_S: Final = 60
"""The seconds between SIGTERM and SIGKILL, in which a checkpoint is taken."""
TMP_SIZE: Final = "4Gi"
SHARED_MEMORY_SIZE: Final = "1Gi"
MANIFEST_PATH: Final = "/etc/headgate"
TOKEN_PATH: Final = "/run/headgate"
CODE_PATH: Final = "/opt/headgate/code"
CODE_CONTAINER: Final = "headgate-code"
GCS_VOLUME: Final = "ray-gcs"
GCS_PATH: Final = "/var/lib/ray-gcs"
POD_IP_VARIABLE: Final = "HEADGATE_POD_IP"
PROBES: Final = ("startupProbe", "livenessProbe", "readinessProbe")
RECONNECT_S: Final = 20
"""How long Ray's worker nodes look for a head that is gone, before they end themselves. A new head does not
know them, so that they have to begin again anyway."""
RECONNECT_KNOWN_S: Final = 60
"""The same if Ray's control store is on a volume: a new head knows them. Workers do not go on without a
coordinator for longer either, by default."""
_DEFAULTS: Final = {
    HEAD: {"cpu": "500m", "memory": "1Gi"},
    WORKER: {"cpu": "1", "memory": "2Gi"},
}
_MERGED_BY: Final = {
    "volumeMounts": "mountPath",
    "topologySpreadConstraints": "topologyKey",
    "ports": "containerPort",
}
"""Lists whose entries are merged by another field than `name`."""
_SERVING: Final = frozenset(("args", "ports", "lifecycle", *PROBES))
_GPU: Final = "/gpu"
"""The end of the names of GPUs, such as `nvidia.com/gpu` and `amd.com/gpu`."""
_STORAGE_OPTIONS: Final = "s3."
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
LOST_S: Final = 30
"""Time after the loss of a node until Kubernetes gives up its pods; the default is five minutes."""
_LOST_NODES: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_APPENDED: Final = frozenset(("tolerations", "envFrom"))


def head_pod(deployment: Deployment, ray_address: str = "") -> dict[str, Any]:
    """Return the template of the head: Ray's head, or a node of another Ray, with the coordinator in it."""
    run, kubernetes = deployment.run, deployment.job.kubernetes
    command = [
        "headgate", "k8s", "head",
        "--job", f"{MANIFEST_PATH}/{MANIFEST_KEY}",
        "--run-id", deployment.run_id,
        "--parallelism", str(run.parallelism),
        "--start", run.start.kind.lower(),
    ]  # fmt: skip
    if run.start.path:
        command += ["--path", run.start.path]
    if kubernetes.upgrade.allow_non_restored_state:
        command.append("--allow-non-restored-state")
    if ray_address:
        command += ["--ray-address", ray_address]
    if kubernetes.ray.gcs_storage.type == "Memory":
        return _template(deployment, HEAD, command)
    template = _template(deployment, HEAD, [*command, "--gcs-volume", GCS_PATH])
    (container,) = (each for each in template["spec"]["containers"] if each["name"] == CONTAINER)
    container["volumeMounts"].append({"name": GCS_VOLUME, "mountPath": GCS_PATH})
    return template


def worker_pod(deployment: Deployment, group: WorkerGroup, ray_head: str = "") -> dict[str, Any]:
    """Return the template of a worker of a slot sharing group: one node of Ray.

    Args:
        ray_head: host of Ray's head; default: the Service of the job.
    """
    command = [
        "headgate", "k8s", "worker",
        "--head", ray_head or head_name(deployment.name),
        *(["--group", group.name] if deployment.in_groups else []),
        "--slots", str(group.workers.slots),
    ]  # fmt: skip
    template = _template(deployment, WORKER, command, group)
    template["spec"].setdefault(
        "topologySpreadConstraints",
        [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": deployment.workers_selector(group.name)},
            }
        ],
    )
    return template


def cleaning_job(
    name: str,
    namespace: str,
    job: str,
    owner_reference: dict[str, Any],
    runtime: Runtime,
    command: list[str],
    *,
    manifest: str = "",
) -> dict[str, Any]:
    """Return a Kubernetes Job that deletes state when the pods of the job no longer exist.

    Its pod reaches the storage as that of the coordinator did: with the same identity, credentials,
    variables and volumes, and on the same kind of node.

    Args:
        manifest: the name of a ConfigMap that is mounted as in the coordinator; empty: none.
    """
    container = _container(command, runtime.image, runtime.image_pull_policy)
    container["env"] = [{"name": "HOME", "value": "/tmp"}, *_variables(runtime.env)]
    container["resources"] = _amounts(Resources(), HEAD)
    container["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
    if runtime.credentials_secret:
        container["envFrom"] = [{"secretRef": {"name": runtime.credentials_secret}}]
    spec = _pod(runtime.service_account_name, runtime.image_pull_secrets)
    spec |= {"containers": [container]}
    spec["volumes"] = [{"name": "tmp", "emptyDir": {"sizeLimit": TMP_SIZE}}]
    if manifest:
        spec["volumes"].append({"name": "manifest", "configMap": {"name": manifest}})
        mount = {"name": "manifest", "mountPath": MANIFEST_PATH, "readOnly": True}
        container["volumeMounts"].append(mount)
    template = merged({"metadata": {}, "spec": spec}, runtime.pod_template)
    common = {"app.kubernetes.io/name": "headgate", "app.kubernetes.io/component": "cleaning"}
    # Only the object has the label of the job, because its pod does not belong to the pods of the job.
    users = template["metadata"].get("labels", {})
    users = {key: value for key, value in users.items() if not key.startswith(PREFIX)}
    metadata = {
        "name": name,
        "namespace": namespace,
        "labels": common | {JOB: job},
        "ownerReferences": [owner_reference],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": 6,
            "template": {
                "metadata": template["metadata"] | {"labels": users | common},
                "spec": _ending(template["spec"], command),
            },
        },
    }


def _ending(spec: dict[str, Any], command: list[str]) -> dict[str, Any]:
    """Return a pod that runs one command to its end.

    Other containers would never end, so they are dropped. So are the probes, hooks and arguments that
    only a coordinator needs.
    """
    (container,) = (each for each in spec["containers"] if each["name"] == CONTAINER)
    kept = {name: value for name, value in container.items() if name not in _SERVING}
    return spec | {"restartPolicy": "Never", "containers": [kept | {"command": command}]}


def state_cleaning_job(deployment: Deployment, name: str) -> dict[str, Any]:
    """Return the Job that deletes a job's checkpoints and its log, but no savepoint.

    It must refuse if the log was begun or continued by a StreamJob with another uid, because the Job may
    be made late, when a new StreamJob of the same name exists.
    """
    command = ["headgate", "k8s", "delete-state", "--job", f"{MANIFEST_PATH}/{MANIFEST_KEY}"]
    command += ["--uid", deployment.uid]
    return cleaning_job(
        name,
        deployment.namespace,
        deployment.name,
        owner(deployment.name, deployment.uid),
        runtime_of(deployment.job, deployment.settings),
        command,
        manifest=manifest_name(deployment.name, deployment.run.revision),
    )


def savepoint_cleaning_job(
    name: str,
    namespace: str,
    job: str,
    owner_reference: dict[str, Any],
    runtime: Runtime,
    path: str,
) -> dict[str, Any]:
    """Return the Job that deletes the files of a savepoint."""
    command = ["headgate", "savepoint", "dispose", path]
    for key, value in runtime.options.items():
        command += ["-D", f"{key}={_for_container(str(value), runtime.env)}"]
    return cleaning_job(name, namespace, job, owner_reference, runtime, command)


def _for_container(text: str, env: Mapping[str, Any]) -> str:
    """Write `${NAME}` as `$(NAME)`, which Kubernetes replaces in the command of a container.

    A default counts unless the variable is in `env`: the variables of the image are not known here.
    """

    def written(found: re.Match[str]) -> str:
        name, default = found.groups()
        return f"$({name})" if default is None or name in env else str(default)

    return _VARIABLE.sub(written, text)


def runtime_of(job: Job, settings: Settings) -> Runtime:
    """Return the settings that a pod needs to reach the job's storage."""
    kubernetes = job.kubernetes
    credentials = kubernetes.storage.credentials_secret_ref
    options = job.spec.get("options") or {}
    return Runtime(
        image=kubernetes.image or settings.default_image,
        image_pull_policy=kubernetes.image_pull_policy or "",
        image_pull_secrets=[each.name for each in kubernetes.image_pull_secrets],
        service_account_name=kubernetes.service_account_name or "",
        credentials_secret=credentials.name if credentials else "",
        env=msgspec.to_builtins(kubernetes.env),
        pod_template=kubernetes.coordinator.pod_template,
        options={key: options[key] for key in options if key.startswith(_STORAGE_OPTIONS)},
    )


def merged(base: Any, over: Any, key: str = "") -> Any:
    """Merge `over` into `base`: mappings field by field, lists of named entries name by name."""
    if isinstance(base, dict) and isinstance(over, dict):
        both = {name: merged(base[name], over[name], name) for name in base if name in over}
        return base | over | both
    if isinstance(base, list) and isinstance(over, list):
        if key in _APPENDED:
            return [*base, *(each for each in over if each not in base)]
        by = _MERGED_BY.get(key, "name")
        if all(isinstance(each, dict) and by in each for each in (*base, *over)):
            known = {each[by]: each for each in base}
            for each in over:
                known[each[by]] = merged(known[each[by]], each) if each[by] in known else each
            return list(known.values())
    return over


def _template(
    deployment: Deployment, role: str, command: list[str], group: WorkerGroup | None = None
) -> dict[str, Any]:
    """Return the pod template of a role, merged with the user's; our labels cannot be changed."""
    kubernetes = deployment.job.kubernetes
    section = kubernetes.coordinator if group is None else group.workers
    container = _container(
        command,
        kubernetes.image or deployment.settings.default_image,
        kubernetes.image_pull_policy or "",
    )
    container["env"] = _environment(deployment, role)
    container["resources"] = _amounts(section.resources, role, group)
    container["ports"] = [
        {"name": port.name, "containerPort": port.number, "protocol": "TCP"} for port in ports.NAMED
    ]
    container["volumeMounts"], volumes = _volumes(deployment)
    container |= _probes()
    if kubernetes.storage.credentials_secret_ref:
        reference = {"name": kubernetes.storage.credentials_secret_ref.name}
        container["envFrom"] = [{"secretRef": reference}]
    spec = _pod(
        kubernetes.service_account_name or "", [each.name for each in kubernetes.image_pull_secrets]
    )
    spec |= {
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": volumes,
    }
    template: dict[str, Any] = merged({"metadata": {}, "spec": spec}, section.pod_template)
    if kubernetes.code.archive:
        _fetch_code(template["spec"], kubernetes.code.archive)
    _leave_lost_nodes(template["spec"])
    metadata = template["metadata"]
    own = {REVISION: deployment.run.revision, RUN: deployment.run_id}
    own |= {} if group is None else deployment.workers_selector(group.name)
    if deployment.job.spec.get("checkpoint"):
        metadata["annotations"] = metadata.get("annotations", {}) | {FENCED: "true"}
    metadata["labels"] = metadata.get("labels", {}) | labels(deployment.name, role) | own
    return template


def _leave_lost_nodes(spec: dict[str, Any]) -> None:
    """Make Kubernetes give up the pod soon after its node, unless the user's tolerations say otherwise."""
    given = spec.get("tolerations", [])
    keys = {each.get("key") for each in given}
    own = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_S}
        for key in _LOST_NODES
        if not keys & {key, None}  # a toleration without a key is for all taints
    ]
    spec["tolerations"] = [*given, *own]


def _fetch_code(spec: dict[str, Any], archive: str) -> None:
    """Add an init container that unpacks the code, with the same access to the storage as the pod's own.

    It is the last of the init containers, because one of the user's may log in first.
    """
    (container,) = (each for each in spec["containers"] if each["name"] == CONTAINER)
    kept = (
        "terminationMessagePolicy",
        "image",
        "imagePullPolicy",
        "env",
        "envFrom",
        "volumeMounts",
        "resources",
        "securityContext",
    )
    command = ["headgate", "k8s", "fetch-code", archive, "--to", CODE_PATH]
    command += ["--job", f"{MANIFEST_PATH}/{MANIFEST_KEY}"]
    first = {
        "name": CODE_CONTAINER,
        "command": command,
        **{name: container[name] for name in kept if name in container},
    }
    # The module path is for the job only: it may have half of the code, from an earlier attempt.
    first["env"] = [each for each in first["env"] if each["name"] != "PYTHONPATH"]
    spec["initContainers"] = [*spec.get("initContainers", ()), first]


def _pod(service_account: str, pull_secrets: list[str]) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if service_account:
        spec["serviceAccountName"] = service_account
    if pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in pull_secrets]
    return spec


def _container(command: list[str], image: str, pull_policy: str) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "command": command,
        # The message of a failure is then in the status of the pod, and in that of the StreamJob.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if pull_policy:
        container["imagePullPolicy"] = pull_policy
    return container


def _amounts(resources: Resources, role: str, group: WorkerGroup | None = None) -> dict[str, Any]:
    """Return requests with defaults, and a limit on memory; CPU has a limit only if the user sets one."""
    requests = _DEFAULTS[role] | _of_slots(group) | resources.requests
    limits = {"memory": requests["memory"]} | _gpus(resources, group) | resources.limits
    return {"requests": requests, "limits": limits}


def _of_slots(group: WorkerGroup | None) -> dict[str, str]:
    """Return the CPU and memory that the slots of a worker take."""
    if group is None:
        return {}
    slots, slot = group.workers.slots, group.slot
    cpu = {"cpu": f"{round(1000 * slot.cpu * slots)}m"} if slot.cpu else {}
    return cpu | ({"memory": str(slot.memory_bytes * slots)} if slot.memory_bytes else {})


def _gpus(resources: Resources, group: WorkerGroup | None) -> dict[str, str]:
    """Return the GPUs that the slots of a worker take, unless the user names another kind of GPU."""
    named = any(name.endswith(_GPU) for name in (*resources.limits, *resources.requests))
    if group is None or not group.slot.gpu or named:
        return {}
    return {f"nvidia.com{_GPU}": str(math.ceil(group.slot.gpu * group.workers.slots))}


def _environment(deployment: Deployment, role: str) -> list[dict[str, Any]]:
    kubernetes = deployment.job.kubernetes
    own: dict[str, Any] = {
        "HOME": "/tmp",
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN_PATH": f"{TOKEN_PATH}/{TOKEN_KEY}",
        "HEADGATE_JOB_NAME": deployment.name,
    }
    if role == WORKER:
        known = kubernetes.ray.gcs_storage.type == "RocksDB"
        own["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(
            RECONNECT_KNOWN_S if known else RECONNECT_S
        )
    if kubernetes.code.config_map_ref or kubernetes.code.archive:
        given = kubernetes.env.get("PYTHONPATH")
        own["PYTHONPATH"] = f"{CODE_PATH}:{given}" if isinstance(given, str) else CODE_PATH
    fields = {
        POD_IP_VARIABLE: "status.podIP",
        "HEADGATE_POD_NAME": "metadata.name",
        "HEADGATE_NAMESPACE": "metadata.namespace",
    }
    users = _variables(msgspec.to_builtins(kubernetes.env))
    user = [each for each in users if each["name"] not in own]
    listed = [{"name": name, "value": value} for name, value in own.items()]
    from_fields = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    return [*listed, *from_fields, *(each for each in user if each["name"] not in fields)]


def _variables(env: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return `kubernetes.env` in the form of a container: texts, and keys of Secrets."""
    return [
        {"name": name, "valueFrom": {"secretKeyRef": value}}
        if isinstance(value, dict)
        else {"name": name, "value": value}
        for name, value in env.items()
    ]


def _volumes(deployment: Deployment) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return mounts and their volumes."""
    code = deployment.job.kubernetes.code
    config_map = {"name": manifest_name(deployment.name, deployment.run.revision)}
    secret = {
        "secretName": deployment.token_secret,
        "defaultMode": 0o440,
        "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}],
    }
    known: list[tuple[str, str, bool, dict[str, Any]]] = [
        ("tmp", "/tmp", False, {"emptyDir": {"sizeLimit": TMP_SIZE}}),
        (
            "shm",
            "/dev/shm",
            False,
            {"emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY_SIZE}},
        ),
        ("manifest", MANIFEST_PATH, True, {"configMap": config_map}),
        ("token", TOKEN_PATH, True, {"secret": secret}),
    ]
    if code.config_map_ref:
        known.append(("code", CODE_PATH, True, {"configMap": {"name": code.config_map_ref.name}}))
    elif code.archive:
        known.append(("code", CODE_PATH, False, {"emptyDir": {"sizeLimit": TMP_SIZE}}))
    mounts = [
        {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})
        for name, path, read_only, _ in known
    ]
    return mounts, [{"name": name, **source} for name, _, _, source in known]


def _probes() -> dict[str, Any]:
    def get(path: str) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": ports.REST.name}}

    return {
        # Ray and a large image start slowly, so the other probes count only after five minutes.
        "startupProbe": get("/healthz") | {"periodSeconds": 2, "failureThreshold": 150},
        "livenessProbe": get("/healthz") | {"periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": get("/readyz") | {"periodSeconds": 5, "failureThreshold": 2},
    }
