"""Adapters to other libraries: torch, jax and transformers."""
