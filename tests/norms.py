"""Norm classes and small models that the tests share, and what tells two results apart."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_same import DynamicTanh
from diffusers.models.normalization import LpNorm, MochiRMSNorm
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3NemotronRMSNorm
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm
from diffusers.models.transformers.transformer_stable_audio3 import StableAudio3RMSNorm
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qknorm import register_norm, tiny
from qknorm.adapters import Adapter

HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)


class BFLRMSNorm(nn.Module):
    """Black Forest Labs' norm: the parameter is ``scale``, eps is 1e-6, and the normed value takes x's dtype first."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return n.to(x.dtype) * self.scale


class BFLQKNorm(nn.Module):
    """The pair of them, under the names that BFL gives them, cast to the dtype of the value."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query_norm = BFLRMSNorm(dim)
        self.key_norm = BFLRMSNorm(dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q).to(v), self.key_norm(k).to(v)


class ZeroCentredScaleRMSNorm(nn.Module):
    """The norm of Krea 2's original code and of its trainers' copies: the factor is ``1 + scale``."""

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight=self.scale.float() + 1.0, eps=self.eps).to(x.dtype)


class LlamaRMSNorm(nn.Module):
    """What language models use: eps has a name of its own, and the normed value takes x's dtype before the weight."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * n.to(x.dtype)


class LigerRMSNorm(nn.Module):
    """A class of which nothing is known, whatever its name says."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.variance_epsilon = 1e-6
        self.in_place = True

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


register_norm(BFLRMSNorm, Adapter(weight="scale", eps=1e-6, rounding="input"))
register_norm(ZeroCentredScaleRMSNorm, Adapter(weight="scale", unit_offset=True, float32_weight=True))
register_norm(LlamaRMSNorm, Adapter(eps="variance_epsilon", rounding="input"))


@dataclass(frozen=True)
class Known:
    """A norm class with an adapter: how it is built, what stands in for it, and whether that is an RMSNorm."""

    build: Callable[[int], nn.Module]
    stand_in: str
    is_rms_norm: bool = True

    def __call__(self, dim: int, dtype: torch.dtype | None = None) -> nn.Module:
        """A norm of this class, with parameters that are not the trivial ones."""
        norm = self.build(dim)
        generator = torch.Generator().manual_seed(dim)
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        return norm.to(dtype)


KNOWN: dict[str, Known] = {
    "torch": Known(lambda dim: nn.RMSNorm(dim, eps=1e-6), "QKRMSNorm"),
    "torch, no eps": Known(nn.RMSNorm, "QKRMSNorm"),
    "torch, no weight": Known(lambda dim: nn.RMSNorm(dim, eps=1e-5, elementwise_affine=False), "QKRMSNorm"),
    "diffusers": Known(lambda dim: DiffusersRMSNorm(dim, eps=1e-6), "QKRMSNorm"),
    "diffusers, no weight": Known(lambda dim: DiffusersRMSNorm(dim, 1e-6, elementwise_affine=False), "QKRMSNorm"),
    "diffusers, bias": Known(lambda dim: DiffusersRMSNorm(dim, eps=1e-6, bias=True), "QKBiasRMSNorm"),
    "Krea2": Known(Krea2RMSNorm, "QKRMSNorm"),
    "Mochi": Known(lambda dim: MochiRMSNorm(dim, eps=1e-5), "QKRMSNorm"),
    "Mochi, no weight": Known(lambda dim: MochiRMSNorm(dim, eps=1e-5, elementwise_affine=False), "QKRMSNorm"),
    "Cosmos3": Known(lambda dim: Cosmos3NemotronRMSNorm(dim, eps=1e-5), "QKRMSNorm"),
    "StableAudio3": Known(StableAudio3RMSNorm, "QKGammaRMSNorm"),
    "BFL": Known(BFLRMSNorm, "QKScaleRMSNorm"),
    "zero-centred scale": Known(ZeroCentredScaleRMSNorm, "QKScaleRMSNorm"),
    "llama": Known(LlamaRMSNorm, "QKRMSNorm"),
    "LayerNorm": Known(lambda dim: nn.LayerNorm(dim, eps=1e-6), "QKLayerNorm", False),
    "LayerNorm, no weight": Known(lambda dim: nn.LayerNorm(dim, elementwise_affine=False), "QKLayerNorm", False),
    "LpNorm": Known(lambda dim: LpNorm(p=2, dim=-1, eps=1e-5), "QKLpNorm", False),
    "DynamicTanh": Known(DynamicTanh, "QKDynamicTanh", False),
}
RMS_NORMS = {name: known for name, known in KNOWN.items() if known.is_rms_norm}
TWINS = {name: known for name, known in KNOWN.items() if not known.is_rms_norm}


class Attention(nn.Module):
    """Self-attention with q/k norms of any class, under any two names; ``pre_norm_q`` is a norm of something else."""

    def __init__(
        self,
        norm: Callable[[int], nn.Module | None] = KNOWN["torch"],
        names: tuple[str, str] = ("norm_q", "norm_k"),
        dim: int = 32,
        heads: int = 2,
    ) -> None:
        super().__init__()
        self.heads, self.names = heads, names
        self.pre_norm_q = nn.LayerNorm(dim)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))
        for name in names:
            setattr(self, name, norm(dim // heads))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pre_norm_q(x)
        q, k, v = (to(x).unflatten(-1, (self.heads, -1)) for to in (self.to_q, self.to_k, self.to_v))
        q, k = (t if norm is None else norm(t) for t, norm in zip((q, k), self.qk_norms, strict=True))
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.to_out(out.transpose(1, 2).flatten(2).to(x.dtype))

    @property
    def qk_norms(self) -> tuple[nn.Module | None, nn.Module | None]:
        return getattr(self, self.names[0]), getattr(self, self.names[1])


class Blocks(nn.Module):
    """Two attention layers with a residual."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(*args, **kwargs) for _ in range(2))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@contextmanager
def attention_dtypes() -> Iterator[list[tuple[torch.dtype, torch.dtype, torch.dtype]]]:
    """The dtypes of q, k and v of every attention call meanwhile, before autocast casts them."""
    seen: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []
    with attention_inputs() as inputs:
        yield seen
    seen += [(q.dtype, k.dtype, v.dtype) for q, k, v in inputs]


@contextmanager
def attention_inputs() -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """q, k and v of every attention call meanwhile, before autocast casts them."""
    inputs: list[tuple[Tensor, Tensor, Tensor]] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            kwargs = kwargs or {}
            if func is F.scaled_dot_product_attention:
                named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
                inputs.append((named["query"], named["key"], named["value"]))
            return func(*args, **kwargs)

    with Recorder():
        yield inputs


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal in dtype, shape and every bit; the sign of zero and the payload of NaN apart."""
    assert actual.dtype is expected.dtype, f"{actual.dtype} instead of {expected.dtype}"
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def flux(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Any]]:
    """A small Flux with six q/k norms and two attention calls, the same at every call, and its inputs."""
    return tiny.build("FluxTransformer2DModel", dtype=dtype)
