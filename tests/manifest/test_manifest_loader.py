"""The YAML layer: lines, duplicate keys, variables, syntax errors."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.api.manifest.document import (
    MANIFEST_BYTES_MAX,
    Mapping,
    Problems,
    Scalar,
    Sequence,
    Value,
    load,
)
from headgate.errors import ManifestErrors


def plain(value: Value | None) -> Any:
    match value:
        case Mapping():
            return {key: plain(entry.value) for key, entry in value.entries.items()}
        case Sequence():
            return [plain(item) for item in value.items]
        case Scalar():
            return value.value
    return None


def read(text: str, **variables: str) -> tuple[Value | None, list[str]]:
    problems = Problems("job.yaml")
    value = load(text, problems, variables)
    return value, [str(problem) for _, problem in problems.found]


def test_values_and_lines() -> None:
    value, problems = read("a: 1\nb:\n  - x\n  - 2.5\nc: {d: true, e: null}\n")
    assert problems == []
    assert plain(value) == {"a": 1, "b": ["x", 2.5], "c": {"d": True, "e": None}}
    assert isinstance(value, Mapping)
    assert [entry.line for entry in value.entries.values()] == [1, 2, 5]
    items = value.entries["b"].value
    assert isinstance(items, Sequence)
    assert [item.line for item in items.items] == [3, 4]


@pytest.mark.parametrize("text", ["yes", "on", "NO", "010", "1:30", "1_000", "2024-01-01", "'5'"])
def test_only_what_looks_like_a_value_to_everybody_is_one(text: str) -> None:
    value, _ = read(f"a: {text}")
    assert plain(value) == {"a": text.strip("'")}


def test_duplicate_keys_are_refused_at_every_depth() -> None:
    _, problems = read("a:\n  x: 1\n  y: 2\n  x: 3\na: 4\n")
    assert problems == [
        "duplicate key key=`x`\n  at job.yaml:4\n  it is in line 2 already; rename or remove one",
        "duplicate key key=`a`\n  at job.yaml:5\n  it is in line 1 already; rename or remove one",
    ]


def test_variables_are_put_in_and_keep_their_type() -> None:
    value, problems = read(
        'n: ${N}\nflow: {n: "${N}"}\nuri: s3://${BUCKET}/x-${N}\nd: ${NO:-7}\ne: ${EMPTY:-x}\nq: $${N}\n'
        "plain: $N\n",
        N="4",
        BUCKET="b",
        EMPTY="",
    )
    assert problems == []
    assert plain(value) == {
        "n": 4,
        "flow": {"n": 4},
        "uri": "s3://b/x-4",
        "d": 7,
        "e": "x",
        "q": "${N}",
        "plain": "$N",
    }


def test_a_variable_cannot_bring_in_structure() -> None:
    value, problems = read("a: ${X}\n", X="{b: 1}\nc: 2")
    assert problems == []
    assert plain(value) == {"a": "{b: 1}\nc: 2"}


def test_missing_and_malformed_variables_are_located() -> None:
    _, problems = read("a: 1\nb: ${NOPE}\nc: ${a-b}\nd: ${open\n")
    assert problems == [
        "environment variable is not set name=`NOPE`\n  at job.yaml:2\n"
        "  set it, or write ${NOPE:-default}",
        "not a variable text=`${a-b}`\n  at job.yaml:3\n"
        "  write ${NAME} or ${NAME:-default}; $${ for a plain ${",
        "not a variable text=`${open`\n  at job.yaml:4\n"
        "  write ${NAME} or ${NAME:-default}; $${ for a plain ${",
    ]


def test_variables_are_not_looked_up_in_comments() -> None:
    assert read("a: 1 # ${NOPE}\n")[1] == []


def test_anchors_and_merges() -> None:
    value, problems = read("base: &b {x: 1, y: 2}\nother: {<<: *b, y: 3}\nsame: *b\n")
    assert problems == []
    assert plain(value) == {
        "base": {"x": 1, "y": 2},
        "other": {"x": 1, "y": 3},
        "same": {"x": 1, "y": 2},
    }


def test_an_alias_into_itself_is_refused() -> None:
    assert read("a: &a [*a]\n")[1] == ["alias refers to a value it is part of\n  at job.yaml:1"]


def test_a_billion_laughs_stay_small() -> None:
    """Each alias is converted once: 2**60 leaves would not fit anywhere."""
    lines = ["a0: &a0 x"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    value, problems = read("\n".join(lines))
    assert problems == []
    assert isinstance(value, Mapping)


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "yaml syntax"),
        ("a: 1\n\tb: 2\n", 2, "indent with spaces"),
        ("a: 'x\n", 2, "yaml syntax"),
        ('a: 1\nb: "\\U0010ffff \\UFFFFFFFF"\n', 2, "an escape stands for no character"),
        ("a: *nope\n", 1, "undefined alias"),
        ("a: 1\n---\nb: 2\n", 2, "more than one document"),
        ("a: 1\nb: \x00\n", 2, "not allowed"),
        ("a: !!python/object:os.system x\n", 1, "tags are not allowed"),
        ("a: !env X\n", 1, "tags are not allowed"),
        ("? [a]\n: 1\n", 1, "a key must be a text"),
        ("", 1, "empty"),
        ("# nothing\n", 1, "empty"),
        ("[" * 20_000, 1, "nested too deeply"),
        ("a" * (MANIFEST_BYTES_MAX + 1), 1, "larger than"),
        ("a: {<<: 5}\n", 1, "must refer to a mapping"),
    ],
)
def test_broken_yaml_is_one_located_problem(text: str, line: int, part: str) -> None:
    _, problems = read(text)
    assert len(problems) == 1
    assert f"job.yaml:{line}" in problems[0]
    assert part in problems[0]


def test_problems_are_raised_in_the_order_of_the_file_each_once() -> None:
    problems = Problems("f.yaml")
    problems.raise_if_any()
    problems.add(7, "late")
    problems.add(2, "early", "fix it")
    problems.add(7, "late")
    with pytest.raises(ManifestErrors) as caught:
        problems.raise_if_any()
    assert str(caught.value) == (
        "2 mistakes in the manifest:\nearly\n  at f.yaml:2\n  fix it\nlate\n  at f.yaml:7"
    )
