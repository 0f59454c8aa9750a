"""Adapters to other libraries: torch, jax, transformers and xFormers."""
