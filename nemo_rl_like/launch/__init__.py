"""One spec rendered for local, Slurm, Kubernetes and containers."""
