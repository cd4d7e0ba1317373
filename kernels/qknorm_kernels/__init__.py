"""Triton kernels of the norm. Imports torch and triton, never qknorm."""
