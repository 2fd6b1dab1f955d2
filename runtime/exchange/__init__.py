"""Batches and control elements on their way between subtasks: buffers, credits, partitioners, wire format.

Reading path: `channel.py` (the sending end and its credits), `gate.py` (the receiving end, which grants
them), `partition.py` (what a subtask emits into), `wire.py` and `hub.py` (between workers).
"""
