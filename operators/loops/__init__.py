"""Iterations: streams that feed back to where they began, exactly once.

`plan.py` faces the user. `head.py` is the operator at which a loop begins, `queue.py` the feedback
that waits there, `log.py` the part of it that a checkpoint keeps, `stored.py` its encoding.
"""
