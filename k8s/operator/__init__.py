"""The shell around `reconcile`: it watches the API server, calls pure functions, and executes actions."""
