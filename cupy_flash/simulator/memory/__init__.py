"""Simulated memory and its checks: bounds, initialisation, happens-before."""
