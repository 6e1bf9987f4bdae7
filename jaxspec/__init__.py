"""Reinforcement learning of language models in JAX, with lossless speculative rollouts."""
