"""The draws of seeds: every trouble and every kind of job is often there, and often is not."""

from __future__ import annotations

import random
from collections import Counter

from headgate.tests.sim.nemesis import ACTS, LASTING, draw_plan
from headgate.tests.sim.workloads import KINDS, draw_job

DRAWS = 2000


def test_each_trouble_is_on_in_about_half_the_seeds() -> None:
    """One that is always on hides what only shows without it."""
    drawn = [draw_plan(random.Random(seed)) for seed in range(DRAWS)]
    plans = [plan for plan in drawn if not (plan.gentle or plan.overtaking)]
    assert 0.6 < len(plans) / DRAWS < 0.7
    counts = Counter(kind for plan in plans for kind in plan.kinds)
    assert counts.keys() == {*LASTING, *(act.__name__ for act in ACTS)}
    assert all(0.3 < count / len(plans) < 0.7 for count in counts.values()), counts
    sizes = {len(plan.kinds) for plan in plans}
    assert min(sizes) <= 5
    assert max(sizes) >= 15


def test_each_feature_is_on_in_a_good_part_of_the_seeds() -> None:
    drawn = [draw_job(random.Random(seed), overtaking=seed % 5 == 0) for seed in range(DRAWS)]
    settings = Counter(item for chosen, _ in drawn for item in chosen.items())
    options = Counter(item for _, chosen in drawn for item in chosen.items())
    shares = {item: n / DRAWS for item, n in (settings + options).items() if n < DRAWS}  # not fixed
    assert len({name for name, _ in shares}) > 12
    assert all(0.08 < share < 0.92 for share in shares.values()), shares
    assert len(KINDS) >= 8
