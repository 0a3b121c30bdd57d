"""The Environment interface, its registry and the process pool it runs in."""
