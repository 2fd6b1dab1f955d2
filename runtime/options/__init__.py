"""All options of a job, one module per theme.

`registry.py` puts them into one table, and parses the texts that users write into `Options`.
`types.py` has the types of their values.
"""
