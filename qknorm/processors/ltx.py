"""LTX-Video, which norms and rotates all heads of a token as one row."""

from typing import Any

from torch import Tensor

from .base import FusedProcessor, is_real_rope


class FusedLTXVideoAttnProcessor(FusedProcessor):
    """Self-attention; the cross-attention has no RoPE and stays as it is."""

    stock_path = "diffusers.models.transformers.transformer_ltx.LTXVideoAttnProcessor"

    def obstacle(self, attn: Any) -> str | None:
        """As everywhere; and a row of k must be as long as one of q."""
        if attn.inner_dim != attn.inner_kv_dim:
            return "the norm is across heads, and k has other heads than q"
        return super().obstacle(attn)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        rope = image_rotary_emb
        fits = encoder_hidden_states is None and is_real_rope(rope, hidden_states.shape[1], attn.inner_dim)
        if not fits or not self.runs_fused(attn):
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, rope)
        assert rope is not None
        mask = attention_mask
        if mask is not None:
            batch, sequence = hidden_states.shape[:2]
            mask = attn.prepare_attention_mask(mask, sequence, batch)
            mask = mask.view(batch, attn.heads, -1, mask.shape[-1])
        q, k, v = (layer(hidden_states).unsqueeze(2) for layer in (attn.to_q, attn.to_k, attn.to_v))
        rotated = self.norm_and_rotate(attn, q, k, rope)
        q, k, v = (t.squeeze(2).unflatten(2, (attn.heads, -1)) for t in (*rotated, v))
        return attn.to_out[1](attn.to_out[0](self.attend(q, k, v, mask)))
