"""A subtask: a mailbox in which the operators of one vertex run, and in which their state is cut.

Reading path: `subtask.py` has the loop. `source_subtask.py`, `input_subtask.py` and `iteration.py`
differ in where records come from. `chain.py` has the operators and their outputs. `snapshots.py` takes
part in checkpoints: `state_files.py` and `channel_state_writer.py` write a cut, and `state_restore.py`
reads it back. `parquet_files.py` is the format of tables.
"""
