"""The trainable model as a service over a worker group."""
