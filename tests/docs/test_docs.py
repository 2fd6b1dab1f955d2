"""The documentation is true: its code runs, its manifests are valid, its links lead somewhere.

All `python` blocks of a page run in order, in one module and one empty directory, as somebody would who
types the page. `<!-- not run -->` before a block leaves it out. A block that begins with a comment such
as `# steps.py` or `# ticker.yaml` is also saved under that name. `if __name__ == "__main__":` is false.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import headgate
from headgate.errors import ManifestErrors
from headgate.runtime.manifest import load_job
from headgate.runtime.protocol.failures import CheckpointFailure, FailureKind

ROOT = Path(headgate.__file__).parent
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "tests" / "README.md", *(ROOT / "docs").rglob("*.md")])
NOT_RUN = "<!-- not run -->"
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FILE_NAME = re.compile(r"# ([\w-]+\.(?:py|yaml))\n")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    skipped: bool


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks, in order."""
    lines = page.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        before = next((text for text in reversed(lines[:start]) if text.strip()), "")
        text = "\n".join(lines[start + 1 : number]) + "\n"
        yield Block(page, start + 1, lines[start][3:].strip(), text, before.strip() == NOT_RUN)
        start = None
    assert start is None, f"{page}:{start}: a block without an end"


def with_code(page: Path) -> bool:
    return any(block.language in ("python", "yaml") for block in blocks(page))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def page_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module to run a page in, and the empty directory it works in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    module = types.ModuleType("docs_page")
    sys.modules["docs_page"] = module
    yield module
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) in map(str, tmp_path.glob("*.py")):
            del sys.modules[name]
    del sys.modules["docs_page"]


@pytest.mark.parametrize("page", filter(with_code, PAGES), ids=relative)
def test_the_code_of_a_page_runs(
    page: Path, page_module: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in blocks(page):
        if block.skipped:
            continue
        if named := _FILE_NAME.match(block.text):
            (tmp_path / named[1]).write_text(block.text)
        if block.language == "python":
            # Empty lines in front: errors then tell the line of the page.
            code = compile("\n" * block.line + block.text, str(page), "exec")
            exec(code, vars(page_module))
        elif block.language == "yaml" and "kind: StreamJob" in block.text:
            try:
                load_job(block.text)
            except ManifestErrors as error:
                raise AssertionError(f"{relative(page)}:{block.line}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{relative(page)}: {target}"
        assert not anchor or anchor in anchors(found), f"{relative(page)}: {target}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub makes them of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()
    records = (ROOT / "docs" / "design" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs" / "design").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in records} == set()


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "design").glob("*.md")), ids=relative)
def test_design_records_name_files_that_exist(page: Path) -> None:
    named = re.findall(r"`([\w./-]+/(?:[\w-]+\.py)?)`", page.read_text())
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_the_readme_has_the_commands_of_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    words = " ".join(re.findall(r"^check (.+)", ci, flags=re.MULTILINE)).split()
    targets = {word for word in words if re.fullmatch(r"[a-z-]+", word) and word[0] != "-"}
    assert {"lint", "types", "test", "test-rest", "test-kube", "docs", "demo"} == targets
    readme = (ROOT / "README.md").read_text()
    assert {target for target in targets if f"make {target}" not in readme} == set()


@pytest.mark.parametrize("reasons", [CheckpointFailure, FailureKind])
def test_every_failure_reason_is_in_the_runbook(
    reasons: type[CheckpointFailure] | type[FailureKind],
) -> None:
    runbook = (ROOT / "docs" / "operations.md").read_text()
    for reason in reasons:
        assert f"### {reason.value}\n" in runbook, reason
        assert reason.sentence in runbook, reason


@pytest.mark.parametrize(
    ("page", "arguments"), [("manifest.md", []), ("kubernetes.md", ["--kubernetes"])]
)
def test_every_field_of_a_manifest_is_in_its_page(page: str, arguments: list[str]) -> None:
    """If not: python docs/manifest_fields.py [--kubernetes], and put its output into the page."""
    script = ROOT / "docs" / "manifest_fields.py"
    command = [sys.executable, str(script), *arguments]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    assert made.stdout.strip() in (ROOT / "docs" / page).read_text()


def test_the_page_of_conformance_has_all_checks() -> None:
    """If not: python docs/conformance.py, and put its output into the page."""
    made = runpy.run_path(str(ROOT / "docs" / "conformance.py"))["tables"]()
    assert made in (ROOT / "docs" / "conformance.md").read_text()


def test_the_quick_start_stops_and_resumes(tmp_path: Path) -> None:
    """Do what the quick start shows: run, Ctrl-C, run again, in both languages."""
    for block in blocks(ROOT / "docs" / "quickstart.md"):
        if named := _FILE_NAME.match(block.text):
            (tmp_path / named[1]).write_text(block.text)
    first = run_until(tmp_path, "clicks.py", "checkpoint 1 completed")
    assert "starts fresh" in first
    assert "is SUSPENDED" in first
    # Operators have the same names, so the manifest continues what the script began.
    second = run_until(tmp_path, "clicks.yaml", "restored checkpoint")
    assert "resumes from checkpoint" in second


def run_until(directory: Path, file: str, text: str) -> str:
    """Run a job until it has said `text`, then press Ctrl-C; all it said."""
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from headgate.runtime.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "run", file, "--cluster", "in-process"]
    environment = {**os.environ, "HEADGATE_RUN_DIR": str(directory / "run")}
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stderr is not None
        said = ""
        for line in job.stderr:
            said += line
            if text in line:
                job.send_signal(signal.SIGINT)
        assert job.wait() == 0, said
    assert text in said, said
    return said
