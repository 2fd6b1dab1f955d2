"""The StreamJob manifest: a job as YAML, validated as a whole, built through the fluent API.

`document` parses a file, and keeps line numbers. `fields` reads typed values from it and knows their
JSON schema; `model` has the fields of a StreamJob; `build` turns it into a
graph.
"""
