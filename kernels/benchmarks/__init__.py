"""Standalone benchmarks of the norm, each runnable by itself."""
