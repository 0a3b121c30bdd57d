"""The experiment spec: pydantic models and YAML loading."""
