"""What every fused processor shares: which norms it may read, the call of the fused norm + RoPE, and the attention.

Imports nothing of diffusers until a processor runs.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .. import functional, ops, reference
from ..adapters import Adapter, adapter_for, class_path
from ..module import QKRMSNorm, is_kin


class Formula(NamedTuple):
    """What the norms of one attention compute; the fused call takes one for all of them."""

    eps: float | None
    unit_offset: bool
    rounding: str


Rope = tuple[Tensor, Tensor | None]


class FusedProcessor:
    """Runs an attention with norm and RoPE of q and k fused, or hands the call to the processor that it replaced.

    It does so where a norm is not what its class alone says (hooks, wrappers, an instance ``forward``, unknown),
    and where there is no RoPE to fuse. ``stock`` is the very object that it replaced, and holds the attention backend
    and the parallel config, so that what diffusers sets on one is set on both.
    """

    stock_path: ClassVar[str]  # of the one class whose objects it replaces
    norms: ClassVar[tuple[str, ...]] = ("norm_q", "norm_k")
    context_norms: ClassVar[tuple[str, ...]] = ("norm_added_q", "norm_added_k")
    interleaved: ClassVar[bool] = True
    projections_fuse: ClassVar[bool] = False  # whether the stock class looks at ``attn.fused_projections``
    round_before_rope: ClassVar[bool | None] = None  # None: as the norm's class, its weight and autocast have it

    def __init__(self, stock: Any = None) -> None:
        self.stock = self.stock_class()() if stock is None else stock

    @classmethod
    def stock_class(cls) -> type:
        """The class named by ``stock_path``."""
        module, _, name = cls.stock_path.rpartition(".")
        return getattr(__import__(module, fromlist=[name]), name)

    @property
    def _attention_backend(self) -> Any:
        return self.stock._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.stock._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return self.stock._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.stock._parallel_config = config

    def is_joint(self, attn: Any) -> bool:
        """Whether the attention norms a text stream with weights of its own."""
        return getattr(attn, "added_kv_proj_dim", None) is not None

    def takes(self, attn: Any, x: Tensor, text: Tensor | None, rope: Any) -> bool:
        """Whether a call has the streams of its attention, and cos and sin of the joint sequence."""
        sequence = x.shape[1] + (0 if text is None else text.shape[1])
        return self.is_joint(attn) == (text is not None) and is_real_rope(rope, sequence, attn.head_dim)

    def obstacle(self, attn: Any) -> str | None:
        """Why this attention runs unfused, None where it runs fused."""
        names = self.norms + self.context_norms if self.is_joint(attn) else self.norms
        formula = None
        for name in names:
            norm = getattr(attn, name, None)
            found = formula_of(norm)
            if isinstance(found, str):
                return f"{name}: {found}"
            if formula is not None and found != formula:
                return f"{name}: its eps, offset or rounding is not that of {names[0]}"
            formula = found
        if formula is not None and formula.rounding == "input" and self.round_before_rope is False:
            return f"{names[0]}: it rounds to the dtype of its input, which the model makes float32"
        return None

    def runs_fused(self, attn: Any) -> bool:
        """``obstacle``, asked at every call; the first time that a reason comes up it warns."""
        obstacle = self.obstacle(attn)
        if obstacle is None:
            return True
        if not torch.compiler.is_compiling():
            ops.warn_once(f"{type(self).__name__} runs unfused: {obstacle}")
        return False

    def attention(
        self, attn: Any, x: Tensor, text: Tensor | None, rope: Rope, mask: Tensor | None, head_dim: int
    ) -> tuple[Tensor, Tensor | None]:
        """Projections, norm + RoPE and attention of ``x`` and of the text in front of it: [B, S, H * D] of each."""
        q, k, v = self.projected(attn, x, head_dim, ("to_q", "to_k", "to_v"), "to_qkv")
        context = None
        if text is not None:
            names = ("add_q_proj", "add_k_proj", "add_v_proj")
            context_q, context_k, context_v = self.projected(attn, text, head_dim, names, "to_added_qkv")
            context = (context_q, context_k)
            v = torch.cat([context_v, v], 1)
        q, k = self.norm_and_rotate(attn, q, k, rope, context)
        out = self.attend(q, k, v, mask)
        if text is None:
            return out, None
        text_out, out = out.split([text.shape[1], out.shape[1] - text.shape[1]], 1)
        return out, text_out

    def projected(
        self, attn: Any, x: Tensor, head_dim: int, names: tuple[str, str, str], fused: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of ``x``, [B, S, H, D]; H is what a tensor-parallel projection leaves of the heads."""
        if self.projections_fuse and attn.fused_projections:
            parts = getattr(attn, fused)(x).chunk(3, -1)
        else:
            parts = [getattr(attn, name)(x) for name in names]
        q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in parts)
        return q, k, v

    def norm_and_rotate(
        self, attn: Any, q: Tensor, k: Tensor, rope: Rope, context: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """q and k, [B, S, H, D], normed and rotated; joint where there is a context, whose q and k stand in front."""
        formula = formula_of(getattr(attn, self.norms[0]))
        assert isinstance(formula, Formula)
        q_weight, k_weight, *more = weights = [
            weight_of(getattr(attn, name), q) for name in self.norms + (self.context_norms if context else ())
        ]
        rounded = self.round_before_rope
        if rounded is None:
            rounded = all(_returns_input_dtype(formula, weight, q) for weight in weights)
        cos, sin = (None if t is None else t.to(q.device) for t in rope)
        return functional.qk_rms_norm_rope(
            q,
            k,
            q_weight,
            k_weight,
            cos,  # type: ignore[arg-type]
            sin,
            formula.eps,
            interleaved=self.interleaved,
            round_before_rope=rounded,
            context=None if context is None else (*context, *more),  # type: ignore[arg-type]
            unit_offset=formula.unit_offset,
            rounding=formula.rounding,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """diffusers' attention of [B, S, H, D] by the model's backend; [B, S, H * D] in the dtype of q."""
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        groups = q.shape[2] // k.shape[2]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        out = dispatch_attention_fn(
            q, k, v, attn_mask=mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return out.flatten(2, 3).to(q.dtype)


def is_real_rope(rope: Any, sequence: int, columns: int, dtype: torch.dtype | None = torch.float32) -> bool:
    """Whether ``rope`` is cos and sin, [sequence, columns] or [B, sequence, columns], of ``dtype`` or, if None, any."""
    return (
        isinstance(rope, tuple | list) and len(rope) == 2 and all(_is_table(t, sequence, columns, dtype) for t in rope)
    )


def is_complex_rope(rope: Any, sequence: int, head_dim: int) -> bool:
    """Whether ``rope`` is cos + i sin, complex64 [sequence, head_dim / 2] or [B, sequence, head_dim / 2]."""
    return _is_table(rope, sequence, head_dim // 2, torch.complex64)


def _is_table(t: Any, sequence: int, columns: int, dtype: torch.dtype | None) -> bool:
    return (
        isinstance(t, Tensor)
        and t.dim() in (2, 3)
        and t.shape[-2] == sequence
        and t.shape[-1] == columns
        and (dtype is None or t.dtype is dtype)
    )


def _returns_input_dtype(formula: Formula, weight: Tensor | None, x: Tensor) -> bool:
    """Whether the model's own norm hands its result to the RoPE in the dtype of ``x``, and not in float32."""
    if formula.rounding == "once" and torch.is_autocast_enabled(x.device.type):
        return False
    return weight is None or torch.promote_types(weight.dtype, x.dtype) is x.dtype


def formula_of(norm: nn.Module | None) -> Formula | str:
    """What ``norm`` computes where its class alone decides that; else why its attention must not be fused."""
    if norm is None:
        return "the attention has no norm there"
    cls = type(norm)
    adapter = None if is_kin(cls) else adapter_for(cls)
    if not is_kin(cls) and (not isinstance(adapter, Adapter) or adapter.twin):
        return f"nothing of {class_path(cls)} is known to be an RMSNorm"
    if "forward" in norm.__dict__ or norm._compiled_call_impl is not None:
        return "something took over its forward (offloading, layerwise casting, compiling)"
    if norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks:
        return "it has hooks, which a fused call would not run"
    if isinstance(norm, QKRMSNorm):
        weight, formula = getattr(norm, norm.weight_name), Formula(norm.eps, norm.unit_offset, norm.rounding)
    else:
        assert isinstance(adapter, Adapter)
        for name, value in adapter.requires.items():
            if getattr(norm, name, None) != value:
                return f"its {name} is not {value!r}"
        if getattr(norm, "bias", None) is not None:
            return "it has a bias"
        eps = getattr(norm, adapter.eps) if isinstance(adapter.eps, str) else adapter.eps
        weight, formula = getattr(norm, adapter.weight, None), Formula(eps, adapter.unit_offset, adapter.rounding)
    if weight is not None and (weight.dim() != 1 or weight.dtype not in functional.FLOAT_DTYPES):
        return f"its weight is {weight.dtype} of shape {list(weight.shape)}"
    if weight is not None and type(weight) not in (*ops.PLAIN_TYPES, FakeTensor):
        return f"its weight is a {type(weight).__name__}"
    return formula


def weight_of(norm: nn.Module, x: Tensor) -> Tensor | None:
    """The weight of a norm that has a formula, as the fused call takes it; read anew at every call."""
    if isinstance(norm, QKRMSNorm):
        weight, in_float32 = getattr(norm, norm.weight_name), norm.float32_weight
    else:
        adapter = adapter_for(type(norm))
        assert isinstance(adapter, Adapter)
        weight, in_float32 = getattr(norm, adapter.weight, None), adapter.float32_weight
    return weight.to(reference.accumulate_dtype(x)) if in_float32 and weight is not None else weight
