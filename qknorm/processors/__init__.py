"""Attention processors of diffusers that run norm and RoPE of q and k in one call: fuse and unfuse, a file a family."""

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..adapters import QK_NORM_NAMES, class_path
from ..replace import Entry, Report, check_model
from .base import FusedProcessor

_TRANSFORMERS = "diffusers.models.transformers.transformer"
# By the path of the stock class, matched exactly: the module here and the class that stand in for it, or why none does.
_FUSED: dict[str, tuple[str, str] | str] = {
    f"{_TRANSFORMERS}_flux.FluxAttnProcessor": ("flux", "FusedFluxAttnProcessor"),
    f"{_TRANSFORMERS}_flux2.Flux2AttnProcessor": ("flux2", "FusedFlux2AttnProcessor"),
    f"{_TRANSFORMERS}_flux2.Flux2ParallelSelfAttnProcessor": ("flux2", "FusedFlux2ParallelSelfAttnProcessor"),
    f"{_TRANSFORMERS}_flux3.Flux3AttnProcessor": ("flux3", "FusedFlux3AttnProcessor"),
    f"{_TRANSFORMERS}_krea2.Krea2AttnProcessor": ("krea2", "FusedKrea2AttnProcessor"),
    f"{_TRANSFORMERS}_qwenimage.QwenDoubleStreamAttnProcessor2_0": ("qwenimage", "FusedQwenDoubleStreamAttnProcessor"),
    f"{_TRANSFORMERS}_z_image.ZSingleStreamAttnProcessor": ("z_image", "FusedZSingleStreamAttnProcessor"),
    f"{_TRANSFORMERS}_ltx.LTXVideoAttnProcessor": ("ltx", "FusedLTXVideoAttnProcessor"),
    f"{_TRANSFORMERS}_ideogram4.Ideogram4AttnProcessor": ("ideogram4", "FusedIdeogram4AttnProcessor"),
    f"{_TRANSFORMERS}_wan.WanAttnProcessor": "it norms across heads and rotates each head by itself",
}


def fuse_qk_norm_rope(model: nn.Module) -> Report:
    """Set attention processors that norm and rotate q and k in one call, forward and backward, keeping their dtype.

    For Flux, Chroma, Flux2, Flux3, Krea2, QwenImage, Z-Image, LTX and Ideogram4 of diffusers, with the model's own
    norms or those of ``replace_qk_norms``; parameters, projections, mask, attention backend and parallel config stay
    the model's. At every call an attention runs as before where a norm has hooks, a wrapper or an instance
    ``forward``, or is not known; it warns, and another call of this function says so.

    Args:
        model: any module that contains attention layers.

    Returns:
        A ``Report`` of the attentions. A call that finds none to fuse warns.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_model(model)
    report = Report("fuse_qk_norm_rope")
    made: dict[int, FusedProcessor] = {}
    for fqn, attn in _attentions(model):
        stock = attn.processor
        name = type(stock).__name__
        if isinstance(stock, FusedProcessor):
            obstacle = stock.obstacle(attn)
            reason = f"it is fused, but runs unfused: {obstacle}" if obstacle else "it is fused already"
            report.skipped.append(Entry(fqn, name, reason=reason))
            continue
        fused = made.get(id(stock)) or _fused(stock)
        obstacle = fused if isinstance(fused, str) else fused.obstacle(attn)
        if isinstance(fused, str) or obstacle:
            report.skipped.append(Entry(fqn, name, reason=obstacle))
            continue
        made[id(stock)] = fused
        attn.processor = fused
        report.replaced.append(Entry(fqn, name, type(fused).__name__))
    if not report.replaced and not any((entry.reason or "").startswith("it is fused") for entry in report.skipped):
        seen = sorted({f"{entry.before}: {entry.reason}" for entry in report.skipped})
        warnings.warn(f"fuse_qk_norm_rope found nothing to fuse; skipped: {'; '.join(seen) or 'none'}", stacklevel=2)
    return report


def unfuse_qk_norm_rope(model: nn.Module) -> Report:
    """The inverse of ``fuse_qk_norm_rope``: every attention has the very processor object again that it had before.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_model(model)
    report = Report("unfuse_qk_norm_rope")
    for fqn, attn in _attentions(model):
        fused = attn.processor
        if isinstance(fused, FusedProcessor):
            attn.processor = fused.stock
            report.replaced.append(Entry(fqn, type(fused).__name__, type(fused.stock).__name__))
    return report


def _attentions(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every module of ``model`` with q/k norms and a processor, each once."""
    for fqn, module in model.named_modules():
        if getattr(module, "processor", None) is not None and QK_NORM_NAMES & module._modules.keys():
            yield fqn, module


def _fused(stock: Any) -> FusedProcessor | str:
    """The processor that stands in for ``stock``, or why none does."""
    found = _FUSED.get(class_path(type(stock)), "no fused processor stands in for its class")
    if isinstance(found, str):
        return found
    module, name = found
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)(stock)
