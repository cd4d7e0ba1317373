"""Attention processors of diffusers that run norm and RoPE of q and k in one call."""
