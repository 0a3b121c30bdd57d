"""Artifact types, manifests, hashes, errors and fault points: what every other room may use."""
