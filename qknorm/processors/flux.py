"""Flux and Chroma, which share an attention class."""

from typing import Any

import torch
from torch import Tensor

from .base import ADDED_QKV, QKV, FusedProcessor, projected, real_rope


class FusedFluxAttnProcessor(FusedProcessor):
    """Self-attention, or joint attention of a text stream that stands in front of the image's."""

    stock_path = "diffusers.models.transformers.transformer_flux.FluxAttnProcessor"

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        text = encoder_hidden_states
        if (
            self.is_joint(attn) != (text is not None)
            or not real_rope(image_rotary_emb, attn.head_dim)
            or not self.runs_fused(attn)
        ):
            return self.stock(attn, hidden_states, text, attention_mask, image_rotary_emb)
        assert image_rotary_emb is not None
        q, k, v = projected(attn, hidden_states, attn.head_dim, QKV, "to_qkv")
        context = None
        if text is not None:
            *context_qk, context_v = projected(attn, text, attn.head_dim, ADDED_QKV, "to_added_qkv")
            v = torch.cat([context_v, v], 1)
            context = (context_qk[0], context_qk[1])
        q, k = self.norm_and_rotate(attn, q, k, image_rotary_emb, context)
        out = self.attend(q, k, v, attention_mask)
        if text is None:
            return self.output(attn, out)
        text_out, out = out.split([text.shape[1], out.shape[1] - text.shape[1]], 1)
        return self.output(attn, out), attn.to_add_out(text_out.contiguous())

    def output(self, attn: Any, out: Tensor) -> Tensor:
        """The output projection, where the attention has one of its own."""
        if getattr(attn, "pre_only", False):
            return out
        for layer in attn.to_out:
            out = layer(out.contiguous())
        return out
