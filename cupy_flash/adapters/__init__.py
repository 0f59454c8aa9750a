"""Adapters to other libraries, one module each: torch, jax, transformers."""
