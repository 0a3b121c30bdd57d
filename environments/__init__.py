"""Ready-made environments, one folder each; they import only `nemo_rl_like.environment`."""
