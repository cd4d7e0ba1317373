"""What is known of each norm class: where its weight and eps are, its offset, and where it rounds.

Data alone: class paths are strings, and nothing is imported for them. ``module.from_norm`` and ``replace`` read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# The attribute names under which q/k norms live.
QK_NORM_NAMES = frozenset(
    # diffusers
    "norm_q norm_k norm_added_q norm_added_k query_norm key_norm q_rms_norm k_rms_norm q_rms_norm_t k_rms_norm_t"
    " img_attn_q_norm img_attn_k_norm txt_attn_q_norm txt_attn_k_norm q_norm k_norm q_img_norm k_img_norm"
    " q_norm_cam k_norm_cam"
    # DiffSynth-Studio, Krea 2 and its trainers' copies, SD3's and Wan's originals
    " norm_q_a norm_k_a norm_q_b norm_k_b qnorm knorm ln_q ln_k norm_k_img".split()
)


@dataclass(frozen=True)
class Adapter:
    """How a norm class maps onto ``QKRMSNorm``.

    Args:
        weight: name of its weight parameter: "weight", "scale" or "gamma".
        eps: name of its eps attribute, or the eps itself where the class has none.
        unit_offset: the factor is ``1 + weight``.
        float32_weight: the class casts its weight to float32 first, which decides where ``1 + weight`` is rounded.
        rounding: "once", "weight" or "input", see ``qknorm.rms_norm``. The class itself is the judge: ``new(x)`` must
            equal ``old(x).to(x.dtype)`` bit for bit.
        requires: attributes that must have these values, or the module is left alone.
        twin: for a norm that is no RMSNorm, the name of its dtype-preserving twin in ``qknorm.module``; the other
            fields are then unused.
    """

    weight: str = "weight"
    eps: str | float | None = "eps"
    unit_offset: bool = False
    float32_weight: bool = False
    rounding: str = "once"
    requires: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    twin: str | None = None


_TORCH = "torch.nn.modules.normalization"
_DIFFUSERS = "diffusers.models.normalization"
_TRANSFORMERS = "diffusers.models.transformers"
_AI_TOOLKIT = "extensions_built_in.diffusion_models"
_MUSUBI = "musubi_tuner"
_OWN_CAST = "it casts its weight to the dtype of its input, and so keeps that dtype already"
_BFL = Adapter(weight="scale", eps=1e-6, rounding="input")
_INPUT = Adapter(rounding="input")
_SCALE_ONCE = Adapter(weight="scale", eps=1e-6)
_KREA2 = Adapter(weight="scale", unit_offset=True, float32_weight=True)

# By the path of the class. A string in place of an adapter says why a class is left alone.
ADAPTERS: dict[str, Adapter | str] = {
    f"{_TORCH}.RMSNorm": Adapter(),
    f"{_DIFFUSERS}.RMSNorm": Adapter(rounding="weight"),
    f"{_DIFFUSERS}.MochiRMSNorm": Adapter(),
    f"{_TRANSFORMERS}.transformer_krea2.Krea2RMSNorm": Adapter(unit_offset=True),
    f"{_TRANSFORMERS}.transformer_cosmos3.Cosmos3NemotronRMSNorm": Adapter(),
    f"{_TRANSFORMERS}.transformer_stable_audio3.StableAudio3RMSNorm": Adapter(
        weight="gamma", requires=MappingProxyType({"force_fp32": True})
    ),
    # Read in their sources: the original repositories and the trainers that keep copies of their models.
    "flux.modules.layers.RMSNorm": _BFL,
    "flux2.model.RMSNorm": _BFL,
    f"{_AI_TOOLKIT}.flux2.src.model.RMSNorm": _BFL,
    f"{_AI_TOOLKIT}.chroma.src.layers.RMSNorm": _SCALE_ONCE,
    f"{_AI_TOOLKIT}.krea2.src.mmdit.RMSNorm": _KREA2,
    f"{_MUSUBI}.flux.flux_models.RMSNorm": _SCALE_ONCE,
    f"{_MUSUBI}.flux_2.flux2_models.RMSNorm": _BFL,
    f"{_MUSUBI}.krea2.krea2_mmdit.RMSNorm": _KREA2,
    f"{_MUSUBI}.qwen_image.qwen_image_model.RMSNorm": Adapter(rounding="weight"),
    f"{_MUSUBI}.zimage.zimage_model.RMSNorm": Adapter(),
    "library.flux_models.RMSNorm": _SCALE_ONCE,  # sd-scripts, whose Chroma uses it too
    "library.lumina_models.RMSNorm": Adapter(eps=1e-6),  # its eps attribute is not used
    "library.hunyuan_image_modules.RMSNorm": _INPUT,
    "diffsynth.models.sd3_dit.RMSNorm": _INPUT,
    "diffsynth.models.general_modules.RMSNorm": _INPUT,
    "hyvideo.modules.norm_layers.RMSNorm": _INPUT,
    "wan.modules.model.WanRMSNorm": _INPUT,
    "comfy.ldm.krea2.model.RMSNorm": _KREA2,
    # These round the weight to the input's dtype, which no adapter says.
    f"{_MUSUBI}.wan.modules.model.WanRMSNorm": _OWN_CAST,
    f"{_MUSUBI}.hunyuan_model.norm_layers.RMSNorm": _OWN_CAST,
    "comfy.ldm.flux.layers.RMSNorm": _OWN_CAST,
    f"{_TORCH}.LayerNorm": Adapter(twin="QKLayerNorm"),
    f"{_DIFFUSERS}.LpNorm": Adapter(twin="QKLpNorm"),
    "diffusers.models.autoencoders.autoencoder_same.DynamicTanh": Adapter(twin="QKDynamicTanh"),
    f"{_DIFFUSERS}.FP32LayerNorm": "it returns the dtype of its input already",
    "torch.nn.modules.linear.Identity": "it norms nothing",
}

_REGISTERED: dict[type, Adapter] = {}


def register_norm(cls: type, adapter: Adapter) -> None:
    """Teach ``replace_qk_norms`` a norm class of your own, by exact class (its subclasses are not included).

    Args:
        cls: a subclass of ``torch.nn.Module``.
        adapter: an ``Adapter``; registering a class again replaces its adapter.

    Raises:
        TypeError, ValueError: ``cls`` is no module class, or ``adapter`` is not an ``Adapter`` of known values.
    """
    import torch

    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise TypeError(f"cls must be a subclass of torch.nn.Module, but is {cls!r}")
    if not isinstance(adapter, Adapter):
        raise TypeError(f"adapter must be a qknorm.adapters.Adapter, but is {adapter!r}")
    if adapter.rounding not in ("once", "weight", "input"):
        raise ValueError(f"adapter.rounding must be 'once', 'weight' or 'input', but is {adapter.rounding!r}")
    if adapter.weight not in ("weight", "scale", "gamma"):
        raise ValueError(f"adapter.weight must be 'weight', 'scale' or 'gamma', but is {adapter.weight!r}")
    if not (adapter.eps is None or isinstance(adapter.eps, str | float | int)):
        raise TypeError(f"adapter.eps must be the name of an attribute, a number or None, but is {adapter.eps!r}")
    if adapter.twin is not None:
        raise ValueError(f"adapter.twin is for the classes that qknorm knows, but is {adapter.twin!r}")
    _REGISTERED[cls] = adapter


def class_path(cls: type) -> str:
    """The key of ``ADAPTERS`` for a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def adapter_for(cls: type) -> Adapter | str | None:
    """The adapter of exactly this class, why it is left alone, or None where nothing is known of it."""
    return _REGISTERED.get(cls) or ADAPTERS.get(class_path(cls))
