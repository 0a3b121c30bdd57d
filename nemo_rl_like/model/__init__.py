"""Megatron models: factory, layouts, weight map, heads, decode step."""
