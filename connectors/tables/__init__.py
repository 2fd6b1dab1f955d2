"""The common part of the sinks for table formats: their files, their commits and their types."""
