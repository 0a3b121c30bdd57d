"""Metric sinks and terminal output."""
