"""Z-Image, whose RoPE is complex and its own in each batch."""

from typing import Any

from torch import Tensor

from .base import FusedProcessor, is_complex_rope


class FusedZSingleStreamAttnProcessor(FusedProcessor):
    """Self-attention."""

    stock_path = "diffusers.models.transformers.transformer_z_image.ZSingleStreamAttnProcessor"

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        head_dim = attn.inner_dim // attn.heads
        if not is_complex_rope(freqs_cis, hidden_states.shape[1], head_dim) or not self.runs_fused(attn):
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, freqs_cis)
        assert freqs_cis is not None
        mask = attention_mask
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None, None, :]
        out, _ = self.attention(attn, hidden_states, None, (freqs_cis, None), mask, head_dim)
        out = attn.to_out[0](out)
        return attn.to_out[1](out) if len(attn.to_out) > 1 else out
