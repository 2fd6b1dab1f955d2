"""The OpenAPI 3.1 document of the REST API, made from the table of routes and the types of answers.

`python -m headgate.runtime.rest.openapi > docs/openapi.json` writes the committed one.
"""

from __future__ import annotations

import json
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final

import msgspec

from .answers import PROBLEM_TYPE, Answer, Command, Problem
from .routes import PARAMETERS, ROUTES, Route

_REF: Final = "#/components/schemas/{name}"
_SCHEMAS: Final = {int: {"type": "integer", "minimum": 0}, str: {"type": "string"}}


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """Return the whole document; it must not be changed."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "headgate REST API",
            "version": "1",
            "description": "One running job, asked at its coordinator. Paths begin with the version of the "
            "API: fields may be added in a version, but none is removed or changes its meaning.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": _components(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": {str(route.status): _good(route)},
    }
    general = (421,) if route.public else (401, 403, 421)
    for status in sorted({*general, *route.problems}):
        found["responses"][str(status)] = _refusal(status)
    parameters = [_in_path(name) for name in route.parameters]
    parameters += [_in_query(name, text, int) for name, text in route.query]
    parameters += [{**_in_query(name, text, str), "required": True} for name, text in route.texts]
    parameters += [_in_query(name, text, str) for name, text in route.optional]
    if parameters:
        found["parameters"] = parameters
    if route.body is not None:
        content = {"application/json": {"schema": _reference(route.body)}}
        found["requestBody"] = {"required": True, "content": content}
    if route.public:
        found["security"] = []
    return found


def _good(route: Route) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string" if route.media.startswith("text/") else "object"}
    if route.answer is not None:
        schema = _reference(route.answer)
    return {
        "description": HTTPStatus(route.status).phrase,
        "content": {
            route.media: {"schema": schema},
            **({route.binary: {"schema": {"type": "string"}}} if route.binary else {}),
        },
    }


def _refusal(status: int) -> dict[str, Any]:
    return {
        "description": HTTPStatus(status).phrase,
        "content": {PROBLEM_TYPE: {"schema": _reference(Problem)}},
    }


def _in_path(name: str) -> dict[str, Any]:
    parameter = PARAMETERS[name]
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": parameter.summary,
        "schema": _SCHEMAS[parameter.type],
    }


def _in_query(name: str, text: str, kind: type[Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": _SCHEMAS[kind]}


def _types() -> list[type[Answer | Command | Problem]]:
    """Yield every type that a route names, once."""
    found: dict[Any, None] = {Problem: None}
    for route in ROUTES:
        found.update(
            dict.fromkeys(t for t in (route.answer, route.body, route.events) if t is not None)
        )
    return list(found)


def _components() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_types(), ref_template=_REF)
    return dict(sorted(components.items()))


def _reference(type_: type[Any]) -> dict[str, str]:
    return {"$ref": _REF.format(name=type_.__name__)}


def text() -> str:
    """Return the text of the document as it is committed."""
    return json.dumps(document(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(text(), end="")
