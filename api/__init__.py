"""The language of jobs: streams and keyed streams as users write them, the job graph, and the YAML form."""
