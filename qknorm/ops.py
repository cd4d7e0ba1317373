"""The operators ``torch.ops.qknorm.*``: schemas, implementations, fakes, autograd, vmap and decompositions.

Imports torch and ``reference`` alone; Inductor and everything else are looked for when first needed.

Two pairs of operators have the same implementation. ``rms_norm`` and ``rms_norm_backward`` are decomposed by Inductor
into ``reference.py``, so that compiled code fuses them with their neighbours; ``rms_norm_opaque`` and
``rms_norm_backward_opaque`` never are. An operator that has a decomposition cannot also stay in an Inductor graph, so
a flag would not do.
"""

import functools
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKeySet

from . import reference

# Compilers' disk caches know an operator by its name and constants, not by its decomposition: raise this when the maths
# changes, so that a new release never runs old compiled code.
REVISION = 1

_LIB = torch.library.Library("qknorm", "DEF")
_OPTIONS = "bool unit_offset=False, str rounding='once'"
_FORWARD = f"(Tensor x, Tensor? weight, float eps, {_OPTIONS}, int revision=0) -> (Tensor y, Tensor rstd)"
# The mask is an int, not two bools: DTensor's sharding cache hashes arguments from the first int on.
_BACKWARD = (
    f"(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float eps, {_OPTIONS}, int mask=3, int revision=0)"
    " -> (Tensor dx, Tensor dw)"
)
for _suffix in ("", "_opaque"):
    _LIB.define(f"rms_norm{_suffix}{_FORWARD}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIB.define(f"rms_norm_backward{_suffix}{_BACKWARD}", tags=(torch.Tag.pt2_compliant_tag,))


def launch_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    unit_offset: bool,
    rounding: str,
    backend: str = "auto",
    save: bool = True,
) -> tuple[Tensor, Any]:
    """``(y, rstd)`` without autograd, on the tensor's own device; the kernels skip an rstd that is not to be saved."""
    kernels = kernels_for(x, backend)
    if kernels is not None:
        return kernels.forward(x, weight, eps, unit_offset, rounding, save)
    with torch._C._DisableAutocast():
        if x.device.type == "cpu":
            return reference.rms_norm_in_blocks(x, weight, eps, unit_offset, rounding)
        return reference.rms_norm(x, weight, eps, unit_offset, rounding)


def launch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    unit_offset: bool,
    rounding: str,
    mask: int,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``(dx, dw)`` without autograd; what ``mask`` does not want is an empty tensor."""
    kernels = kernels_for(x, backend)
    if kernels is not None and dy.dtype is x.dtype:
        return kernels.backward(dy, x, weight, rstd, unit_offset, rounding, mask)
    with torch._C._DisableAutocast():
        if x.device.type == "cpu":
            return reference.rms_norm_backward_in_blocks(dy, x, weight, rstd, unit_offset, rounding, mask)
        return reference.rms_norm_backward(dy, x, weight, rstd, 0.0, unit_offset, rounding, mask)


def kernels_for(x: Tensor, backend: str = "auto") -> Any:
    """The module of Triton kernels where they can take ``x``, else None; on an accelerator it warns once why."""
    if backend == "torch" or x.is_cpu:
        return None
    return _kernels(x.device, x.dtype, x.shape[-1])


@functools.cache
def _kernels(device: torch.device, dtype: torch.dtype, dim: int) -> Any:
    obstacle = triton_obstacle(device, dtype, dim)
    if obstacle is None:
        return importlib.import_module("qknorm_kernels.rms_norm")
    if device.type != "meta":
        warn_once(f"qknorm computes in plain torch, not in its Triton kernels: {obstacle}")
    return None


@functools.cache
def warn_once(message: str) -> None:
    """Warns the first time that this process says so."""
    warnings.warn(message, stacklevel=2)


def triton_obstacle(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Why the Triton kernels cannot take a tensor like this, None where they can."""
    if device.type != "cuda":
        return f"they run on CUDA and ROCm GPUs, and x is on {device}"
    if dtype is torch.float64:
        return "float64 is computed in plain torch"
    if importlib.util.find_spec("triton") is None:
        return 'triton is not installed; pip install "qknorm[triton]"'
    try:
        from qknorm_kernels import launch, rms_norm  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if dim > launch.MAX_DIM:
        return f"they take a last dimension of at most {launch.MAX_DIM}, and x has {dim}"
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        least = (8, 0) if dtype is torch.bfloat16 else (7, 5)
        if capability < least:
            wanted, found = (".".join(map(str, each)) for each in (least, capability))
            return f"{dtype} takes compute capability {wanted}, and {device} has {found}"
    return None


def composite(x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool, rounding: str) -> tuple[Tensor, Tensor]:
    """The forward as plain differentiable torch, for functorch, forward-mode AD, exporters and TorchScript."""
    y, rstd = reference.rms_norm(x, weight, eps, unit_offset, rounding, straight_through=True)
    return y, rstd.detach()


class EagerRMSNorm(torch.autograd.Function):
    """Eager autograd over the raw launcher: no operator boundary."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool, rounding: str, backend: str
    ) -> Tensor:
        y, rstd = launch_forward(x, weight, eps, unit_offset, rounding, backend)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.backend = (eps, unit_offset, rounding), backend
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_gradients(dy, ctx, ctx.backend), *(None,) * 4


class EagerQKRMSNorm(torch.autograd.Function):
    """``EagerRMSNorm`` of q and k, in one launch of the Triton kernels a direction."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        unit_offset: bool,
        rounding: str,
    ) -> tuple[Tensor, Tensor]:
        results = kernels_for(q).forward_pair((q, k), (q_weight, k_weight), eps, unit_offset, rounding)
        (q_y, q_rstd), (k_y, k_rstd) = results
        ctx.save_for_backward(q, k, q_weight, k_weight, q_rstd, k_rstd)
        ctx.set_materialize_grads(False)
        ctx.options = (eps, unit_offset, rounding)
        return q_y, k_y

    @staticmethod
    def backward(ctx: Any, q_dy: Tensor | None, k_dy: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight, q_rstd, k_rstd = ctx.saved_tensors
        q_wants, k_wants = ctx.needs_input_grad[0:4:2], ctx.needs_input_grad[1:4:2]
        if q_dy is None or k_dy is None or torch.is_grad_enabled() or needs_composite():
            dq, dq_weight = _gradients_of(q_dy, q, q_weight, q_rstd, ctx.options, q_wants)
            dk, dk_weight = _gradients_of(k_dy, k, k_weight, k_rstd, ctx.options, k_wants)
        else:
            masks = (q_wants[0] + 2 * q_wants[1], k_wants[0] + 2 * k_wants[1])
            results = kernels_for(q).backward_pair(
                (q_dy, k_dy), (q, k), (q_weight, k_weight), (q_rstd, k_rstd), *ctx.options[1:], masks
            )
            (dq, dq_weight), (dk, dk_weight) = (
                _wanted(result, wants) for result, wants in zip(results, (q_wants, k_wants), strict=True)
            )
        return dq, dk, dq_weight, dk_weight, None, None, None


class RopeOptions(NamedTuple):
    """How q and k are normed and rotated; ``sequence_dim`` is 1 for [B, S, H, D] and 2 for [B, H, S, D]."""

    eps: float
    unit_offset: bool
    rounding: str
    interleaved: bool
    round_before_rope: bool
    sequence_dim: int

    def heads_third(self, t: Tensor) -> Tensor:
        """A view [B, S, H, D]."""
        return t if self.sequence_dim == 1 else t.transpose(1, 2)


# (q, k, q_weight, k_weight) of one stream; the text stream comes first where there are two.
Stream = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def rope_streams(
    streams: Sequence[Stream], cos: Tensor, sin: Tensor | None, options: RopeOptions
) -> Iterator[tuple[Stream, int, int, Tensor, Tensor | None]]:
    """Each stream with its place in the joint sequence: first position, length, and its part of the tables."""
    start = 0
    for stream in streams:
        length = stream[0].shape[options.sequence_dim]
        sin_part = None if sin is None else sin.narrow(-2, start, length)
        yield stream, start, length, cos.narrow(-2, start, length), sin_part
        start += length


def composite_rope(
    streams: Sequence[Stream], cos: Tensor, sin: Tensor | None, options: RopeOptions
) -> tuple[Tensor, Tensor]:
    """Joint q and k as plain differentiable torch."""
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for (q, k, q_weight, k_weight), _, _, cos_part, sin_part in rope_streams(streams, cos, sin, options):
        for part, x, weight in zip(parts, (q, k), (q_weight, k_weight), strict=True):
            y, _ = reference.rms_norm_rope(
                options.heads_third(x), weight, cos_part, sin_part, *options[:5], straight_through=True
            )
            part.append(options.heads_third(y))
    q, k = (part[0] if len(part) == 1 else torch.cat(part, options.sequence_dim) for part in parts)
    return q.contiguous(), k.contiguous()


def launch_rope_forward(
    streams: Sequence[Stream], cos: Tensor, sin: Tensor | None, options: RopeOptions, backend: str, save: bool = True
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Joint q and k without autograd, every stream written to its place, and the rstd of all."""
    dim, first = options.sequence_dim, streams[0]
    length = sum(stream[0].shape[dim] for stream in streams)
    q_y, k_y = (x.new_empty((*x.shape[:dim], length, *x.shape[dim + 1 :])) for x in first[:2])
    kernels = rope_kernels_for(first[0], cos, sin, options.interleaved, backend)
    rstds: list[Tensor] = []
    for (q, k, q_weight, k_weight), start, length, cos_part, sin_part in rope_streams(streams, cos, sin, options):
        operands = tuple(
            (options.heads_third(x), weight, options.heads_third(y.narrow(dim, start, length)))
            for x, weight, y in ((q, q_weight, q_y), (k, k_weight, k_y))
        )
        if kernels is not None:
            rstds += kernels.forward(operands, cos_part, sin_part, *options[:5], save)
            continue
        with torch._C._DisableAutocast():
            for x, weight, target in operands:
                y, rstd = reference.rms_norm_rope(x, weight, cos_part, sin_part, *options[:5])
                target.copy_(y)
                rstds.append(rstd)
    return q_y, k_y, rstds


def launch_rope_backward(
    q_dy: Tensor,
    k_dy: Tensor,
    streams: Sequence[Stream],
    rstds: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor | None,
    options: RopeOptions,
    wants: Sequence[bool],
    backend: str,
) -> list[Tensor | None]:
    """Gradients of all streams' q, k, q_weight and k_weight; ``wants`` has one entry for each."""
    dim = options.sequence_dim
    kernels = rope_kernels_for(streams[0][0], cos, sin, options.interleaved, backend)
    gradients: list[Tensor | None] = []
    for i, (stream, start, length, cos_part, sin_part) in enumerate(rope_streams(streams, cos, sin, options)):
        dx = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in stream[:2]]
        operands = tuple(
            (
                options.heads_third(x),
                options.heads_third(dy.narrow(dim, start, length)),
                stream[2 + j],
                rstds[2 * i + j],
                options.heads_third(dx[j]),
                wants[4 * i + 2 + j],
            )
            for j, (x, dy) in enumerate(zip(stream[:2], (q_dy, k_dy), strict=True))
        )
        found: list[Tensor | None] = [*dx]
        if kernels is not None:
            found += kernels.backward(operands, cos_part, sin_part, *options[1:4])
        else:
            with torch._C._DisableAutocast():
                for x, dy, weight, rstd, target, wants_dw in operands:
                    result, dw = reference.rms_norm_rope_backward(
                        dy, x, weight, rstd, cos_part, sin_part, options.eps, *options[1:4], 1 + 2 * wants_dw
                    )
                    target.copy_(result)
                    found.append(dw)
        gradients += (g if wanted else None for g, wanted in zip(found, wants[4 * i : 4 * i + 4], strict=True))
    return gradients


def rope_kernels_for(q: Tensor, cos: Tensor, sin: Tensor | None, interleaved: bool, backend: str) -> Any:
    """The module of fused Triton kernels where they can take these tensors, else None."""
    if kernels_for(q, backend) is None:
        return None
    kernels = importlib.import_module("qknorm_kernels.qk_norm_rope")
    columns = cos.shape[-1] * (2 if sin is None else 1)
    rotary = kernels.rotation_of(q.shape[-1], columns, sin is None)[0]
    return kernels if kernels.takes(q.shape[-1], rotary, q.itemsize, interleaved) else None


class EagerQKNormRope(torch.autograd.Function):
    """Eager autograd over the fused launcher; saves q and k as they came in, the weights, the tables and rstd."""

    @staticmethod
    def forward(
        ctx: Any, cos: Tensor, sin: Tensor | None, options: RopeOptions, backend: str, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        streams = [tensors[i : i + 4] for i in range(0, len(tensors), 4)]
        q_y, k_y, rstds = launch_rope_forward(streams, cos, sin, options, backend)  # type: ignore[arg-type]
        ctx.save_for_backward(cos, sin, *rstds, *tensors)
        ctx.options, ctx.backend, ctx.rstds = options, backend, len(rstds)
        return q_y, k_y

    @staticmethod
    def backward(ctx: Any, q_dy: Tensor, k_dy: Tensor) -> tuple[Any, ...]:
        cos, sin, *saved = ctx.saved_tensors
        rstds, tensors = saved[: ctx.rstds], saved[ctx.rstds :]
        streams = [tensors[i : i + 4] for i in range(0, len(tensors), 4)]
        wants = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled() or needs_composite():
            # Double backward: through the composite maths, from q and k.
            with torch.enable_grad():
                wanted = [t for t, want in zip(tensors, wants, strict=True) if want]
                y = composite_rope(streams, cos, sin, ctx.options)
                found = iter(torch.autograd.grad(y, wanted, (q_dy, k_dy), create_graph=True))
            return None, None, None, None, *(next(found) if want else None for want in wants)
        gradients = launch_rope_backward(q_dy, k_dy, streams, rstds, cos, sin, ctx.options, wants, ctx.backend)
        return None, None, None, None, *gradients


class _OperatorRMSNorm(torch.autograd.Function):
    """Autograd of the operators, applied by their Autograd kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, suffix: str, eps: float, unit_offset: bool, rounding: str, rev: int
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            y, rstd = _op("rms_norm", suffix)(x, weight, eps, unit_offset, rounding, rev)
        ctx.save_for_backward(x, weight, rstd)
        ctx.save_for_forward(x, weight)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        ctx.options = (eps, unit_offset, rounding)
        ctx.suffix, ctx.revision = suffix, rev
        return y, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        operator = _op("rms_norm_backward", ctx.suffix), ctx.revision
        dx, dw = _gradients(dy, ctx, operator=operator)
        if type(dw) not in (type(None), *PLAIN_TYPES) and sharding() is not None:
            dw = sharding().reduced(dw, ctx.saved_tensors[1])
        return dx, dw, *(None,) * 5

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, weight_tangent: Tensor | None, *_: Any) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        eps, unit_offset, rounding = ctx.options
        return reference.rms_norm_jvp(x, weight, eps, unit_offset, rounding, x_tangent, weight_tangent), None


def _gradients(
    dy: Tensor | None, ctx: Any, backend: str = "auto", operator: tuple[Any, int] | None = None
) -> tuple[Tensor | None, Tensor | None]:
    x, weight, rstd = ctx.saved_tensors
    return _gradients_of(dy, x, weight, rstd, ctx.options, ctx.needs_input_grad[:2], backend, operator)


def _gradients_of(
    dy: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    options: tuple[float, bool, str],
    wants: tuple[bool, bool],
    backend: str = "auto",
    operator: tuple[Any, int] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dw, each None where it is not wanted; by the operator and its revision, or else by the raw launcher."""
    if dy is None:
        return None, None
    mask = wants[0] + 2 * wants[1]
    if torch.is_grad_enabled() or needs_composite():
        # Double backward: from x, since the saved rstd is a constant and would cut the graph.
        result = reference.rms_norm_backward(dy, x, weight, None, *options, mask, straight_through=True)
    elif operator is None:
        result = launch_backward(dy, x, weight, rstd, *options[1:], mask, backend)
    else:
        result = operator[0](dy, x, weight, rstd, *options, mask, operator[1])
    return _wanted(result, wants)


def _wanted(result: tuple[Tensor, Tensor], wants: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    return result[0] if wants[0] else None, result[1] if wants[1] else None


def _op(name: str, suffix: str = "") -> Any:
    return getattr(torch.ops.qknorm, name + suffix).default


def needs_composite() -> bool:
    """Whether a functorch transform or a forward-mode AD level is active: plain torch composes with all of them."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether the eager path may skip the operator: plain tensors and nothing that must see an operator go by."""
    for t in tensors:
        if t is not None and type(t) not in PLAIN_TYPES:
            return False
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _register(suffix: str) -> None:
    forward, backward = f"rms_norm{suffix}", f"rms_norm_backward{suffix}"

    def forward_impl(
        x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool = False, rounding: str = "once", rev: int = 0
    ) -> tuple[Tensor, Tensor]:
        return launch_forward(x, weight, eps, unit_offset, rounding)

    def backward_impl(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        eps: float,
        unit_offset: bool = False,
        rounding: str = "once",
        mask: int = 3,
        rev: int = 0,
    ) -> tuple[Tensor, Tensor]:
        return launch_backward(dy, x, weight, rstd, unit_offset, rounding, mask)

    def forward_fake(x: Tensor, weight: Tensor | None, *options: Any, **named: Any) -> tuple[Tensor, Tensor]:
        _register_decompositions_if_compiling()
        sharding()
        return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=reference.accumulate_dtype(x))

    def backward_fake(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        eps: float,
        unit_offset: bool = False,
        rounding: str = "once",
        mask: int = 3,
        revision: int = 0,
    ) -> tuple[Tensor, Tensor]:
        sharding()
        dx = x.new_empty(x.shape if mask & 1 else 0)
        dw = weight.new_empty(weight.shape) if mask & 2 and weight is not None else x.new_empty(0)
        return dx, dw

    def forward_autograd(
        keyset: DispatchKeySet,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        unit_offset: bool = False,
        rounding: str = "once",
        rev: int = 0,
    ) -> tuple[Tensor, Tensor]:
        if needs_composite():
            return composite(x, weight, eps, unit_offset, rounding)
        return _OperatorRMSNorm.apply(x, weight, suffix, eps, unit_offset, rounding, rev or REVISION)

    def backward_autograd(
        keyset: DispatchKeySet,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        eps: float,
        unit_offset: bool = False,
        rounding: str = "once",
        mask: int = 3,
        rev: int = 0,
    ) -> tuple[Tensor, Tensor]:
        wants_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (dy, x, weight))
        if wants_grad or needs_composite():
            return reference.rms_norm_backward(
                dy, x, weight, None, eps, unit_offset, rounding, mask, straight_through=True
            )
        with torch._C._AutoDispatchBelowAutograd():
            return _op("rms_norm_backward", suffix)(
                dy, x, weight, rstd, eps, unit_offset, rounding, mask, rev or REVISION
            )

    # No torch.vmap in these two: a nested one fails while Dynamo traces a vmap.
    def forward_vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor | None, *options: Any) -> Any:
        x = x.movedim(in_dims[0], 0) if in_dims[0] is not None else x.expand(info.batch_size, *x.shape)
        if weight is not None and in_dims[1] is not None:
            weight = weight.movedim(in_dims[1], 0)
            weight = weight.view(info.batch_size, *(1,) * (x.dim() - 2), weight.shape[-1])
        return reference.rms_norm(x, weight, *options[:3]), (0, 0)

    def backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        samples = []
        for i in range(info.batch_size):
            one = (a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims, strict=True))
            samples.append(_op(backward)(*one))
        return tuple(map(torch.stack, zip(*samples, strict=True))), (0, 0)

    for name, impl, fake, autograd, vmap in (
        (forward, forward_impl, forward_fake, forward_autograd, forward_vmap),
        (backward, backward_impl, backward_fake, backward_autograd, backward_vmap),
    ):
        _LIB.impl(name, impl, "CompositeExplicitAutograd")
        _LIB.impl(name, autograd, "Autograd", with_keyset=True)
        torch.library.register_fake(f"qknorm::{name}", fake, lib=_LIB)
        torch.library.register_vmap(f"qknorm::{name}", vmap, lib=_LIB)


def sharding() -> Any:
    """The module of rules for DTensors, and the rules in force, where DTensor is loaded; else None.

    DTensor runs the fake kernel before it looks for the rules of an operator: registered there, they are never late.
    """
    return _sharding() if "torch.distributed.tensor" in sys.modules else None


@functools.cache
def _sharding() -> Any:
    module = importlib.import_module("qknorm.sharding")
    module.register()
    return module


_decompositions_registered = False


def _register_decompositions_if_compiling() -> None:
    """Give Inductor ``reference.py`` as decomposition; its import takes seconds, so not before something compiles.

    The fake kernel runs under a ``TracingContext`` before Inductor picks its table of decompositions.
    """
    global _decompositions_registered
    if _decompositions_registered or torch._guards.TracingContext.try_get() is None:
        return
    from torch._inductor import decomposition

    # The last argument of both is the revision, which the maths does not take.
    def forward(x: Tensor, weight: Tensor | None, eps: float, *options: Any) -> tuple[Tensor, Tensor]:
        return reference.rms_norm(x, weight, eps, *options[:2])

    def backward(
        dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, *options: Any
    ) -> tuple[Tensor, Tensor]:
        return reference.rms_norm_backward(dy, x, weight, rstd, eps, *options[:3])

    decomposition.register_decomposition([_op("rms_norm")])(forward)
    decomposition.register_decomposition([_op("rms_norm_backward")])(backward)
    decomposition.fast_random_decomps.cache_clear()
    _decompositions_registered = True


_register("")
_register("_opaque")
