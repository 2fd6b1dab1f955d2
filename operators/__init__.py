"""What a job says: the public graph API, one file per operator, expressions, windows."""
