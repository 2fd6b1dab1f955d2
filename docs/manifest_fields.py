"""Prints the tables of docs/manifest.md from the model: `python docs/manifest_fields.py`.

With `--kubernetes` it prints those of docs/kubernetes.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from headgate.api.manifest.steps import VERBS
from headgate.k8s import ports
from headgate.k8s.crds import schema_of, stream_jobs, stream_snapshots
from headgate.runtime.manifest import spec_fields


def main() -> None:
    spec = spec_fields().schema()
    print_table("spec", spec)
    for name in ("checkpoint", "restart"):
        print_table(f"spec.{name}", spec["properties"][name])
    print_table("A group of resources", spec["properties"]["resources"]["additionalProperties"])
    sources = spec["properties"]["sources"]["additionalProperties"]
    sinks = spec["properties"]["sinks"]["additionalProperties"]
    operators = spec["properties"]["operators"]["additionalProperties"]
    print_table("A source", sources)
    for name, fields in connectors(sources).items():
        print_table(f"source `{name}`", fields)
    kafka = sources["properties"]["kafka"]["properties"]
    print_table("start and stop of kafka", kafka["start"]["anyOf"][0])
    redis = sources["properties"]["redis"]["properties"]
    print_table("start and stop of redis", redis["start"]["anyOf"][0])
    nats = sources["properties"]["nats"]["properties"]
    print_table("start and stop of nats", nats["start"]["anyOf"][0])
    rabbitmq = sources["properties"]["rabbitmq"]["properties"]
    print_table("start and stop of rabbitmq", rabbitmq["start"]["anyOf"][0])
    kinesis = sources["properties"]["kinesis"]["properties"]
    print_table("start and stop of kinesis", kinesis["start"]["anyOf"][0])
    pulsar = sources["properties"]["pulsar"]["properties"]
    print_table("start of pulsar", pulsar["start"]["anyOf"][0])
    formats = kafka["format"]["anyOf"][0]
    print_table("format of kafka", formats)
    for name, fields in formats["properties"].items():
        print_table(f"format `{name}`", fields)
    print_table("registry of a format", formats["properties"]["avro"]["properties"]["registry"])
    print_table("security of kafka", kafka["security"])
    print_table("eventTime", sources["properties"]["eventTime"])
    print_table("An operator", operators)
    print_verbs()
    for name, field in operators["properties"].items():
        if "properties" in field and name != "eventTime":
            print_table(name, field)
    lookup = operators["properties"]["lookup"]["properties"]
    print_table("table of lookup", lookup["table"])
    print_table("postgres of lookup", lookup["postgres"])
    print_table("A reference with arguments", operators["properties"]["process"]["anyOf"][0])
    print_table("onError", operators["properties"]["onError"]["anyOf"][0])
    print_table("queryable", operators["properties"]["queryable"]["anyOf"][0])
    print_table("A sink", sinks)
    for name, fields in connectors(sinks).items():
        print_table(f"sink `{name}`", fields)


def print_verbs() -> None:
    """Which fields of an operator have an effect for which verb, beside those that all have."""
    print("#### The verbs, and the fields beside them\n")
    print("| verb | fields of an operator that have an effect for it |\n|---|---|")
    for verb in VERBS.values():
        print(f"| `{verb.name}` | {', '.join(f'`{field}`' for field in verb.fields)} |")
    print()


def print_kubernetes() -> None:
    """The section `kubernetes`, the spec of a StreamSnapshot, and what both resources report."""
    job, snapshot = schema_of(stream_jobs()), schema_of(stream_snapshots())
    print_tree("kubernetes", job["properties"]["spec"]["properties"]["kubernetes"])
    print_tree("StreamSnapshot: spec", snapshot["properties"]["spec"])
    print("#### Ports\n\n| port | name | who listens |\n|---|---|---|")
    for port in ports.ALL:
        numbers = f"{port.number} to {port.last}" if port.last else port.number
        print(f"| {numbers} | `{port.name}` | {port.meaning} |")
    print()
    for title, each in (("StreamJob: status", job), ("StreamSnapshot: status", snapshot)):
        print_table(title, each["properties"]["status"])


def print_tree(title: str, section: Mapping[str, Any]) -> None:
    """The table of a section, and those of the sections in it but for names of objects."""
    print_table(title, section)
    for name, field in section["properties"].items():
        if field.get("properties", {}).keys() - {"name"}:
            print_tree(f"{title}.{name}", field)


def connectors(section: Mapping[str, Any]) -> dict[str, Any]:
    """The connectors among the fields of a source or sink."""
    return {
        name: field
        for name, field in section["properties"].items()
        if field.get("description", "").startswith(("read with", "write with"))
    }


def print_table(title: str, section: Mapping[str, Any]) -> None:
    required = section.get("required", [])
    print(f"#### {title}\n")
    fields = section.get("properties", {})
    if not fields:
        print("No fields.\n")
        return
    print("| field | required | type | meaning |\n|---|---|---|---|")
    for name, field in fields.items():
        needed = "yes" if name in required else ""
        meaning = field.get("description", "").replace("|", "\\|")
        print(f"| `{name}` | {needed} | {kind(field)} | {meaning} |")
    print()


def kind(field: Mapping[str, Any]) -> str:
    """The type of a field in words; `${NAME}` may stand for any of them."""
    if "enum" in field:
        return " \\| ".join(f"`{word}`" for word in field["enum"])
    if "anyOf" in field:
        kinds = [kind(each) for each in field["anyOf"] if each.get("pattern") != r"\$\{"]
        return " or ".join(dict.fromkeys(kinds))
    match field.get("type"):
        case "object" | ["object", "null"]:
            if field.get("properties") and len(connectors(field)) == len(field["properties"]):
                return "mapping: one of the other sources"
            if field.get("properties", {}).keys() == {"name"}:
                return "`{name: ...}`"
            return "mapping, see its table" if "properties" in field else "mapping"
        case "array":
            return f"list of {kind(field['items'])}"
        case "string":
            return "text"
        case "integer":
            return "whole number"
        case "number":
            return "number"
        case "boolean":
            return "`true` \\| `false`"
    return "any value"


if __name__ == "__main__":
    print_kubernetes() if "--kubernetes" in sys.argv else main()
