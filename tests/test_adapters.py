"""Norm classes that cannot be installed: each, written again in our own words, is known by its path, to the bit."""

import itertools

import pytest
import torch
from norms import FLOATS, assert_same_bits
from torch import nn

from qknorm import QKRMSNorm
from qknorm.adapters import ADAPTERS, Adapter

AI_TOOLKIT = "extensions_built_in.diffusion_models"


class Original(nn.Module):
    """A norm whose forward is ``formula``; eps is an attribute, a decoy, where the real class does not read it."""

    def __init__(self, parameter: str, formula, eps: float | None) -> None:
        super().__init__()
        self.register_parameter(parameter, nn.Parameter(0.3 * torch.randn(64, generator=torch.manual_seed(0))))
        self.parameter, self.formula = parameter, formula
        if eps is not None:
            self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(self, x, getattr(self, self.parameter))


def normed(x, eps):
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def rounds_before_its_weight(eps=None):
    return lambda self, x, w: normed(x, eps or self.eps).to(x.dtype) * w


def rounds_once(eps=None):
    return lambda self, x, w: (normed(x, eps or self.eps) * w.float()).to(x.dtype)


def adds_one_in_float32(self, x, w):
    return (normed(x, self.eps) * (w.float() + 1.0)).to(x.dtype)


def as_diffusers(self, x, w):
    n = normed(x, self.eps)
    return (n.to(w.dtype) if w.dtype != torch.float32 else n) * w


ORIGINALS = {
    "flux.modules.layers.RMSNorm": ("scale", rounds_before_its_weight(1e-6), None),
    "flux2.model.RMSNorm": ("scale", rounds_before_its_weight(1e-6), None),
    f"{AI_TOOLKIT}.flux2.src.model.RMSNorm": ("scale", rounds_before_its_weight(1e-6), None),
    f"{AI_TOOLKIT}.chroma.src.layers.RMSNorm": ("scale", rounds_once(1e-6), None),
    f"{AI_TOOLKIT}.krea2.src.mmdit.RMSNorm": ("scale", adds_one_in_float32, 1e-5),
    "musubi_tuner.flux.flux_models.RMSNorm": ("scale", rounds_once(1e-6), None),
    "musubi_tuner.flux_2.flux2_models.RMSNorm": ("scale", rounds_before_its_weight(1e-6), None),
    "musubi_tuner.krea2.krea2_mmdit.RMSNorm": ("scale", adds_one_in_float32, 1e-5),
    "musubi_tuner.qwen_image.qwen_image_model.RMSNorm": ("weight", as_diffusers, 1e-6),
    "musubi_tuner.zimage.zimage_model.RMSNorm": ("weight", rounds_once(), 1e-5),
    "library.flux_models.RMSNorm": ("scale", rounds_once(1e-6), None),
    "library.lumina_models.RMSNorm": ("weight", rounds_once(1e-6), 0.5),
    "library.hunyuan_image_modules.RMSNorm": ("weight", rounds_before_its_weight(), 1e-6),
    "diffsynth.models.sd3_dit.RMSNorm": ("weight", rounds_before_its_weight(), 1e-6),
    "diffsynth.models.general_modules.RMSNorm": ("weight", rounds_before_its_weight(), 1e-6),
    "hyvideo.modules.norm_layers.RMSNorm": ("weight", rounds_before_its_weight(), 1e-6),
    "wan.modules.model.WanRMSNorm": ("weight", rounds_before_its_weight(), 1e-5),
    "comfy.ldm.krea2.model.RMSNorm": ("scale", adds_one_in_float32, 1e-5),
}


@pytest.mark.parametrize("path", ORIGINALS)
def test_a_class_is_known_by_its_path_and_its_bits_are_kept_for_every_pair_of_dtypes(path):
    module, _, name = path.rpartition(".")
    cls = type(name, (Original,), {"__module__": module, "__qualname__": name})
    for x_dtype, w_dtype in itertools.product(FLOATS, FLOATS):
        old = cls(*ORIGINALS[path]).to(w_dtype)
        new = QKRMSNorm.from_norm(old)
        x = (0.01 * torch.randn(2, 5, 3, 64, generator=torch.Generator().manual_seed(1))).to(x_dtype)
        assert_same_bits(new(x), old(x).to(x_dtype))
        assert list(new.state_dict()) == list(old.state_dict())


def test_every_class_of_the_table_that_cannot_be_imported_here_is_among_them():
    others = {path for path, entry in ADAPTERS.items() if isinstance(entry, Adapter)}
    assert {path for path in others if not path.startswith(("torch.", "diffusers."))} == set(ORIGINALS)
