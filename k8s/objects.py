"""The objects of a job that are not pods: names, labels, Service, policies, Secret, ConfigMap."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from ..api.manifest.model import API_VERSION, KIND
from ..api.resources import DEFAULT_GROUP
from . import ports
from .spec import Job
from .status import Run

PREFIX: Final = "headgate.io/"
JOB: Final = PREFIX + "job"
ROLE: Final = PREFIX + "role"
GROUP: Final = PREFIX + "group"
"""The slot sharing group of a worker, if its job has several."""
RUN: Final = PREFIX + "run"
REVISION: Final = PREFIX + "revision"
CONTENT: Final = PREFIX + "content"
"""Annotation: a hash of the object as it was made, to see whether it has to be made again."""
FENCED: Final = PREFIX + "fenced"
"""Annotation of a pod: `true` if its job has a log, which keeps it from doing harm once it is replaced."""
HEAD: Final = "head"
WORKER: Final = "worker"
TOKEN_KEY: Final = "auth_token"
"""Key of the token in its Secret; KubeRay asks for this name."""
MANIFEST_KEY: Final = "job.yaml"
POLL_CHANGING_MS: Final = 2_000
"""The longest time between two looks at a job while a change is expected."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings with which the operator was installed.

    Attributes:
        default_image: the image of jobs that name none.
        operator_namespace: the namespace of the operator's pods, which may use the REST API of jobs.
        operator_labels: the labels of these pods.
        metrics_from: labels of the namespaces that may read metrics; None: no other namespace may.
        poll_ms: the time between two looks at a job at rest, which does not notify the operator.
    """

    default_image: str = "headgate"
    operator_namespace: str = "headgate"
    operator_labels: dict[str, str] = field(
        default_factory=lambda: {"app.kubernetes.io/name": "headgate-operator"}
    )
    metrics_from: dict[str, str] | None = None
    poll_ms: int = 15_000

    @property
    def poll_changing_ms(self) -> int:
        """The time between two looks at a job while a change is expected."""
        return min(POLL_CHANGING_MS, self.poll_ms)


@dataclass(frozen=True, slots=True)
class Deployment:
    """One run of a job that should exist, with everything that its objects are made of.

    Attributes:
        name, namespace, uid: of the StreamJob; the uid makes it the owner of every object.
        job: its spec, from the running revision.
        run: the run; its number and the uid are the run id.
    """

    name: str
    namespace: str
    uid: str
    job: Job
    run: Run
    settings: Settings

    @property
    def run_id(self) -> str:
        return f"{self.uid}-{self.run.number}"

    @property
    def in_groups(self) -> bool:
        """Return True if the job has other slot sharing groups than the default one."""
        return list(self.job.groups) != [DEFAULT_GROUP]

    def workers_selector(self, group: str) -> dict[str, str]:
        """Return the labels that only the worker pods of a slot sharing group have."""
        return selector(self.name, WORKER, group if self.in_groups else None)

    @property
    def token_secret(self) -> str:
        given = self.job.kubernetes.ray.token_secret_ref
        return given.name if given is not None else token_name(self.name)


def head_name(job: str) -> str:
    """Return the name of the StatefulSet and the Service."""
    return f"{job}-head"


def workers_name(job: str, group: str = DEFAULT_GROUP) -> str:
    """Return the name of a group's Deployment, and, of the default group, of the PodDisruptionBudget."""
    return f"{job}-workers" + ("" if group == DEFAULT_GROUP else f"-{group}")


def ray_name(job: str) -> str:
    """Return the name of the RayCluster."""
    return f"{job}-ray"


def token_name(job: str) -> str:
    """Return the name of the Secret with the token that the operator makes."""
    return f"{job}-token"


def manifest_name(job: str, revision: str) -> str:
    """Return the name of the ConfigMap with the manifest of a revision."""
    return f"{job}-{revision}"


def selector(job: str, role: str | None = None, group: str | None = None) -> dict[str, str]:
    """Return the labels of all pods of the job, or of those of one role or group. They never change."""
    return {JOB: job} | ({ROLE: role} if role else {}) | ({GROUP: group} if group else {})


def labels(job: str, role: str | None = None) -> dict[str, str]:
    """Return the labels of an object."""
    common = {
        "app.kubernetes.io/name": "headgate",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/managed-by": "headgate-operator",
    }
    component = {"app.kubernetes.io/component": role} if role else {}
    return common | component | selector(job, role)


def owned(
    deployment: Deployment,
    api_version: str,
    kind: str,
    name: str,
    *,
    role: str | None = None,
    **body: Any,
) -> dict[str, Any]:
    """Return an object that is deleted together with the StreamJob."""
    made = {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": deployment.namespace,
            "labels": labels(deployment.name, role),
            "annotations": {},
            "ownerReferences": [owner(deployment.name, deployment.uid)],
        },
        **body,
    }
    made["metadata"]["annotations"][CONTENT] = digest(made)
    return made


def owner(name: str, uid: str) -> dict[str, Any]:
    """The owner reference to the StreamJob."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def owned_by(child: Mapping[str, Any], uid: str) -> bool:
    """Return True if the owner is the object with this uid, and not an earlier one of the same name."""
    owners = child["metadata"].get("ownerReferences", ())
    return any(each.get("uid") == uid for each in owners)


def digest(value: Any) -> str:
    """Return a hash of a value with ten characters."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def manifest(deployment: Deployment) -> dict[str, Any]:
    """Return the ConfigMap with the StreamJob of this revision, for the pods and for a rollback."""
    text = yaml.safe_dump(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": deployment.name, "namespace": deployment.namespace},
            "spec": deployment.job.spec,
        },
        sort_keys=False,
    )
    revision = deployment.run.revision
    made = owned(
        deployment, "v1", "ConfigMap", manifest_name(deployment.name, revision), data={MANIFEST_KEY: text}
    )  # fmt: skip
    made["metadata"]["labels"][REVISION] = revision
    return made | {"immutable": True}


def token(deployment: Deployment) -> dict[str, Any]:
    """Return the Secret of the token without its value: `Create` puts 256 random bits there."""
    return owned(deployment, "v1", "Secret", token_name(deployment.name), type="Opaque")


def supporting(deployment: Deployment) -> list[dict[str, Any]]:
    """Return the objects around the pods that may be changed while the pods run."""
    found = [_service(deployment), _network_policy(deployment)]
    if deployment.job.kubernetes.ray.mode == "Managed":
        found.append(_disruption_budget(deployment))
    return found


def _service(deployment: Deployment) -> dict[str, Any]:
    return owned(
        deployment,
        "v1",
        "Service",
        head_name(deployment.name),
        role=HEAD,
        spec={
            "type": "ClusterIP",
            "selector": selector(deployment.name, HEAD),
            # Workers and the operator talk to the head before it is ready.
            "publishNotReadyAddresses": True,
            "ports": [
                {"name": port.name, "port": port.number, "targetPort": port.name, "protocol": "TCP"}
                for port in ports.NAMED
            ],
        },
    )


def _network_policy(deployment: Deployment) -> dict[str, Any]:
    """Allow connections from pods of the job, the operator, readers of metrics, and an external Ray."""
    settings = deployment.settings
    namespace = {"kubernetes.io/metadata.name": settings.operator_namespace}
    ingress: list[dict[str, Any]] = [
        {
            "from": [{"podSelector": {"matchLabels": selector(deployment.name)}}],
            "ports": [port.policy() for port in ports.ALL],
        },
        {
            "from": [
                {
                    "namespaceSelector": {"matchLabels": namespace},
                    "podSelector": {"matchLabels": settings.operator_labels},
                }
            ],
            "ports": [ports.REST.policy()],
        },
    ]
    if deployment.job.kubernetes.ray.mode == "External":
        # Nothing is known of these nodes, not even that they are pods; they need the token.
        ingress.append({"ports": [port.policy() for port in ports.OF_A_GUEST]})
    if settings.metrics_from is not None:
        ingress.append(
            {
                "from": [{"namespaceSelector": {"matchLabels": settings.metrics_from}}],
                "ports": [ports.METRICS.policy()],
            }
        )
    return owned(
        deployment,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        deployment.name,
        spec={
            "podSelector": {"matchLabels": selector(deployment.name)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    )


def _disruption_budget(deployment: Deployment) -> dict[str, Any]:
    """Let a drain take one worker at a time. The head has no budget: with one pod it would block drains."""
    return owned(
        deployment,
        "policy/v1",
        "PodDisruptionBudget",
        workers_name(deployment.name),
        role=WORKER,
        spec={
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(deployment.name, WORKER)},
        },
    )
