"""Fuzzing: random manifests, expressions, records and damaged files, by the number of a seed.

Each module here but this one and `__main__` is a *target*: `run(rng)` makes one random case and raises if
headgate did anything but what it promises: the right result, or a `HeadgateError` that is not its own bug.
`docs/fuzzing.md` says how to run it.
"""
