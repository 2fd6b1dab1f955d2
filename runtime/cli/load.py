"""Loads the job of a file on the command line: a manifest, or a Python script that defines one.

It also has the arguments and options that several verbs share.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ...errors import HeadgateError, OptionError, UsageError

if TYPE_CHECKING:
    from ..finding import Where
    from ..job import Job

JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of a running job.")]
MANIFEST_SUFFIXES = (".yaml", ".yml")
_FIX_JOB = "give the script one module-level variable: job = hg.Job(...)"
File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="A manifest (.yaml), or a script that defines `job` (.py)."
    ),
]
Parallelism = Annotated[
    int | None,
    typer.Option(
        "-p", "--parallelism", min=1, help="Subtasks of operators that set no own number."
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URI",
        help="Find jobs by where their checkpoints are: the address in `checkpoint.storage`. No process of "
        "the job has to live.",
    ),
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="ADDRESS",
        help="Find jobs by the Ray cluster on which they run: `auto`, `host:port` or `ray://host:port`.",
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="PATH",
        help="A file with the token of the job, for a job that is found by --storage.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("-D", "--define", metavar="KEY=VALUE", help="Set an option (`headgate options`)."),
]


class RuntimeMode(StrEnum):
    """The way a job runs."""

    STREAMING = "streaming"
    BATCH = "batch"
    AUTOMATIC = "automatic"


Mode = Annotated[
    RuntimeMode | None,
    typer.Option(
        "--runtime-mode",
        help="`batch`: as a PySpark job, to the end of bounded sources; `automatic`: that if all sources "
        "are bounded.",
    ),
]


def with_mode(settings: Sequence[str] | None, mode: RuntimeMode | None) -> list[str]:
    """Return `settings` with the runtime mode as one of them."""
    named = [] if mode is None else [f"execution.runtime-mode={mode.upper()}"]
    return [*(settings or ()), *named]


def load_file(
    path: Path, parallelism: int | None = None, settings: Sequence[str] | None = None
) -> Job:
    """Return the job that `path` defines, with the settings of the command line applied.

    Raises:
        UsageError: there is no such job, or it is wrong as written; nothing was started.
    """
    texts = _with_parallelism(parse_settings(settings or ()), parallelism)
    if not path.is_file():
        raise UsageError(f"no such file path=`{path}`")
    if path.suffix in MANIFEST_SUFFIXES:
        from ..manifest import load_job

        return load_job(path, options=texts)
    if path.suffix == ".py":
        from ..job import runnable

        job = _job_of(_import(path.resolve()), path)
        runnable(job).override(texts)
        return job
    raise UsageError(
        f"neither a manifest nor a script path=`{path}`",
        fix="give a .yaml file, or a .py file that defines a module-level `job`",
    )


def where(
    storage: str | None, cluster: str | None, token_file: str | None, settings: list[str] | None
) -> Where:
    """Return where the command line says to look for jobs.

    Raises:
        UsageError: it names two places.
    """
    from ..finding import Where

    options = parse_settings(settings or ())
    return Where(storage or "", cluster or "", token_file or "", options)


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """`key=value` texts as a mapping under the current keys.

    Raises:
        OptionError: with everything that is wrong with them.
    """
    from ..options.registry import Options

    texts: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise OptionError(f"not a setting value=`{setting}`", fix="write -D key=value")
        texts[key.strip()] = value.strip()
    return Options(texts).explicit()


def _with_parallelism(texts: dict[str, str], parallelism: int | None) -> dict[str, str]:
    from ..options.execution import PARALLELISM

    if parallelism is None:
        return texts
    if PARALLELISM.key in texts:
        raise OptionError(
            f"parallelism is set twice option=`{PARALLELISM.key}`", fix="keep -p, or -D"
        )
    return {**texts, PARALLELISM.key: str(parallelism)}


def _import(path: Path) -> ModuleType:
    """Import a script under its own name, so that its classes and functions are found again."""
    name = path.stem
    if name in sys.modules or name in sys.stdlib_module_names:
        raise UsageError(
            f"the script hides a module of the same name name=`{name}`",
            where=str(path),
            fix="rename the file",
        )
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError("not a Python script", where=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    with _nothing_runs(path):
        try:
            spec.loader.exec_module(module)
        except HeadgateError as error:
            if not error.where:
                error.where = _place(error, path)
            raise
        except BaseException as error:
            if type(error) is KeyboardInterrupt:
                raise  # Ctrl-C; a class derived from it is the script's own
            _refuse(error, path)
    return module


def _refuse(error: BaseException, path: Path) -> NoReturn:
    """Raise UsageError for an exception of the script, with its place in the script."""
    raise UsageError(
        f"the script cannot be loaded: {type(error).__name__}: {error}", where=_place(error, path)
    ) from None


def _place(error: BaseException, path: Path) -> str:
    """The line of the script that an exception came through."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename) == path:
            line = frame.lineno
    return str(path) if line is None else f"{path}:{line}"


@contextlib.contextmanager
def _nothing_runs(path: Path) -> Iterator[None]:
    """`job.run()` at the top level of a script would run it while it is only being read."""
    from .. import job

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UsageError(
            "the script runs its job while it is imported",
            where=str(path),
            fix='put job.run() under `if __name__ == "__main__":`',
        )

    original = job.checked_spec  # all ways to run a job begin with it
    job.checked_spec = refuse
    try:
        yield
    finally:
        job.checked_spec = original


def _job_of(module: ModuleType, path: Path) -> Job:
    from ..job import Job

    named = getattr(module, "job", None)
    if isinstance(named, Job):
        return named
    found = {name: value for name, value in vars(module).items() if isinstance(value, Job)}
    distinct = {id(value): value for value in found.values()}
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    if not found:
        raise UsageError("the script defines no job", where=str(path), fix=_FIX_JOB)
    names = ", ".join(f"`{name}`" for name in found)
    raise UsageError(
        f"the script defines more than one job: {names}", where=str(path), fix=_FIX_JOB
    )
