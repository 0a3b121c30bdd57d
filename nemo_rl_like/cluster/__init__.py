"""Ray topology and worker groups."""
