"""A subtask: mailbox, operator chain, watermark valve, snapshots."""
