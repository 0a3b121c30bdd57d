"""Datasets, tokenizers and chat renderers."""
