"""Running StreamJobs on Kubernetes: the resources, and the decisions of the operator, without I/O."""
