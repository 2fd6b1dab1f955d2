"""A worker: hosts subtasks and answers to one coordinator."""
