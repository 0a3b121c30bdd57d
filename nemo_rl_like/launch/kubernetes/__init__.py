"""A job as objects of Kubernetes: rendered, checked and started through its API."""
