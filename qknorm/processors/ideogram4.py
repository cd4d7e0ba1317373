"""Ideogram4, whose RoPE is half-split and in the dtype of the hidden states."""

from typing import Any

from torch import Tensor

from .base import FusedProcessor, is_real_rope


class FusedIdeogram4AttnProcessor(FusedProcessor):
    """Self-attention. The rotation is computed in float32 and keeps the dtype of q, which the stock one does not."""

    stock_path = "diffusers.models.transformers.transformer_ideogram4.Ideogram4AttnProcessor"
    interleaved = False

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        rope = image_rotary_emb
        if not is_real_rope(rope, hidden_states.shape[1], attn.head_dim, None) or not self.runs_fused(attn):
            return self.stock(attn, hidden_states, attention_mask, rope)
        assert rope is not None
        tables = (rope[0].float(), rope[1].float())
        out, _ = self.attention(attn, hidden_states, None, tables, attention_mask, attn.head_dim)
        return attn.to_out[0](out)
