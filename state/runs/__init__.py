"""Keyed state larger than memory, a batch at a time (features.md STA-06).

Rows lie in immutable *runs*, sorted by the 64-bit hash of their key, memory-mapped; new and changed
rows gather in memory and become a run when the budget is used up, or at a snapshot: the files of the
runs *are* the checkpoint, so it is incremental by nature. Sorted by hash is sorted by key group: after
a change of parallelism each subtask takes contiguous slices of the files, without rewriting them.
`spilling_table` is the way in.
"""
