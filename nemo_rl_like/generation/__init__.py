"""Engines that sample from a policy: embedded and vLLM."""
