"""Windows made of panes: sliding, cumulative and time-zone windows, and early results."""
