"""Pipeline stages: each a short file that wires the rooms below."""
