"""Ctrl-C on a terminal reaches Ray's processes too: they and our actors must survive it."""

from __future__ import annotations

import pytest


@pytest.mark.ray
def test_an_interrupt_of_the_process_group_takes_a_final_checkpoint(cli, ticker: str) -> None:
    run = cli.start("run", ticker, "-p", "2", "-D", "execution.checkpointing.interval=500ms")
    run.wait_for("checkpoint 2 completed")
    assert "local" in cli("list").stdout
    run.interrupt()
    run.wait_for("stopping with a final checkpoint (press Ctrl-C again to stop at once)")
    run.wait_for(" completed in ")
    code, text = run.end()
    assert code == 0
    assert "job ticker stopped after" in text
    assert "run it again to resume from there" in text
    assert list((cli.directory / "run").iterdir()) == []
    assert not any(word in text for word in ("worker lost", "died", "restart", "FAILING"))
