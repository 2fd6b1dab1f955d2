"""Iterations: streams that feed back to where they began, exactly once.

`head.py` has the operator at which a loop begins, and the settings of a loop. `queue.py` has the feedback
that waits there, and the part of it that a checkpoint keeps; `stored.py` is its encoding.
"""
