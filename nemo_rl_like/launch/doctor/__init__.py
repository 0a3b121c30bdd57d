"""Preflight of a host: what would stop a job or make it slow, each finding with its fix. Changes nothing but a probe file it removes."""
