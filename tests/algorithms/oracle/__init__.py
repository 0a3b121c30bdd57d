"""The losses as plain loops in float64, written from shared/numerics.md alone: what the package's tensors are compared with."""
