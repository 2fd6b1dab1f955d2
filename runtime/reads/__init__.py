"""State read by clients directly at the worker that has it: the messages, and the client's side.

The worker's side is `worker/direct_reads.py`, and `coordinator/owners.py` says who has which key groups.
"""
