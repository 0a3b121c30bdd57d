"""`nrl node`: what a scheduler starts, once on each host of a job."""
