"""Flux and Chroma, which share an attention class."""

from typing import Any

from torch import Tensor

from .base import FusedProcessor


class FusedFluxAttnProcessor(FusedProcessor):
    """Self-attention, or joint attention of a text stream that stands in front of the image's."""

    stock_path = "diffusers.models.transformers.transformer_flux.FluxAttnProcessor"
    projections_fuse = True

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        text, rope = encoder_hidden_states, image_rotary_emb
        if not self.takes(attn, hidden_states, text, rope) or not self.runs_fused(attn):
            return self.stock(attn, hidden_states, text, attention_mask, rope)
        assert rope is not None
        out, text_out = self.attention(attn, hidden_states, text, rope, attention_mask, attn.head_dim)
        if text_out is None:
            return self.output(attn, out)
        return self.output(attn, out), attn.to_add_out(text_out.contiguous())

    def output(self, attn: Any, out: Tensor) -> Tensor:
        """The output projection, where the attention has one of its own."""
        if attn.pre_only:
            return out
        return attn.to_out[1](attn.to_out[0](out.contiguous()))
