"""The storage of checkpoints: objects in a directory, in S3 or in memory, and the job log on top.

`base.py` is the contract of a store. `joblog_store.py` carries out the decisions of `protocol/joblog.py` on
a store. `probe.py` and `read_back.py` deal with stores that may let two writers create the same object.
`stored_jobs.py` finds jobs by their logs alone, and sweeps state files that no checkpoint needs.
"""
