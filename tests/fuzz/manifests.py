"""Damaged and rearranged manifests: each is loaded and checked, or refused with located mistakes.

The manifests of the documentation and the examples are taken apart: values are replaced, keys are lost,
renamed or doubled, parts of one are put into another, and the text itself is damaged.
"""

from __future__ import annotations

import ast
import copy
import os
import random
import re
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

import headgate
from headgate.connectors.spark.process import SparkProcess
from headgate.connectors.spark.task import Done
from headgate.errors import HeadgateError, InternalError, SourceError
from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job, schema

_REFERENCE = re.compile(r"(?!os:|json:)[a-z_]\w*(\.\w+)*:[A-Za-z_]\w*")
_NAMES = ["orders", "clicks", "n", "user", "at", "price", "x", "a", "b"]
_TEXTS = [
    "1s", "10s", "1m", "1d", "n > 0", "n + 1 AS m", "count()", "sum(n)", "max(price)", "quantile(n, 0.5)",
    "n = 1", "os:getcwd", "json:loads", "long", "string", "timestamp", "UTC", "Europe/Berlin", "1kb", "*",
    "{a} b+ {c}", "a b",
]  # fmt: skip
_ROOT = Path(headgate.__file__).parent
_BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**63, 2**70, 1.5, float("nan"), float("inf"), "", " ", "a", "user",
    "count()", "sum(n)", "1s", "0s", "-1s", "1e9d", "1ms", "99999999d", "x" * 2_000, "${X}", "${X:-1}",
    "${", "$${X}", "ünï", "a b", "a.b", "a/b", "../..", "\x00", "1mb", "yes", "2025-01-01", "module:",
    "no_such_module:f", "os:getcwd", [], {}, [[]], [{}], {"a": None}, ["a", "a"], {"": 1}, "*", "n > 0",
    "n IN (1, 2)", "((((",
]  # fmt: skip


@cache
def corpus() -> list[dict[str, Any]]:
    """The whole manifests of the documentation, the examples and the tests."""
    texts = [path.read_text() for path in sorted(_ROOT.glob("examples/**/*.yaml"))]
    for page in sorted(_ROOT.glob("docs/*.md")):
        texts += _BLOCK.findall(page.read_text())
    for module in sorted(_ROOT.glob("tests/*/*.py")):
        if "kind: StreamJob" in (code := module.read_text()):
            texts += [
                node.value
                for node in ast.walk(ast.parse(code))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
    found = [_loaded(text) for text in texts if "kind: StreamJob" in text]
    whole = [_with_functions(each) for each in found if each and each.get("spec")]
    loaded = [each for each in whole if _loads(each)]
    assert len(loaded) > 5, len(loaded)
    return loaded


def _with_functions(part: Any) -> Any:
    """The same, with a function that there is in the place of those of the reader's own modules."""
    if isinstance(part, dict):
        return {key: _with_functions(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_with_functions(value) for value in part]
    named = isinstance(part, str) and _REFERENCE.fullmatch(part)
    return f"{__name__}:given" if named else part


def given(*arguments: Any) -> Any:
    """The function that all steps of Python call."""
    return arguments[0] if arguments else None


def _loads(manifest: dict[str, Any]) -> bool:
    try:
        load_job(yaml.safe_dump(manifest), env={"X": "1"})
    except HeadgateError:
        return False
    return True


def _loaded(text: str) -> Any:
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError:
        return None  # of a test of mistakes
    return loaded if isinstance(loaded, dict) else None


@cache
def _schema() -> Any:
    return schema()["properties"]["spec"]


def made(rng: random.Random, part: Mapping[str, Any], depth: int = 0) -> Any:
    """A random value of the shape that the JSON schema asks for, most of the time."""
    if rng.random() < 0.03:
        return copy.deepcopy(rng.choice(_VALUES))
    if "anyOf" in part:
        return made(rng, rng.choice(part["anyOf"]), depth)
    if "enum" in part:
        return rng.choice(part["enum"])
    kinds = part.get("type", "string")
    match rng.choice(kinds) if isinstance(kinds, list) else kinds:
        case "object":
            properties, required = part.get("properties", {}), part.get("required", ())
            few = min(len(properties), 2)
            named = [*required, *rng.sample(sorted(properties), rng.randrange(few + 1))]
            names = [name for name in named if name in properties and depth < 6]
            table = {name: made(rng, properties[name], depth + 1) for name in names}
            if isinstance(more := part.get("additionalProperties"), dict):
                table |= {rng.choice(_NAMES): made(rng, more, depth + 1) for _ in range(2)}
            return table
        case "array":
            return [made(rng, part.get("items", {}), depth + 1) for _ in range(rng.randrange(3))]
        case "integer":
            return rng.choice([0, 1, 2, 100, -1, 2**40])
        case "number":
            return rng.choice([0, 0.5, 1, 1e6, -1])
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case _:
            return rng.choice([*_TEXTS, *_NAMES])


def run(rng: random.Random) -> None:
    """One manifest."""
    manifest = copy.deepcopy(rng.choice(corpus()))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        _change(rng, manifest)
    text = yaml.safe_dump(
        manifest, allow_unicode=True, default_flow_style=rng.choice([None, True, False])
    )
    for _ in range(rng.choice([0, 0, 0, 0, 1, 3])):
        text = _damaged(rng, text)
    # Names of modules and files are looked up from here.
    said = None
    with tempfile.TemporaryDirectory(prefix="headgate-fuzz-") as directory:
        os.chdir(directory)
        sys.dont_write_bytecode = True
        try:
            with patch.object(SparkProcess, "run", _no_spark):
                job = load_job(text + "\n", env={"X": rng.choice(["1", "", "a: b", "[1"])})
                list(runnable(job).problems())
                runnable(job).spec()
        except InternalError:
            raise
        except HeadgateError as error:
            said = str(error)
    if said is not None and not said.strip():
        raise AssertionError("an error without a word")


def _no_spark(process: SparkProcess) -> Done:
    """A query without a schema would have Spark analyse it: Java starts longer than a case may take."""
    raise SourceError("no Spark is started here")


def _paths(part: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to everything in a manifest."""
    found = [path] if path else []
    if isinstance(part, dict):
        for key, value in part.items():
            found += _paths(value, (*path, key))
    elif isinstance(part, list):
        for index, value in enumerate(part):
            found += _paths(value, (*path, index))
    return found


def _change(rng: random.Random, manifest: dict[str, Any]) -> None:
    ways = _paths(manifest)
    if not ways:
        return
    # The first levels are few and quickly lost; most of what is worth changing lies deeper.
    way = rng.choice([way for way in ways if len(way) > 2] or ways)
    owner: Any = manifest
    for key in way[:-1]:
        owner = owner[key]
    key = way[-1]
    match rng.randrange(10):
        case 7 | 8 | 9:
            section = rng.choice(["operators", "operators", "sources", "sinks"])
            spec = manifest.get("spec")
            parts = spec.get(section) if isinstance(spec, dict) else None
            if isinstance(parts, dict):
                there = list(parts)
                shape = _schema()["properties"][section]["additionalProperties"]
                name = rng.choice([*there, "x", "y"])
                parts[name] = made(rng, shape)
                if isinstance(parts[name], dict) and section != "sources":
                    sources = (
                        list(spec.get("sources") or {"x": 0}) if isinstance(spec, dict) else there
                    )
                    parts[name].setdefault("from", rng.choice([*there, *sources]))
        case 0:
            del owner[key]
        case 1 | 2:
            owner[key] = copy.deepcopy(rng.choice(_VALUES))
        case 3 if isinstance(owner, dict):
            owner[rng.choice([str(key) + "x", str(key).upper(), "from", "name", 1, None])] = (
                owner.pop(key)
            )
        case 4 | 5:
            other: Any = rng.choice(corpus())
            for step in rng.choice(_paths(other)):
                other = other[step]
            owner[key] = copy.deepcopy(other)
        case _ if isinstance(owner, dict):
            other = rng.choice(corpus())
            section = rng.choice(["sources", "operators", "sinks"])
            parts = other["spec"].get(section) or {}
            if parts:
                name = rng.choice(list(parts))
                owner[name] = copy.deepcopy(parts[name])


def _damaged(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    match rng.randrange(4):
        case 0:
            return text[:at] + text[at + 1 :]
        case 1:
            odd = rng.choice(
                [
                    "\t",
                    ":",
                    "{",
                    "]",
                    "&a ",
                    "*a",
                    "!!python/object:os.system ",
                    "#",
                    "'",
                    "\r",
                    "- ",
                ]
            )
            return text[:at] + odd + text[at:]
        case 2:
            return text[:at]
        case _:
            lines = text.splitlines(keepends=True)
            rng.shuffle(lines) if rng.random() < 0.2 else lines.reverse()
            return "".join(lines)
