"""`kubectl headgate`: StreamJobs seen and changed through the API server, by people."""
