"""Tiny, randomly initialised models of every diffusers class that has q/k norms, and inputs for them.

For tests, demo and audit, which need real models and no download. Imports torch alone; diffusers when a model is built.
"""

import difflib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn, rand, randn
from torch.nn import functional as F

__all__ = ["build", "names"]

Inputs = dict[str, Any]

_BATCH, _TEXT, _IMAGE = 2, 6, 16  # samples, text tokens, image tokens
_VIDEO = (2, 4, 4)  # latent frames, height, width
# Inputs that the pipelines leave in float32, whatever the model's dtype is.
_FLOAT32 = ("image_rotary_emb", "video_rotary_emb")
# Parameters that diffusers creates with torch.empty, and leaves to the checkpoint.
_UNINITIALISED = ("experts.gate_up_proj", "experts.down_proj", "pad_token")


class _Tiny(NamedTuple):
    config: dict[str, Any]
    inputs: Callable[[], Inputs]
    make: Callable[[Any, dict[str, Any]], nn.Module] = lambda cls, config: cls(**config)


def names() -> tuple[str, ...]:
    """What ``build`` knows: classes of diffusers, and ``Class#variant`` where a class has several kinds of q/k norm."""
    return tuple(_TINY)


def _time() -> torch.Tensor:
    return torch.full((_BATCH,), 0.5)


def _step(dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.full((_BATCH,), 500, dtype=dtype)


def _text(dim: int, tokens: int = _TEXT) -> torch.Tensor:
    return randn(_BATCH, tokens, dim)


def _mask(tokens: int = _TEXT) -> torch.Tensor:
    """The second sample has two padding tokens."""
    return torch.arange(tokens) < torch.tensor([[tokens], [tokens - 2]])


def _video(channels: int, frames: int = _VIDEO[0]) -> torch.Tensor:
    return randn(_BATCH, channels, frames, *_VIDEO[1:])


def _grid(*sizes: int) -> torch.Tensor:
    """The coordinates of each token on a latent grid, ``(tokens, len(sizes))``."""
    return torch.cartesian_prod(*(torch.arange(size) for size in sizes)).reshape(-1, len(sizes)).float()


def _rope(tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = rand(tokens, dim // 2).repeat_interleave(2, dim=1)
    return angle.cos(), angle.sin()


def _inputs(hidden_states: torch.Tensor, text_dim: int, **more: Any) -> Inputs:
    return {"hidden_states": hidden_states, "encoder_hidden_states": _text(text_dim), "timestep": _step(), **more}


def _packed(channels: int, text_dim: int, *, axes: int = 3, **more: Any) -> Inputs:
    ids = {"img_ids": _grid(1, 4, 4, 1)[:, :axes], "txt_ids": torch.zeros(_TEXT, axes)}
    return _inputs(randn(_BATCH, _IMAGE, channels), text_dim, **{"timestep": _time(), **ids, **more})


def _image_text(channels: int, text_dim: int, **more: Any) -> Inputs:
    return _inputs(randn(_BATCH, channels, 8, 8), text_dim, **{"timestep": _time(), **more})


def _video_text(channels: int, text_dim: int, **more: Any) -> Inputs:
    return _inputs(_video(channels), text_dim, **more)


# fmt: off
# A table: several settings a line.
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_FLUX = {
    "in_channels": 8, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 64,
    "joint_attention_dim": 16, "axes_dims_rope": (16, 24, 24),
}
_WAN = {**_HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2}
_WAN_I2V = {"image_dim": 8, "added_kv_proj_dim": 32}
_COGVIDEOX = {
    **_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16, "num_layers": 2,
    "sample_width": 4, "sample_height": 4, "sample_frames": 5, "max_text_seq_length": _TEXT,
    "use_rotary_positional_embeddings": True,
}
_COGVIEW = {
    **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 16, "time_embed_dim": 8,
    "condition_dim": 4,
}
_COSMOS = {
    **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 16,
    "adaln_lora_dim": 4, "max_size": (4, 8, 8), "concat_padding_mask": False,
}
_COSMOS3 = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "latent_channel": 4, "patch_latent_dim": 16, "vocab_size": 32,
    "rope_axes_dim": (4, 2, 2),
}
_HUNYUAN_DIT = {
    **_HEADS, "in_channels": 4, "patch_size": 2, "sample_size": 8, "hidden_size": 32, "mlp_ratio": 2.0,
    "cross_attention_dim": 16, "cross_attention_dim_t5": 16, "pooled_projection_dim": 8, "text_len": _TEXT,
    "text_len_t5": _TEXT,
}
_HUNYUAN_VIDEO = {
    **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
    "mlp_ratio": 2.0, "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6),
}
_JOYIMAGE = {
    "hidden_size": 32, "num_attention_heads": 2, "in_channels": 4, "text_dim": 16, "mlp_width_ratio": 2.0,
    "num_layers": 2, "rope_dim_list": [4, 6, 6],
}
_LTX2 = {
    **_HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "audio_in_channels": 4,
    "audio_out_channels": 4, "audio_num_attention_heads": 2, "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16, "num_layers": 2, "caption_channels": 16,
}
_MOTIF = {
    **_HEADS, "in_channels": 9, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "mlp_ratio": 2.0,
    "text_embed_dim": 16, "rope_axes_dim": (4, 6, 6),
}
_QWEN = {
    **_HEADS, "in_channels": 8, "out_channels": 2, "num_layers": 2, "joint_attention_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}
_SANA = {
    **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 16, "sample_size": 4,
    "qk_norm": "rms_norm_across_heads",
}
_SD3 = {
    **_HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16,
    "caption_projection_dim": 32, "pooled_projection_dim": 8, "pos_embed_max_size": 8, "dual_attention_layers": (0,),
}
_ZIMAGE = {
    "in_channels": 4, "dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
    "cap_feat_dim": 16, "axes_dims": [4, 6, 6], "axes_lens": [64, 16, 16],
}
# fmt: on


def _cogvideox(tokens: int) -> Inputs:
    return _inputs(randn(_BATCH, 2, 4, 4, 4), 16, image_rotary_emb=_rope(tokens, 16))


def _cogview(*sizes: str, **more: Any) -> Inputs:
    side = torch.full((_BATCH, 2), 64.0)
    return _image_text(4, 16, timestep=_step(), **dict.fromkeys(sizes, side), **more)


def _cosmos3() -> Inputs:
    text, grid, tokens = 4, (2, 2, 2), 8
    vision = torch.arange(text, text + tokens)
    return {
        "input_ids": torch.arange(text),
        "text_indexes": torch.arange(text),
        "position_ids": torch.cat([torch.arange(text).expand(3, -1), text + _grid(*grid).long().T], dim=1),
        "und_len": text,
        "sequence_length": text + tokens,
        "vision_tokens": [randn(1, 4, 2, 4, 4)],
        "vision_token_shapes": [grid],
        "vision_sequence_indexes": vision,
        "vision_mse_loss_indexes": vision,
        "vision_timesteps": torch.full((tokens,), 500.0),
        "vision_noisy_frame_indexes": [torch.arange(2)],
    }


def _hunyuan_dit(**more: Any) -> Inputs:
    return _image_text(
        4,
        16,
        timestep=_step(torch.float),
        text_embedding_mask=_mask(),
        encoder_hidden_states_t5=_text(16),
        text_embedding_mask_t5=_mask(),
        image_meta_size=torch.full((_BATCH, 6), 64.0),
        style=torch.zeros(_BATCH, dtype=torch.long),
        image_rotary_emb=_rope(_IMAGE, 16),
        **more,
    )


def _hunyuan_video(channels: int = 4, **more: Any) -> Inputs:
    return _video_text(
        channels,
        16,
        timestep=_step(torch.float),
        encoder_attention_mask=_mask(),
        pooled_projections=randn(_BATCH, 8),
        **more,
    )


def _guidance() -> torch.Tensor:
    return torch.full((_BATCH,), 4000.0)


def _frames(*counts: int) -> tuple[torch.Tensor, ...]:
    """Frame indices of consecutive pieces of a video."""
    return torch.arange(sum(counts)).split(counts)


def _framepack() -> Inputs:
    clean, twice, four, latents = _frames(1, 2, 4, 2)
    return _hunyuan_video(
        guidance=_guidance(),
        image_embeds=randn(_BATCH, 3, 8),
        indices_latents=latents,
        latents_clean=_video(4, 1),
        indices_latents_clean=clean,
        latents_history_2x=_video(4, 2),
        indices_latents_history_2x=twice,
        latents_history_4x=_video(4, 4),
        indices_latents_history_4x=four,
    )


def _helios() -> Inputs:
    long, mid, short, latents = (indices.expand(_BATCH, -1) for indices in _frames(4, 2, 1, 2))
    return _video_text(
        4,
        16,
        indices_hidden_states=latents,
        indices_latents_history_short=short,
        indices_latents_history_mid=mid,
        indices_latents_history_long=long,
        latents_history_short=_video(4, 1),
        latents_history_mid=_video(4, 2),
        latents_history_long=_video(4, 4),
    )


def _ideogram4() -> Inputs:
    tokens = _TEXT + _IMAGE
    image = torch.arange(tokens) >= _TEXT
    return {
        "hidden_states": randn(_BATCH, tokens, 8),
        "timestep": _time(),
        "encoder_hidden_states": _text(16, tokens),
        "position_ids": torch.cat([torch.arange(_TEXT)[:, None].expand(-1, 3), _TEXT + _grid(1, 4, 4).long()]).expand(
            _BATCH, -1, -1
        ),
        "segment_ids": torch.ones(_BATCH, tokens, dtype=torch.long),
        "indicator": torch.where(image, 2, 3).expand(_BATCH, -1),
    }


def _ltx(**more: Any) -> Inputs:
    return _inputs(randn(_BATCH, _IMAGE, 4), 16, encoder_attention_mask=_mask(), **more)


def _minimax_h3() -> Inputs:
    video, audio = 8, 3
    tokens = _TEXT + video + audio
    text_indices, video_indices, audio_indices = torch.arange(tokens).split([_TEXT, video, audio])
    return {
        "hidden_states": randn(_BATCH, video, 16),
        "audio_hidden_states": randn(_BATCH, audio, 4),
        "encoder_hidden_states": _text(16),
        "timestep": torch.tensor([0.0, 0.5]),
        "timestep_indices": (torch.arange(tokens) >= _TEXT).long(),
        "token_tags": torch.tensor([1] * _TEXT + [0] * video + [2] * audio),
        "position_ids": torch.arange(tokens)[:, None].expand(-1, 3),
        "video_indices": video_indices,
        "audio_indices": audio_indices,
        "text_indices": text_indices,
    }


def _rfd4() -> Inputs:
    tokens = 8
    return {
        "padding_mask": _mask(tokens),
        "token_type": torch.zeros(_BATCH, tokens, dtype=torch.long),
        "conditioning": {
            "is_in_context_conditioning": torch.zeros(_BATCH, tokens, dtype=torch.bool),
            "supports_local_latent": torch.ones(_BATCH, tokens, dtype=torch.bool),
            "condition_CoordinateGroup_1_atom": torch.zeros(_BATCH, tokens, 37, dtype=torch.long),
        },
    }


def _sana_wm() -> Inputs:
    frames, tokens = _VIDEO[0], 32
    rays = torch.eye(4).repeat(_BATCH, tokens, 1, 1)
    rays[..., :3, :3] = torch.linalg.qr(randn(_BATCH, tokens, 3, 3)).Q
    return _video_text(
        4,
        16,
        timestep=_step()[:, None, None].expand(-1, 1, frames),
        encoder_attention_mask=_mask(),
        camera_conditions=randn(_BATCH, frames, 20),
        # What the model computes from the cameras itself, but for bfloat16 on the CPU.
        cam_pos_embeds={"P": rays, "P_inv": rays.mT, "absmap": _video(3)},
        chunk_plucker=_video(6),
    )


def _zimage(**more: Any) -> Inputs:
    return {
        "x": [randn(4, 1, 8, 8) for _ in range(_BATCH)],
        "t": _time(),
        "cap_feats": [randn(tokens, 16) for tokens in (_TEXT, _TEXT - 2)],
        **more,
    }


def _wan_i2v(channels: int, **more: Any) -> Inputs:
    """What comes before the last 512 tokens of the context is the image, so the text must be as long as that."""
    text, image = _text(16, 512), _text(8, 3)
    return {
        **_video_text(channels, 16),
        "encoder_hidden_states": text,
        "encoder_hidden_states_image": image,
        **more,
    }


def _wan_animate2_cache() -> Any:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return WanAnimate2KVCache(2)


def _cosmos_controlnet(cls: Any, config: dict[str, Any]) -> nn.Module:
    """Resizes its padding mask with torchvision, which nothing else here needs: lent where it is not installed."""
    module = sys.modules[cls.__module__]
    if not hasattr(module, "transforms"):
        module.transforms = SimpleNamespace(  # type: ignore[attr-defined]
            functional=SimpleNamespace(
                resize=lambda mask, size, interpolation: F.interpolate(mask, size, mode=interpolation)
            ),
            InterpolationMode=SimpleNamespace(NEAREST="nearest"),
        )
    return cls(**config)


def _ltx2_decoder(cls: Any, config: dict[str, Any]) -> nn.Module:
    """Draws the noise that it starts from: the same at every call, in one dtype."""
    model = cls(**config)
    model.register_forward_pre_hook(_same_noise, with_kwargs=True)
    return model


def _same_noise(module: nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> tuple[tuple[Any, ...], Inputs]:
    return args, {"generator": torch.Generator("cpu").manual_seed(0), **kwargs}


def _zimage_controlnet(cls: Any, config: dict[str, Any]) -> nn.Module:
    import diffusers

    return cls.from_transformer(cls(**config), diffusers.ZImageTransformer2DModel(**_ZIMAGE))


# fmt: off
_TINY: dict[str, _Tiny] = {
    "AceStepTransformer1DModel": _Tiny(
        {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "in_channels": 12, "audio_acoustic_hidden_dim": 4,
            "sliding_window": 4,
        },
        lambda: _inputs(
            randn(_BATCH, 16, 4), 32, context_latents=randn(_BATCH, 16, 8), timestep=_time(), timestep_r=_time(),
        ),
    ),
    "AnimaTextConditioner": _Tiny(
        {
            "source_dim": 16, "target_dim": 32, "model_dim": 32, "num_layers": 1, "num_attention_heads": 2,
            "mlp_ratio": 2.0, "target_vocab_size": 32, "min_sequence_length": 8,
        },
        lambda: {"source_hidden_states": _text(16), "target_input_ids": torch.arange(_TEXT).expand(_BATCH, -1)},
    ),
    "AnyFlowFARTransformer3DModel": _Tiny(
        _WAN,
        lambda: _inputs(
            randn(_BATCH, 3, 4, 4, 4), 16, timestep=_step()[:, None].expand(-1, 3),
            r_timestep=_step()[:, None].expand(-1, 3) - 100, chunk_partition=[1, 2],
        ),
    ),
    "AnyFlowTransformer3DModel": _Tiny(
        _WAN,
        lambda: _inputs(
            randn(_BATCH, 2, 4, 4, 4), 16, timestep=_step()[:, None].expand(-1, 2),
            r_timestep=_step()[:, None].expand(-1, 2) - 100,
        ),
    ),
    "AuraFlowTransformer2DModel": _Tiny(
        {
            **_HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_mmdit_layers": 1,
            "num_single_dit_layers": 1, "joint_attention_dim": 16, "caption_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
        lambda: _image_text(4, 16),
    ),
    "AutoencoderKLMiniMaxH3": _Tiny(
        {
            "latent_channels": 4, "latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4, "block_out_channels": (8, 8),
            "layers_per_block": 1, "spatial_downsample_factors": (2, 1), "temporal_downsample_factors": (2, 1),
            "norm_num_groups": 4, "decoder_num_layers": 2, "decoder_num_attention_heads": 2,
            "decoder_attention_head_dim": 16, "decoder_num_register_tokens": 1, "decoder_ffn_mult": 2, "clip_length": 3,
            "token_drop": 1,
        },
        lambda: {"sample": randn(_BATCH, 3, 6, 8, 8)},
    ),
    "AutoencoderKLMochi": _Tiny(
        {
            "encoder_block_out_channels": (32, 32, 32, 32), "decoder_block_out_channels": (32, 32, 32, 32),
            "layers_per_block": (1, 1, 1, 1, 1),
        },
        lambda: {"sample": randn(_BATCH, 3, 7, 32, 32)},
    ),
    "AutoencoderSAME": _Tiny(
        {
            "patch_size": 4, "encoder_channels": 32, "encoder_c_mults": (1,), "encoder_strides": (4,),
            "encoder_transformer_depths": (2,), "latent_dim": 8, "dim_heads": 16,
        },
        lambda: {"sample": randn(_BATCH, 2, 128)},
    ),
    "BriaFibo2Transformer2DModel": _Tiny(
        {
            "in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "cap_feat_dim": 16,
            "injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 4, "max_num_gist_tokens": 8,
            "gist_step": 2, "gist_min_text_len": 4, "gist_max_text_len": 16, "axes_dims": (4, 6, 6),
            "axes_lens": (64, 16, 16),
        },
        lambda: {**_image_text(4, 16), "encoder_hidden_states": randn(_BATCH, 2, _TEXT, 16)},
    ),
    "BriaFiboTransformer2DModel": _Tiny(
        {**_FLUX, "axes_dims_rope": [16, 24, 24], "text_encoder_dim": 8},
        lambda: _packed(8, 16, timestep=_step(), text_encoder_layers=[_text(8), _text(8)]),
    ),
    "BriaTransformer2DModel": _Tiny(
        {**_FLUX, "axes_dims_rope": [16, 24, 24]},
        lambda: _packed(8, 16, timestep=_step()),
    ),
    "ChromaTransformer2DModel": _Tiny(
        {**_FLUX, "approximator_num_channels": 16, "approximator_hidden_dim": 32, "approximator_layers": 1},
        lambda: _packed(8, 16),
    ),
    "ChronoEditTransformer3DModel": _Tiny({**_WAN, **_WAN_I2V}, lambda: _wan_i2v(4)),
    "CogVideoXTransformer3DModel": _Tiny(_COGVIDEOX, lambda: _cogvideox(8)),
    "CogVideoXTransformer3DModel#CogVideoX15Transformer": _Tiny(
        {**_COGVIDEOX, "patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 8},
        lambda: {**_cogvideox(4), "ofs": torch.full((1,), 2.0)},
    ),
    "CogView3PlusTransformer2DModel": _Tiny(
        {**_COGVIEW, "pos_embed_max_size": 8, "sample_size": 8},
        lambda: _cogview("original_size", "target_size", "crop_coords"),
    ),
    "CogView4Transformer2DModel": _Tiny(
        {**_COGVIEW, "sample_size": 8, "rope_axes_dim": (16, 16)},
        lambda: _cogview("original_size", "target_size", "crop_coords"),
    ),
    "ConsisIDTransformer3DModel": _Tiny(_COGVIDEOX, lambda: _cogvideox(8)),
    "Cosmos3OmniTransformer": _Tiny({**_COSMOS3, "hidden_act": "relu2", "qk_norm_for_text": False}, _cosmos3),
    "Cosmos3OmniTransformer#silu_rms": _Tiny(_COSMOS3, _cosmos3),
    "CosmosControlNetModel": _Tiny(
        {
            "n_controlnet_blocks": 2, "in_channels": 6, "latent_channels": 6, "model_channels": 32, **_HEADS,
            "mlp_ratio": 2.0, "text_embed_dim": 16, "adaln_lora_dim": 4, "max_size": (4, 8, 8), "img_context_dim_in": 8,
            "img_context_dim_out": 32,
        },
        lambda: {
            "controls_latents": _video(4), "latents": _video(4), "timestep": _time(),
            "encoder_hidden_states": (_text(16), randn(_BATCH, 3, 8)),
            "condition_mask": torch.zeros(_BATCH, 1, *_VIDEO), "padding_mask": torch.zeros(1, 1, 4, 4),
        },
        _cosmos_controlnet,
    ),
    "CosmosTransformer3DModel": _Tiny(_COSMOS, lambda: _video_text(4, 16, timestep=_time(), fps=16)),
    "CosmosTransformer3DModel#CosmosTransformerVideoToWorld": _Tiny(
        {**_COSMOS, "in_channels": 5},
        lambda: _video_text(4, 16, timestep=_time(), condition_mask=torch.zeros(_BATCH, 1, *_VIDEO), fps=16),
    ),
    "DreamLiteUNetModel": _Tiny(
        {
            "block_out_channels": (16, 32, 32), "layers_per_block": 1, "attention_head_dim": 2,
            "cross_attention_dim": 16, "norm_num_groups": 8, "ff_mult": 2, "transformer_layers_per_block": 1,
        },
        lambda: {"sample": randn(_BATCH, 4, 8, 8), "timestep": _step(), "encoder_hidden_states": _text(16)},
    ),
    "EasyAnimateTransformer3DModel": _Tiny(
        {
            **_HEADS, "in_channels": 4, "out_channels": 4, "patch_size": 2, "sample_width": 4, "sample_height": 4,
            "num_layers": 2, "mmdit_layers": 1, "time_embed_dim": 8, "text_embed_dim": 16,
        },
        lambda: _video_text(4, 16),
    ),
    "ErnieImageTransformer2DModel": _Tiny(
        {
            "hidden_size": 64, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 64, "in_channels": 4,
            "out_channels": 4, "text_in_dim": 16, "rope_axes_dim": (8, 12, 12),
        },
        lambda: {
            "hidden_states": randn(_BATCH, 4, 4, 4), "timestep": _step(), "text_bth": _text(16),
            "text_lens": torch.tensor([_TEXT, _TEXT - 2]),
        },
    ),
    "Flux2Transformer2DModel": _Tiny(
        {
            **_FLUX, "attention_head_dim": 128, "axes_dims_rope": (32, 32, 32, 32), "timestep_guidance_channels": 16,
            "mlp_ratio": 1.0,
        },
        lambda: _packed(8, 16, axes=4, guidance=torch.full((_BATCH,), 4.0)),
    ),
    "Flux3Transformer2DModel": _Tiny(
        {
            **_FLUX, "cond_in_channels": 8, "attention_head_dim": 128, "axes_dims_rope": (32, 32, 32, 32),
            "timestep_channels": 16, "mlp_ratio": 1.0,
        },
        lambda: _packed(8, 16, axes=4, image_cond_hidden_states=randn(_BATCH, 4, 8), image_cond_ids=_grid(1, 2, 2, 1)),
    ),
    "FluxControlNetModel": _Tiny(
        {**_FLUX, "axes_dims_rope": [16, 24, 24], "pooled_projection_dim": 8},
        lambda: _packed(8, 16, pooled_projections=randn(_BATCH, 8), controlnet_cond=randn(_BATCH, _IMAGE, 8)),
    ),
    "FluxTransformer2DModel": _Tiny(
        {**_FLUX, "pooled_projection_dim": 8, "guidance_embeds": True},
        lambda: _packed(8, 16, pooled_projections=randn(_BATCH, 8), guidance=torch.full((_BATCH,), 4.0)),
    ),
    "GlmImageTransformer2DModel": _Tiny(
        {**_COGVIEW, "prior_vq_quantizer_codebook_size": 32},
        lambda: _cogview(
            "target_size", "crop_coords", prior_token_id=torch.arange(_IMAGE).expand(_BATCH, -1),
            prior_token_drop=torch.zeros(_BATCH, _IMAGE, dtype=torch.bool),
        ),
    ),
    "HeliosTransformer3DModel": _Tiny({**_WAN, "rope_dim": (4, 6, 6)}, _helios),
    "HiDreamImageTransformer2DModel": _Tiny(
        {
            **_HEADS, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
            "caption_channels": [16, 16], "text_emb_dim": 8, "num_routed_experts": 2, "num_activated_experts": 1,
            "axes_dims_rope": (8, 4, 4), "max_resolution": (8, 8), "llama_layers": [0, 1],
        },
        lambda: {
            "hidden_states": randn(_BATCH, 4, 8, 8), "timesteps": _step(), "encoder_hidden_states_t5": _text(16),
            "encoder_hidden_states_llama3": randn(2, _BATCH, _TEXT, 16), "pooled_embeds": randn(_BATCH, 8),
        },
    ),
    "HunyuanDiT2DControlNetModel": _Tiny(
        {**_HUNYUAN_DIT, "transformer_num_layers": 4},
        lambda: _hunyuan_dit(controlnet_cond=randn(_BATCH, 4, 8, 8)),
    ),
    "HunyuanDiT2DModel": _Tiny({**_HUNYUAN_DIT, "num_layers": 2}, _hunyuan_dit),
    "HunyuanImageTransformer2DModel": _Tiny(
        {
            **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
            "num_refiner_layers": 1, "mlp_ratio": 2.0, "text_embed_dim": 16, "rope_axes_dim": (8, 8),
        },
        lambda: _inputs(randn(_BATCH, 4, 4, 4), 16, timestep=_step(torch.float), encoder_attention_mask=_mask()),
    ),
    "HunyuanVideo15Transformer3DModel": _Tiny(
        {
            **_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 2.0,
            "text_embed_dim": 16, "text_embed_2_dim": 8, "image_embed_dim": 8, "rope_axes_dim": (4, 6, 6),
            "target_size": 16,
        },
        lambda: _video_text(
            4, 16, timestep=_step(torch.float), encoder_attention_mask=_mask(), encoder_hidden_states_2=_text(8),
            encoder_attention_mask_2=_mask(), image_embeds=randn(_BATCH, 3, 8),
        ),
    ),
    "HunyuanVideoFramepackTransformer3DModel": _Tiny(
        {**_HUNYUAN_VIDEO, "has_image_proj": True, "image_proj_dim": 8, "has_clean_x_embedder": True},
        _framepack,
    ),
    "HunyuanVideoTransformer3DModel": _Tiny(_HUNYUAN_VIDEO, lambda: _hunyuan_video(guidance=_guidance())),
    "HunyuanVideoTransformer3DModel#HunyuanVideoI2VTransformer": _Tiny(
        {**_HUNYUAN_VIDEO, "in_channels": 9, "guidance_embeds": False, "image_condition_type": "latent_concat"},
        lambda: _hunyuan_video(9),
    ),
    "HunyuanVideoTransformer3DModel#HunyuanVideoTokenReplaceTransformer": _Tiny(
        {**_HUNYUAN_VIDEO, "image_condition_type": "token_replace"},
        lambda: _hunyuan_video(guidance=_guidance()),
    ),
    "Ideogram4Transformer2DModel": _Tiny(
        {
            "in_channels": 8, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32,
            "intermediate_size": 64, "adaln_dim": 16, "llm_features_dim": 16, "mrope_section": (6, 5, 5),
        },
        _ideogram4,
    ),
    "JoyImageEditPlusTransformer3DModel": _Tiny(
        _JOYIMAGE,
        lambda: _inputs(randn(_BATCH, 8, 4, 1, 2, 2), 16, shape_list=[[(1, 2, 2), (1, 2, 2)]] * _BATCH),
    ),
    "JoyImageEditTransformer3DModel": _Tiny(_JOYIMAGE, lambda: _video_text(4, 16)),
    "Kandinsky5Transformer3DModel": _Tiny(
        {
            "in_text_dim": 16, "in_text_dim2": 8, "time_dim": 16, "model_dim": 32, "ff_dim": 64, "num_text_blocks": 1,
            "num_visual_blocks": 1, "axes_dims": (4, 6, 6),
        },
        lambda: _inputs(
            randn(_BATCH, *_VIDEO, 4), 16, pooled_projections=randn(_BATCH, 8),
            visual_rope_pos=[torch.arange(2), torch.arange(2), torch.arange(2)], text_rope_pos=torch.arange(_TEXT),
        ),
    ),
    "Kandinsky6SRTransformer3DModel": _Tiny(
        {
            "in_visual_dim": 4, "out_visual_dim": 4, "time_dim": 16, "model_dim": 32, "ff_dim": 64,
            "num_visual_blocks": 1, "axes_dims": (4, 6, 6),
        },
        lambda: {"hidden_states": randn(_BATCH, 1, 8, 8, 9), "timestep": _step()},
    ),
    "Kandinsky6Transformer3DModel": _Tiny(
        {
            "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 8, "time_dim": 16,
            "model_dim": 32, "ff_dim": 64, "num_text_blocks": 1, "num_visual_blocks": 1, "axes_dims": (4, 6, 6),
            "visual_cond": False, "in_audio_dim": 4, "out_audio_dim": 4,
        },
        lambda: _inputs(
            randn(_BATCH, *_VIDEO, 4), 16, pooled_projections=randn(_BATCH, 8), audio_hidden_states=randn(_BATCH, 3, 4),
        ),
    ),
    "Krea2Transformer2DModel": _Tiny(
        {
            "in_channels": 8, "num_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
            "intermediate_size": 64, "timestep_embed_dim": 16, "text_hidden_dim": 128, "num_text_layers": 2,
            "text_num_attention_heads": 2, "text_num_key_value_heads": 2, "text_intermediate_size": 64,
            "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
        },
        lambda: {
            "hidden_states": randn(_BATCH, _IMAGE, 8), "encoder_hidden_states": randn(_BATCH, _TEXT, 2, 128),
            "timestep": _time(), "position_ids": torch.cat([torch.zeros(_TEXT, 3), _grid(1, 4, 4)]),
        },
    ),
    "LTX2VideoDiffusionDecoderModel": _Tiny(
        {
            "latent_channels": 4, "patch_size": 2, "decoder_head_dim": 8, "decoder_stage_channels": (32, 16, 16, 16, 8),
            "decoder_stage_depths": (1, 1, 1, 1, 1), "decoder_stage_kernels": ((1, 3, 3),) * 4,
            "decoder_upsample_strides": ((2, 1, 1), (1, 1, 1), (1, 1, 1), (1, 2, 2)),
            "decoder_upsample_channel_reductions": (2, 1, 1, 2), "decoder_stage5_kernel": (1, 3, 3),
            "decoder_t_emb_dim": 16, "temporal_compression_ratio": 2, "spatial_compression_ratio": 4,
        },
        lambda: {"z": randn(_BATCH, 4, 2, 3, 3)},
        _ltx2_decoder,
    ),
    "LTX2VideoTransformer3DModel": _Tiny(
        _LTX2,
        lambda: _ltx(
            audio_hidden_states=randn(_BATCH, 3, 4), audio_encoder_hidden_states=_text(16),
            audio_encoder_attention_mask=_mask(), num_frames=2, height=4, width=2, audio_num_frames=3,
        ),
    ),
    "LTXVideoTransformer3DModel": _Tiny(
        {
            **_HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "num_layers": 1,
            "caption_channels": 16,
        },
        lambda: _ltx(num_frames=2, height=4, width=2),
    ),
    "LongCatAudioDiTTransformer": _Tiny(
        {"dit_dim": 32, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": 16, "latent_dim": 4, "ff_mult": 2.0},
        lambda: _inputs(
            randn(_BATCH, 16, 4), 16, encoder_attention_mask=_mask(), timestep=_time(),
            latent_cond=randn(_BATCH, 16, 4),
        ),
    ),
    "LongCatImageTransformer2DModel": _Tiny(
        {**_FLUX, "axes_dims_rope": [16, 24, 24], "pooled_projection_dim": 8},
        lambda: _packed(8, 16),
    ),
    "Lumina2Transformer2DModel": _Tiny(
        {
            "sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 1, "num_refiner_layers": 1,
            "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16, "axes_dim_rope": (4, 6, 6),
            "axes_lens": (32, 16, 16), "cap_feat_dim": 16,
        },
        lambda: _image_text(4, 16, encoder_attention_mask=_mask()),
    ),
    "LuminaNextDiT2DModel": _Tiny(
        {
            "sample_size": 8, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2, "num_kv_heads": 1,
            "multiple_of": 16, "cross_attention_dim": 16,
        },
        lambda: _image_text(
            4, 16, encoder_mask=_mask(), image_rotary_emb=torch.polar(torch.ones(4, 4, 8), rand(4, 4, 8)),
            cross_attention_kwargs={},
        ),
    ),
    "MiniMaxH3Transformer3DModel": _Tiny(
        {
            "num_attention_heads": 2, "attention_head_dim": 32, "hidden_size": 32, "num_layers": 2,
            "num_refiner_layers": 1, "ffn_dim": 48, "in_channels": 4, "audio_in_channels": 4, "text_dim": 16,
            "freq_dim": 16, "time_embed_hidden_dim": 16, "time_embed_dim": 16, "rope_freq_dim": 4,
        },
        _minimax_h3,
    ),
    "MochiTransformer3DModel": _Tiny(
        {
            **_HEADS, "num_layers": 2, "pooled_projection_dim": 16, "in_channels": 4, "text_embed_dim": 16,
            "time_embed_dim": 16, "max_sequence_length": _TEXT,
        },
        lambda: _video_text(4, 16, encoder_attention_mask=_mask()),
    ),
    "MotifVideoTransformer3DModel": _Tiny(_MOTIF, lambda: _video_text(9, 16)),
    "MotifVideoTransformer3DModel#qk_layer_norm": _Tiny(
        {**_MOTIF, "qk_norm": "layer_norm"},
        lambda: _video_text(9, 16),
    ),
    "NucleusMoEImageTransformer2DModel": _Tiny(
        {
            **_QWEN, "mlp_ratio": 2.0, "dense_moe_strategy": "leave_first_block_dense", "num_experts": 2,
            "capacity_factors": 1.0, "moe_intermediate_dim": 16,
        },
        lambda: _inputs(randn(_BATCH, _IMAGE, 8), 16, timestep=_time(), img_shapes=[(1, 4, 4)] * _BATCH),
    ),
    "OvisImageTransformer2DModel": _Tiny({**_FLUX, "out_channels": 8}, lambda: _packed(8, 16)),
    "PRXTransformer2DModel": _Tiny(
        {
            "in_channels": 4, "context_in_dim": 16, "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2,
            "axes_dim": [8, 8],
        },
        lambda: _image_text(4, 16),
    ),
    "QwenImage21Transformer2DModel": _Tiny(
        {
            **_HEADS, "in_channels": 8, "out_channels": 8, "num_layers": 2, "context_in_dim": 16, "mlp_ratio": 2,
            "axes_dims_rope": (4, 6, 6),
        },
        lambda: _inputs(
            randn(_BATCH, _IMAGE, 8), 16, timestep=_time(), img_shapes=[[(1, 4, 4)]] * _BATCH,
            img_mask=(torch.arange(_TEXT + 4) >= _TEXT).expand(_BATCH, -1),
        ),
    ),
    "QwenImageControlNetModel": _Tiny(
        _QWEN,
        lambda: _inputs(
            randn(_BATCH, _IMAGE, 8), 16, controlnet_cond=randn(_BATCH, _IMAGE, 8), timestep=_time(),
            img_shapes=[[(1, 4, 4)]] * _BATCH,
        ),
    ),
    "QwenImageTransformer2DModel": _Tiny(
        _QWEN,
        lambda: _inputs(randn(_BATCH, _IMAGE, 8), 16, timestep=_time(), img_shapes=[[(1, 4, 4)]] * _BATCH),
    ),
    "RFD4ProteinaAutoencoder": _Tiny(
        {
            "atom37_mask": [[True] * 37] * 4, "allowed_residue_types": [[True] * 4] * 2, "latent_dim": 4,
            "n_residue_types": 4, "num_token_types": 2, "nlayers": 2, "token_dim": 32, "nheads": 2, "dim_cond": 16,
            "pair_repr_dim": 16, "token_type_emb_dim": 8, "encoder_feats_seq": ("token_type",),
        },
        lambda: {"z_latent": randn(_BATCH, 8, 4), "ca_coors_nm": randn(_BATCH, 8, 3), **_rfd4()},
    ),
    "RFD4ProteinaTransformer": _Tiny(
        {
            "nlayers": 2, "token_dim": 32, "nheads": 2, "dim_cond": 16, "pair_repr_dim": 16, "latent_dim": 4,
            "token_type_emb_dim": 8, "t_emb_dim": 16, "xt_pair_dist_dim": 6,
            "feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"),
            "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents"), "feats_pair_repr": ("xt_bb_ca_pair_dists",),
            "tri_mult_c": 16, "num_sequence_classes": 8,
        },
        lambda: {
            "bb_ca": randn(_BATCH, 8, 3), "local_latents": randn(_BATCH, 8, 4), "bb_ca_time": _time(),
            "local_latents_time": _time(), **_rfd4(),
        },
    ),
    "SD3ControlNetModel": _Tiny(
        {**_SD3, "dual_attention_layers": (), "qk_norm": "rms_norm"},
        lambda: {
            **_image_text(4, 16), "pooled_projections": randn(_BATCH, 8), "controlnet_cond": randn(_BATCH, 4, 8, 8),
        },
    ),
    "SD3Transformer2DModel#SD35Transformer": _Tiny(
        {**_SD3, "qk_norm": "rms_norm"},
        lambda: _image_text(4, 16, pooled_projections=randn(_BATCH, 8), timestep=_step()),
    ),
    "SD3Transformer2DModel#SD35Transformer#qk_layer_norm": _Tiny(
        {**_SD3, "qk_norm": "layer_norm"},
        lambda: _image_text(4, 16, pooled_projections=randn(_BATCH, 8), timestep=_step()),
    ),
    "SanaTransformer2DModel#qk_rms_across": _Tiny(_SANA, lambda: _inputs(randn(_BATCH, 4, 4, 4), 16)),
    "SanaVideoTransformer3DModel": _Tiny(_SANA, lambda: _video_text(4, 16)),
    "SanaWMLTX2RefinerTransformer3DModel": _Tiny(_LTX2, lambda: _ltx(video_rotary_emb=_rope(_IMAGE, 32))),
    "SanaWMTransformer3DModel": _Tiny(
        {
            "in_channels": 4, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "softmax_every_n": 2,
            "linear_head_dim": 16, "chunk_plucker_channels": 6, "caption_channels": 16, "mlp_ratio": 2.0,
        },
        _sana_wm,
    ),
    "SkyReelsV2Transformer3DModel": _Tiny(_WAN, lambda: _video_text(4, 16)),
    "StableAudio3DiTModel": _Tiny(
        {
            "io_channels": 4, "embed_dim": 32, "depth": 1, "num_heads": 2, "cond_token_dim": 16, "global_cond_dim": 16,
            "local_add_cond_dim": 5, "timestep_features_dim": 16, "ff_mult": 2.0, "num_memory_tokens": 2,
        },
        lambda: _inputs(
            randn(_BATCH, 4, 16), 16, timestep=_time(), global_hidden_states=randn(_BATCH, 16),
            local_add_cond=randn(_BATCH, 5, 16),
        ),
    ),
    "WanAnimate2Transformer3DModel": _Tiny(
        {
            "text_len": _TEXT, "in_dim": 8, "dim": 32, "ffn_dim": 32, "freq_dim": 16, "text_dim": 16, "out_dim": 4,
            "num_heads": 2, "num_layers": 2,
        },
        lambda: {
            "hidden_states": [randn(4, *_VIDEO) for _ in range(_BATCH)], "timestep": _step(),
            "encoder_hidden_states": [randn(_TEXT, 16) for _ in range(_BATCH)],
            "condition_latents": [randn(4, *_VIDEO) for _ in range(_BATCH)], "kv_cache": _wan_animate2_cache(),
            "kv_cache_mode": "extract", "seq_len": 8, "encoder_hidden_states_image": randn(_BATCH, 3, 1280),
            "offset_grid_sizes": torch.tensor([[2, 2, 2]] * _BATCH),
        },
    ),
    "WanAnimateTransformer3DModel": _Tiny(
        {
            **_WAN, **_WAN_I2V, "in_channels": 12, "latent_channels": 4,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}, "motion_encoder_size": 16, "motion_style_dim": 8,
            "motion_dim": 4, "motion_encoder_dim": 8, "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 2,
        },
        lambda: _wan_i2v(
            12, hidden_states=_video(12, 3), pose_hidden_states=_video(4, 2),
            face_pixel_values=randn(_BATCH, 3, 5, 16, 16),
        ),
    ),
    "WanTransformer3DModel": _Tiny(_WAN, lambda: _video_text(4, 16)),
    "WanVACETransformer3DModel": _Tiny(
        {**_WAN, "vace_layers": [0], "vace_in_channels": 8},
        lambda: _video_text(4, 16, control_hidden_states=_video(8)),
    ),
    "ZImageControlNetModel": _Tiny(
        {
            "control_layers_places": [0], "control_refiner_layers_places": [0], "control_in_dim": 4,
            "add_control_noise_refiner": "control_noise_refiner", "dim": 32, "n_refiner_layers": 1, "n_heads": 2,
            "n_kv_heads": 2,
        },
        lambda: _zimage(control_context=[randn(4, 1, 8, 8) for _ in range(_BATCH)]),
        _zimage_controlnet,
    ),
    "ZImageTransformer2DModel": _Tiny(_ZIMAGE, _zimage),
}
# fmt: on


def build(
    name: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[nn.Module, Inputs]:
    """A tiny model, in evaluation mode, and the keyword arguments for its forward.

    Args:
        name: one of ``names()``.
        dtype: of every parameter and buffer (a whole-model cast, whatever the class would keep in float32), and of the
            floating-point inputs. Rotary tables stay in float32, timesteps in int64 where the pipeline leaves them so.
        device: where model and inputs go. The weights and inputs are the same on every device.
        seed: of the weights and the inputs. The global random state is neither read nor changed.

    Returns:
        ``(model, inputs)``, for ``model(**inputs)``. No parameter is left as a constant: norm weights, biases and
        zero-initialised gates and projections are moved by N(0, 0.1), so that the output depends on all of them.

    Raises:
        ValueError: the name is unknown.
        ImportError: diffusers is not installed, or is too old to have the class.
    """
    cls, tiny = _look_up(name)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.random.default_generator.manual_seed(seed)
        model = tiny.make(cls, tiny.config).eval()
        _unsettle(model)
        inputs = tiny.inputs()
    # diffusers' own ``to`` logs a warning for each model that would keep modules in float32.
    return nn.Module.to(model, device=device, dtype=dtype), _move(inputs, dtype, device)


def _look_up(name: str) -> tuple[Any, _Tiny]:
    try:
        import diffusers
    except ImportError as error:
        raise ImportError(
            'tiny models are built from classes of diffusers, which is not installed: pip install "qknorm[diffusers]"'
        ) from error
    class_name = name.partition("#")[0]
    cls = getattr(diffusers, class_name, None)
    if name not in _TINY:
        raise ValueError(_unknown(name, cls))
    if cls is None:
        raise ImportError(f"diffusers {diffusers.__version__} has no {class_name}: pip install --upgrade diffusers")
    return cls, _TINY[name]


def _unknown(name: str, cls: Any) -> str:
    class_name = name.partition("#")[0]
    if variants := [known for known in _TINY if known.partition("#")[0] == class_name]:
        return f"{name!r} is not known, {class_name} is as: {', '.join(variants)}"
    if cls is not None:
        return (
            f"diffusers has {name!r}, but there is no tiny configuration of it here: write a function that returns "
            "(model, inputs), and name that as module:function"
        )
    close = difflib.get_close_matches(name, _TINY)
    hint = f"Close to it: {', '.join(close)}" if close else "qknorm.tiny.names() has those that are known"
    return f"{name!r} is neither known here nor a class of diffusers. {hint}"


@torch.no_grad()
def _unsettle(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and parameter.numel():
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        elif name.endswith(_UNINITIALISED):
            parameter.normal_(std=0.1)
        elif (parameter == parameter.mean()).all():
            parameter.add_(randn(parameter.shape), alpha=0.1)


def _move(value: Any, dtype: torch.dtype, device: torch.device | str, name: str = "") -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() or name in _FLOAT32:
            return value.to(device)
        return value.bfloat16().to(device, dtype)
    if isinstance(value, dict):
        return {key: _move(item, dtype, device, key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_move(item, dtype, device, name) for item in value)
    return value
