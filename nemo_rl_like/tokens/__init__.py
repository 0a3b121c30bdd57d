"""The typed token batches that flow between the rooms."""
