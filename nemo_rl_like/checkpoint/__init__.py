"""Checkpoint format, reader and writer."""
