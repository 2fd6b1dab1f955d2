"""Batches and control elements on their way between subtasks: buffers, credits, partitioners, wire format.

Reading path: `partition.py` (what a subtask emits into: the sending ends of channels, and their credits),
`gate.py` (the receiving end, which grants them), `wire.py`, `links.py` and `hub.py` (between workers).
"""
