"""Flux2: its double-stream blocks, and its single-stream ones, whose q, k, v and MLP share a projection."""

from typing import Any

import torch
from torch import Tensor

from .base import FusedProcessor


class FusedFlux2AttnProcessor(FusedProcessor):
    """Joint attention of a text stream that stands in front of the image's."""

    stock_path = "diffusers.models.transformers.transformer_flux2.Flux2AttnProcessor"
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
        out = attn.to_out[1](attn.to_out[0](out))
        return out if text_out is None else (out, attn.to_add_out(text_out))


class FusedFlux2ParallelSelfAttnProcessor(FusedProcessor):
    """Self-attention beside an MLP: one projection in, one out."""

    stock_path = "diffusers.models.transformers.transformer_flux2.Flux2ParallelSelfAttnProcessor"

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
        projected = attn.to_qkv_mlp_proj(hidden_states)
        # By ratio: a tensor-parallel projection holds a part of each.
        columns, mlp_columns = 3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor
        columns = projected.shape[-1] * columns // (columns + mlp_columns)
        qkv, mlp = projected.split([columns, projected.shape[-1] - columns], -1)
        q, k, v = (part.unflatten(-1, (-1, attn.head_dim)) for part in qkv.chunk(3, -1))
        q, k = self.norm_and_rotate(attn, q, k, rope)
        out = self.attend(q, k, v, attention_mask)
        return attn.to_out(torch.cat([out, attn.mlp_act_fn(mlp)], -1))
