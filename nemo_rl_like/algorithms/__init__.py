"""Pure tensor functions: advantages, policy losses, aggregation, KL."""
