"""Post-training for language models on the NVIDIA stack: one typed spec from data to a served checkpoint."""

__version__ = "0.1.0"
