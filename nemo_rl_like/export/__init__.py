"""Writers of finished models."""
