"""The job manifest: YAML to the same graph as the Python API."""
