"""The operator may do what it does, and no more."""

from __future__ import annotations

from typing import Any

from headgate.k8s import actions as act
from headgate.k8s.permissions import FILE, JOBS, KUBERAY, LEASE, LEASE_CREATION, rendered
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
    "Pod": "pods",
}


def allowed() -> set[tuple[str, str]]:
    return {(resource, verb) for each in JOBS for resource in each.resources for verb in each.verbs}


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
        case act.Delete(deleted, _, _, _):
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
    for seed in range(12):
        Model(seed).run()
    assert needed <= allowed()
    # The settings of the model's operator never change, so it replaces nothing.
    replaced = {"services", "networkpolicies", "poddisruptionbudgets"}
    unused = {each for each in allowed() - needed if each[1] not in ("get", "list", "watch")}
    # Surplus savepoints are deleted by few seeds only; tests/kube/test_rights.py sees the operator do it.
    assert unused - {("streamsnapshots", "delete")} == {
        ("events", "create"),
        ("streamjobs/finalizers", "update"),
        ("streamsnapshots/finalizers", "update"),
        *((resource, "patch") for resource in replaced),
    }


def test_the_chart_has_this_table() -> None:
    assert (PACKAGE / FILE).read_text(encoding="utf-8") == rendered()


def test_nothing_is_open() -> None:
    every = (*JOBS, *KUBERAY, *LEASE, *LEASE_CREATION)
    assert not any("*" in (each.group, *each.resources, *each.verbs) for each in every)
    (secrets,) = (each for each in every if "secrets" in each.resources)
    assert secrets.verbs == ("get", "create")
