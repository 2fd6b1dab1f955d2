"""The REST API of a coordinator, and its client."""
