"""Options: every mistake is refused, at once, with the nearest key; the docs are current."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.errors import OptionError
from headgate.runtime.job import runnable
from headgate.runtime.options import execution, monitoring, network, recovery, state
from headgate.runtime.options.registry import OPTIONS, Options, find_option, markdown
from headgate.runtime.options.types import Option

ROOT = Path(hg.__file__).parent


def test_defaults_are_those_of_the_table() -> None:
    empty = Options()
    assert empty.get(state.CHECKPOINT_INTERVAL) is None
    assert empty.get(state.CHECKPOINT_TIMEOUT) == 600_000
    assert empty.get(state.CHECKPOINT_RETENTION) == "RETAIN_ON_CANCELLATION"
    assert empty.get(network.BUFFERS_PER_CHANNEL) == 2
    assert empty.get(network.FLOATING_BUFFERS) == 8
    assert empty.get(monitoring.HEARTBEAT_INTERVAL) == 10_000
    assert empty.get(monitoring.HEARTBEAT_TIMEOUT) == 50_000
    assert empty.get(network.BUFFER_TIMEOUT) == 100
    assert empty.get(network.BUFFER_TIMEOUT_ENABLED) is True
    assert empty.explicit() == {}


def test_every_default_is_a_value_its_own_type_accepts() -> None:
    for option in OPTIONS:
        if option.default is not None:
            assert option.type.parse(option.default_text()) == option.default, option.key


def test_keys_and_aliases_are_unique() -> None:
    names = [name for option in OPTIONS for name in (option.key, *option.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("key", "text", "option", "value"),
    [
        ("execution.checkpointing.interval", "30s", state.CHECKPOINT_INTERVAL, 30_000),
        (
            "execution.checkpointing.timeout",
            "5 min",
            state.CHECKPOINT_TIMEOUT,
            300_000,
        ),
        ("headgate.buffer.max-size", "64kb", network.BUFFER_SIZE, 65_536),
        ("pipeline.operator-chaining.enabled", "FALSE", execution.CHAINING, False),
        ("restart-strategy.type", "fixeddelay", recovery.RESTART_STRATEGY, "fixed-delay"),
        ("restart-strategy.type", "disable", recovery.RESTART_STRATEGY, "none"),
        ("s3.endpoint", " http://localhost:9000 ", state.S3_ENDPOINT, "http://localhost:9000"),
        ("state.checkpoints.num-retained", "3", state.CHECKPOINT_RETAINED, 3),
        ("state.checkpoints.dir", "/tmp/ck", state.CHECKPOINT_DIR, "/tmp/ck"),
        ("execution.buffer-timeout", "0ms", network.BUFFER_TIMEOUT, 0),
        ("restart-strategy", "none", recovery.RESTART_STRATEGY, "none"),
    ],
)
def test_a_text_becomes_a_value(key: str, text: str, option: Option[object], value: object) -> None:
    parsed = Options({key: text})
    assert parsed.get(option) == value
    assert parsed.is_set(option)
    assert Options(parsed.explicit()).get(option) == value


@pytest.mark.parametrize(
    ("key", "text", "part"),
    [
        ("execution.checkpointing.interval", "5ms", "at least 10"),
        ("execution.checkpointing.interval", "5", "unit"),
        ("execution.checkpointing.num-retained", "0", "1..10000"),
        ("execution.checkpointing.num-retained", "two", "whole number"),
        (
            "restart-strategy.type",
            "sometimes",
            "one of none, fixed-delay, failure-rate, exponential-delay",
        ),
        ("pipeline.operator-chaining.enabled", "yes", "true or false"),
        ("parallelism.default", "40000", "1..32768"),
        ("metrics.port", "70000", "0..65535"),
        ("s3.endpoint", "  ", "not be empty"),
    ],
)
def test_a_bad_value_is_refused_with_key_value_and_reason(key: str, text: str, part: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options({key: text})
    assert f"key=`{key}` value=`{text}`" in str(caught.value)
    assert part in str(caught.value)


def test_an_unknown_key_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(OptionError) as caught:
        Options({"execution.checkpoint.interval": "10s"})
    assert caught.value.message == "unknown option key=`execution.checkpoint.interval`"
    assert caught.value.fix == "did you mean `execution.checkpointing.interval`?"
    with pytest.raises(OptionError, match=r"docs/options\.md"):
        find_option("zzz")


def test_a_flink_option_that_we_do_not_have_is_refused_rather_than_ignored() -> None:
    with pytest.raises(OptionError, match="unknown option"):
        Options({"execution.checkpointing.snapshot-compression": "true"})


def test_all_problems_are_reported_at_once() -> None:
    texts = {
        "parallelism.default": "0",
        "metrics.prot": "1",
        "heartbeat.timeout": "1s",
        "s3.region": "eu-central-1",
    }
    assert set(Options.problems(texts)) == {
        "parallelism.default",
        "metrics.prot",
        "heartbeat.timeout",
    }
    with pytest.raises(OptionError) as caught:
        Options(texts)
    text = str(caught.value)
    assert text.startswith("3 mistakes in the options:")
    assert "parallelism.default" in text
    assert "did you mean `metrics.port`?" in text
    assert "heartbeat timeout is not above the interval" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


@pytest.mark.parametrize(
    "values",
    [
        {"taskmanager.memory.min-segment-size": "2 mb"},
        {"taskmanager.memory.min-segment-size": "8 kb", "headgate.buffer.max-size": "4 kb"},
    ],
)
def test_the_smallest_buffer_is_not_above_the_largest(values: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="the smallest buffer is larger than the largest"):
        Options(values)


def test_a_key_and_its_older_name_together_are_refused() -> None:
    with pytest.raises(OptionError, match="set twice"):
        Options({"state.checkpoints.dir": "a", "execution.checkpointing.dir": "b"})


def test_a_value_that_is_no_text_is_refused() -> None:
    with pytest.raises(OptionError, match='write "4"'):
        Options({"parallelism.default": 4})  # type: ignore[dict-item]


def test_override_replaces_also_across_older_names() -> None:
    base = Options({"state.checkpoints.dir": "a", "parallelism.default": "2"})
    over = base.override({"execution.checkpointing.dir": "b"})
    assert over.get(state.CHECKPOINT_DIR) == "b"
    assert over.get(execution.PARALLELISM) == 2
    assert base.get(state.CHECKPOINT_DIR) == "a"
    with pytest.raises(OptionError, match="unknown option"):
        base.override({"nope": "1"})


def test_effective_texts_hold_defaults_and_parse_to_the_same_values() -> None:
    chosen = Options({"headgate.task.slice": "20ms"})
    again = Options(chosen.effective())
    for option in OPTIONS:
        assert again.get(option) == chosen.get(option), option.key


def test_the_docs_are_current() -> None:
    assert (ROOT / "docs" / "options.md").read_text() == markdown()


def test_the_module_prints_the_docs() -> None:
    command = [sys.executable, "-m", "headgate.runtime.options.registry"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == markdown()


@pytest.mark.parametrize("in_backlog", ["9s", "10s", "0s"])
def test_checkpoints_in_a_backlog_are_not_more_frequent(in_backlog: str) -> None:
    key = "execution.checkpointing.interval-during-backlog"
    texts = {"execution.checkpointing.interval": "10s", key: in_backlog}
    problems = Options.problems(texts)
    assert list(problems) == [key] * (in_backlog == "9s")


def test_unaligned_checkpoints_and_a_limit_set_by_the_program_do_not_go_together(
    tmp_path: Path,
) -> None:
    job = hg.Job("job", options={"execution.checkpointing.unaligned.enabled": "true"})
    job.read(from_list([{"a": 1}]), name="in").write(blackhole(), name="out")
    job.checkpoint(every="1s", storage=str(tmp_path), max_concurrent=2)
    with pytest.raises(OptionError, match="max-concurrent-checkpoints=`2`"):
        runnable(job).spec()
