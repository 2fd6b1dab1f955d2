"""Sources of the changes of tables: what does not depend on the server."""
