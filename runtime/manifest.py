"""Loading a StreamJob manifest: the one place where the model meets connectors, options and the job."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..api.manifest.build import build_job
from ..api.manifest.fields import Section
from ..api.manifest.model import json_schema, spec_section
from ..api.manifest.registry import Toolbox
from ..connectors.registry import SINKS, SOURCES
from ..errors import UsageError
from .job import Job, runnable
from .options.registry import Options, current_key


def load_job(
    source: str | Path,
    *,
    env: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> Job:
    """The job of a manifest. Nothing is started, no source or sink is opened.

    Args:
        source: a path, or the manifest itself (any text with a line break).
        env: what `${NAME}` may refer to; by default the environment of this process.
        variables: more of these; they win over `env`.
        options: options, under their current keys, that win over those of the manifest.

    Raises:
        ManifestErrors: every mistake of the manifest, each with its line and what to do about it.
        UsageError: the file cannot be read.
    """
    text, name = _read(source)
    known = {**(os.environ if env is None else env), **(variables or {})}
    job = build_job(text, name, known, toolbox(options or {}))
    assert isinstance(job, Job)
    return job


def toolbox(options: Mapping[str, str]) -> Toolbox:
    """Everything a manifest may name; `options` are put on top of the job's."""

    def new_job(name: str, **arguments: Any) -> Job:
        job = Job(name, **arguments)
        runnable(job).override(options)
        return job

    return Toolbox(
        sources=SOURCES,
        sinks=SINKS,
        new_job=new_job,
        check_options=Options.problems,
        current_key=current_key,
    )


@functools.cache
def spec_fields() -> Section:
    """The table of a manifest's `spec`: which fields there are, and of what kind."""
    return spec_section(SOURCES, SINKS)


def schema() -> dict[str, Any]:
    """The JSON schema of manifests (docs/streamjob.schema.json)."""
    return json_schema(SOURCES, SINKS)


def _read(source: str | Path) -> tuple[str, str]:
    if isinstance(source, str) and "\n" in source:
        return source, "manifest"
    try:
        return Path(source).read_text(encoding="utf-8"), str(source)
    except OSError as error:
        raise UsageError(
            f"manifest cannot be read path=`{source}` reason=`{error.strerror}`"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"manifest is not UTF-8 text path=`{source}`") from None


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
