"""Krea2: fewer heads of k and v than of q, a gated output, and a norm that casts back itself."""

from typing import Any

import torch
from torch import Tensor

from .base import FusedProcessor


class FusedKrea2AttnProcessor(FusedProcessor):
    """Self-attention."""

    stock_path = "diffusers.models.transformers.transformer_krea2.Krea2AttnProcessor"
    round_before_rope = True

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
        return attn.to_out[0](out * torch.sigmoid(attn.to_gate(hidden_states)))
