"""Iterations: streams that lead back to where they began, exactly once.

`plan.py` is what users meet. `head.py` is the operator at which a loop begins, `queue.py` what came back
and waits there, `log.py` what of it a checkpoint keeps, `stored.py` how it is written.
"""
