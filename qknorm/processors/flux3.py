"""Flux3, which norms and rotates in float32 with or without autocast."""

from typing import Any

from torch import Tensor

from .base import FusedProcessor


class FusedFlux3AttnProcessor(FusedProcessor):
    """Self-attention."""

    stock_path = "diffusers.models.transformers.transformer_flux3.Flux3AttnProcessor"
    projections_fuse = True
    round_before_rope = False

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        rope = image_rotary_emb
        if not self.takes(attn, hidden_states, None, rope) or not self.runs_fused(attn):
            return self.stock(attn, hidden_states, attention_mask, rope)
        assert rope is not None
        out, _ = self.attention(attn, hidden_states, None, rope, attention_mask, attn.head_dim)
        return attn.to_out[1](attn.to_out[0](out))
