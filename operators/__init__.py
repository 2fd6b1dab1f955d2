"""The definition of a job: the public graph API, one file per operator, expressions, windows."""
