"""Named tensors on disk: sharded safetensors, written one tensor at a time."""
