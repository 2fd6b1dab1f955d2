"""The operators that run in subtasks: one folder per family, and the contract between them at the top."""
