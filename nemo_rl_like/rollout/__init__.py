"""Episodes and the runner that makes token batches of them."""
