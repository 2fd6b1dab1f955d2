"""A job: what is for users is known to type checkers, and nothing else is."""

from typing import assert_type

import headgate as hg
from headgate import connectors as c


def jobs() -> None:
    job = hg.Job("job", parallelism=2, max_parallelism=128, options={"parallelism.default": "2"})
    assert_type(job.name, str)
    assert_type(job.parallelism, int)
    assert_type(job.max_parallelism, int | None)
    assert_type(job.options, dict[str, str])
    job.checkpoint(every="10s", storage="state", retain=2)
    job.restart(attempts=3, delay="1s")
    job.read(c.numbers(3), name="numbers").write(c.collect(), name="out")
    job.validate()
    assert_type(job.explain(), str)
    assert_type(job.run(fresh=True, if_exists="append"), hg.JobOutcome)
    job.run(if_exists="skip")  # wrong
    job.run(clster="local")  # wrong
    job.checkpoint(every="10s")  # wrong
    job.read(c.numbers(3))  # wrong
    hg.Job("job", options={"parallelism.default": 2})  # wrong
    job.name = "another"  # wrong


def what_is_inside(job: hg.Job) -> None:
    print(job.graph)  # wrong
    job.spec()  # wrong
    job.plan()  # wrong
    job.problems()  # wrong
    job.override({})  # wrong
    print(job.add_node)  # wrong
    job.derived_name("map")  # wrong
    print(job.as_batch)  # wrong
    print(job.checkpoint_settings)  # wrong
    print(job.restart_settings)  # wrong
    job.effective_max_parallelism()  # wrong
    rows = job.read(c.numbers(3), name="numbers")
    print(rows.job)  # wrong
    print(rows.node)  # wrong
    print(rows.key_with(lambda n: n).stream)  # wrong
