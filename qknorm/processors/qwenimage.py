"""QwenImage, whose RoPE is complex, a tensor a stream."""

from typing import Any

import torch
from torch import Tensor

from .base import FusedProcessor, is_complex_rope


class FusedQwenDoubleStreamAttnProcessor(FusedProcessor):
    """Joint attention of a text stream that stands in front of the image's."""

    stock_path = "diffusers.models.transformers.transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0"

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        text, text_mask, rope = encoder_hidden_states, encoder_hidden_states_mask, image_rotary_emb
        head_dim = attn.inner_dim // attn.heads
        fits = (
            self.is_joint(attn)
            and text is not None
            and attention_mask is None  # the stock class raises
            and rope is not None
            and is_complex_rope(rope[0], hidden_states.shape[1], head_dim)
            and is_complex_rope(rope[1], text.shape[1], head_dim)
        )
        if not fits or not self.runs_fused(attn):
            return self.stock(attn, hidden_states, text, text_mask, attention_mask, rope)
        assert text is not None
        assert rope is not None
        mask = None
        if text_mask is not None:
            image_mask = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
            mask = torch.cat([text_mask, image_mask], 1)[:, None, None, :]
        image_rope, text_rope = rope
        joint_rope = (torch.cat([text_rope, image_rope]), None)
        out, text_out = self.attention(attn, hidden_states, text, joint_rope, mask, head_dim)
        assert text_out is not None
        out = attn.to_out[0](out.contiguous())
        if len(attn.to_out) > 1:
            out = attn.to_out[1](out)
        return out, attn.to_add_out(text_out.contiguous())
