"""A subtask: a mailbox in which the operators of one vertex run, and in which their state is cut.

Reading path: `subtask.py` has the loop. `source_subtask.py`, `input_subtask.py` and `iteration.py`
differ in where records come from. `chain.py` has the operators and their outputs. `snapshots.py` takes
part in checkpoints and writes the cuts, `channel_state_writer.py` writes records that a barrier overtook,
and `state_restore.py` reads state back. `parquet_files.py` is the format of tables.
"""
