"""The nrl command line: parses, calls, prints."""
