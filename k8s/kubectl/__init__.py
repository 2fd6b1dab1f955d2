"""`kubectl headgate`: users look at StreamJobs and change them through the API server."""
