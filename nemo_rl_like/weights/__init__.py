"""Weight transports with manifest and checksums, both ends."""
