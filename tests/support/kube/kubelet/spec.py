"""The meaning of a pod's specification, without I/O: images, environment, quantities, resources."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Object = dict[str, Any]
Lookup = Callable[[str, str], Mapping[str, bytes] | None]
"""The data of a ConfigMap or Secret (`configmaps` or `secrets`) by its name, or None if it is not there."""

SUFFIXES = {
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
FIELD_KEY = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")


class NotReadyError(Exception):
    """Something that the pod refers to is not there (yet)."""


def quantity(text: str | float) -> float:
    """A Kubernetes quantity such as `500m` or `1Gi` as a number."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    return float(match[1]) * (SUFFIXES[match[2]] if match[2] else 1)


def requests(pod: Object) -> dict[str, float]:
    """CPU (cores) and memory (bytes) that a pod asks for."""
    asked = [c.get("resources", {}) for c in pod["spec"]["containers"]]
    both = [{**a.get("limits", {}), **a.get("requests", {})} for a in asked]
    return {kind: sum(quantity(one.get(kind, 0)) for one in both) for kind in ("cpu", "memory")}


def expanded(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` replaced by the variable where there is one; `$$` is a dollar sign."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return REFERENCE.sub(replace, text)


def environment(
    container: Object, pod: Object, base: Mapping[str, str], lookup: Lookup
) -> dict[str, str]:
    """The variables of a container.

    Raises:
        NotReadyError: a ConfigMap, a Secret or a key that is not optional is missing.
    """
    env = dict(base)
    for source in container.get("envFrom", []):
        for kind, name in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
            if kind in source:
                found = data(source[kind], name, lookup)
                prefix = source.get("prefix", "")
                env |= {prefix + key: value.decode() for key, value in found.items()}
    for variable in container.get("env", []):
        value = _value(variable, container, pod, lookup)
        if value is not None:
            env[variable["name"]] = expanded(value, env) if "value" in variable else value
    return env


def _value(variable: Object, container: Object, pod: Object, lookup: Lookup) -> str | None:
    source = variable.get("valueFrom")
    if source is None:
        return str(variable.get("value", ""))
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resource(pod, container, source["resourceFieldRef"])
    kind, name = (
        ("configMapKeyRef", "configmaps")
        if "configMapKeyRef" in source
        else ("secretKeyRef", "secrets")
    )
    reference = source[kind]
    found = data(reference, name, lookup)
    if reference["key"] not in found:
        if reference.get("optional"):
            return None
        raise NotReadyError(f"{name} {reference['name']} has no key {reference['key']}")
    return found[reference["key"]].decode()


def data(reference: Object, kind: str, lookup: Lookup) -> Mapping[str, bytes]:
    """Return the contents of a ConfigMap or Secret; nothing if it is missing and optional.

    Raises:
        NotReadyError: it is missing, and not optional.
    """
    found = lookup(kind, reference["name"])
    if found is None and not reference.get("optional"):
        raise NotReadyError(f"{kind} {reference['name']} not found")
    return found or {}


def field(pod: Object, path: str) -> str:
    """A field of the pod, as the downward API names it."""
    match = FIELD_KEY.fullmatch(path)
    if match:
        return str(pod["metadata"].get(match[1], {}).get(match[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        items = pod["metadata"].get(path.split(".")[1], {}).items()
        return "\n".join(f'{key}="{value}"' for key, value in sorted(items))
    found: Any = pod
    for part in path.split("."):
        found = found.get(part, "")
    return ",".join(ip["ip"] for ip in found) if path == "status.podIPs" else str(found)


def resource(pod: Object, container: Object, reference: Object) -> str:
    """A limit or request of a container, in units of the divisor."""
    named = reference.get("containerName")
    of = next((c for c in pod["spec"]["containers"] if c["name"] == named), container)
    kind, name = reference["resource"].split(".", 1)
    resources = of.get("resources", {})
    amount = resources.get(kind, {}).get(name) or resources.get("limits", {}).get(name, 0)
    divisor = quantity(reference.get("divisor") or 1) or 1
    return str(int(-(-quantity(amount) // divisor)))


def service_environment(services: list[Object]) -> dict[str, str]:
    """The variables that tell a container of the services of its namespace."""
    env = {}
    for service in services:
        address = service["spec"].get("clusterIP")
        if address in (None, "", "None"):
            continue
        name = service["metadata"]["name"].upper().replace("-", "_")
        ports = service["spec"].get("ports", [])
        env[f"{name}_SERVICE_HOST"] = address
        for number, port in enumerate(ports):
            if number == 0:
                env[f"{name}_SERVICE_PORT"] = str(port["port"])
            if port.get("name"):
                key = port["name"].upper().replace("-", "_")
                env[f"{name}_SERVICE_PORT_{key}"] = str(port["port"])
    return env


def selects(selector: Mapping[str, str] | None, labels: Mapping[str, str] | None) -> bool:
    """Return True if a service's selector, which must not be empty, fits the labels."""
    return bool(selector) and all((labels or {}).get(k) == v for k, v in (selector or {}).items())


def port_number(container: Object, port: int | str) -> int:
    """A port by number, or by its name among the container's ports."""
    if isinstance(port, int) or port.isdigit():
        return int(port)
    return next(p["containerPort"] for p in container.get("ports", []) if p.get("name") == port)
