"""The StreamJob manifest: a job as YAML, checked as a whole, built through the same fluent API.

`document` is a parsed file with its lines, `loader` makes one; `fields` reads typed values from it and
knows their JSON schema; `model` says which fields a StreamJob has; `build` turns it into a graph.
"""
