"""Planner and runner of typed stages: cache, resume, lineage."""
