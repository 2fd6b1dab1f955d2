"""Windows made of panes: sliding and cumulative ones, those of a time zone, and early results."""
