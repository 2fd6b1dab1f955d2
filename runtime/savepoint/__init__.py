"""Savepoints and checkpoints as things a user holds: written, found, shown, compared, checked, deleted."""
