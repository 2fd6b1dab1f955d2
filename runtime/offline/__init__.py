"""State without a job: snapshots are read as tables of Arrow, and written as new savepoints.

`snapshot.py` opens a savepoint or checkpoint, `scan.py` reads a state of it in shares, and `editor.py`
makes a new savepoint.
"""
