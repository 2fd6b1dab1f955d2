"""The operator may do what it does, and no more."""

from __future__ import annotations

from typing import Any

import yaml

from headgate.k8s import actions as act
from headgate.k8s.permissions import PERMISSIONS
from headgate.tests.k8s.model.run import Model
from headgate.tests.sim.mutant import PACKAGE

PLURALS = {
    "StreamJob": "streamjobs",
    "StreamSnapshot": "streamsnapshots",
    "StatefulSet": "statefulsets",
    "Deployment": "deployments",
    "ConfigMap": "configmaps",
    "Service": "services",
    "Secret": "secrets",
    "NetworkPolicy": "networkpolicies",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Job": "jobs",
}
SPARE = {
    ("rayclusters", "create"),
    ("rayclusters", "delete"),
    ("events", "create"),
    ("events", "patch"),
}
"""What the model does not do, beside the verbs with which the shell looks at things."""


def allowed() -> set[tuple[str, str]]:
    return {
        (resource, verb)
        for each in PERMISSIONS
        for resource in each.resources
        for verb in each.verbs
    }


def used(action: act.Action, kind: str) -> tuple[str, str] | None:
    """The permission that an action about an object of this kind needs."""
    match action:
        case act.SetStatus():
            return f"{PLURALS[kind]}/status", "patch"
        case act.AddFinalizer() | act.RemoveFinalizer():
            return PLURALS[kind], "patch"
        case act.Create(made):
            return PLURALS[made["kind"]], "create"
        case act.Replace(made, _):
            return PLURALS[made["kind"]], "patch"
        case act.Scale(scaled):
            return PLURALS[scaled], "patch"
        case act.Delete(deleted):
            return PLURALS[deleted], "delete"
    return None


def test_what_the_model_does_is_allowed_and_what_is_allowed_is_done(monkeypatch: Any) -> None:
    from headgate.tests.k8s.model import operator

    needed: set[tuple[str, str]] = set()
    plain = operator.Operator._do

    def noted(self: Any, resource: Any, action: act.Action, **how: Any) -> None:
        found = used(action, resource["kind"])
        if found is not None:
            needed.add(found)
        plain(self, resource, action, **how)

    monkeypatch.setattr(operator.Operator, "_do", noted)
    for seed in range(8):
        Model(seed).run()
    assert needed <= allowed()
    looks = ("get", "list", "watch", "update")
    spare = {each for each in allowed() - needed if each[1] not in looks} - SPARE
    spare = {each for each in spare if each[0] != "leases"}
    assert {each for each in spare if each[1] != "patch"} == set()
    assert {resource for resource, _ in spare} <= {
        "services",
        "networkpolicies",
        "poddisruptionbudgets",
    }


def test_the_chart_grants_what_is_needed() -> None:
    """The rules stand in one template, with conditions around some of them."""
    text = (PACKAGE / "helm" / "headgate" / "templates" / "_rbac.tpl").read_text()
    _, _, rules = text.partition('{{- define "headgate.operatorRules" -}}')
    lines = [line for line in rules.splitlines() if "{{" not in line]
    granted = {
        (group, resource, verb)
        for rule in yaml.safe_load("\n".join(lines))
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    needed = {
        (each.group, resource, verb)
        for each in PERMISSIONS
        for resource in each.resources
        for verb in each.verbs
        if resource != "leases"  # in the operator's own namespace only
    }
    assert needed - granted == set()


def test_nothing_is_open() -> None:
    assert not any("*" in (each.group, *each.resources, *each.verbs) for each in PERMISSIONS)
    (secrets,) = (each for each in PERMISSIONS if "secrets" in each.resources)
    assert secrets.verbs == ("get", "create")
