"""Keyed state larger than memory, with access by batches.

Rows lie in immutable *runs*, sorted by the 64-bit hash of their key, memory-mapped; new and changed rows
are collected in memory and become a run when the budget is used up, or at a snapshot. The files of the
runs *are* the checkpoint, so it is incremental by nature. The order of hashes is also that of key groups:
after a change of parallelism each subtask takes contiguous slices of the files, without rewriting them.
`spilling_table` is the way in.
"""
