"""CUDA's autocast policy on the CPU, so that what CUDA does to a dtype can be seen and tested with no GPU.

Imports torch alone.

``torch.autocast("cpu")`` casts by lists of its own: ``rms_norm``, ``pow``, ``rsqrt`` and ``sum`` are not on them, so
the dtypes that a model shows under it are not those of a GPU. ``emulate_cuda_autocast`` replaces the kernels of the
``AutocastCPU`` dispatch key by ones that follow CUDA's lists (``ATen/autocast_mode.h``), for as long as it is open.
"""

import contextlib
import re
import threading
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.compiler.config

__all__ = ["emulate_cuda_autocast"]

# CUDA's lists, by what they do to an operator's arguments: those of torch 2.11 to 2.14, which differ in rms_norm (from
# 2.12 on), linalg_matrix_sqrth (from 2.14 on) and the overloads for named tensors (gone in 2.13; left out here, for a
# kernel written in Python cannot take them).
_POLICY: dict[str, str] = {
    "lower_precision": """
        _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
        einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
        scaled_dot_product_attention
    """,
    "float32": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
        nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
        binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
        _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
        upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth
    """,
    "float32_result": """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList
    """,
    "float32_overload": "norm.Scalar norm.ScalarOpt_dim",
    "widest": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "banned": "binary_cross_entropy",
}

_WITH_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}

# Dynamo guards on the autocast switch of every device: switching on that of a device that nobody has keeps code
# compiled under a policy from running outside it, and the reverse.
_MARKER = {"2.12": "ipu", "installed": "maia"}
# The compile caches on disk know the operators of a graph, not the kernels that cast for them.
_CACHE_TAG = f";cuda-autocast-{zlib.crc32(repr(_POLICY).encode())}-"

# What has no rule above, on purpose: overloads for named tensors, and cuDNN's RNN, which a CPU never reaches.
_NO_RULE = re.compile(r".*\.(.*[Dd]imname.*|names_.*)|_cudnn_rnn")
_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_Kernel = Callable[..., Any]


def emulate_cuda_autocast(policy: str = "2.12") -> "_Emulation":
    """Make ``torch.autocast("cpu")`` cast as ``torch.autocast("cuda")`` does: a context manager, or a decorator.

    It changes what an autocast region does and opens none::

        with emulate_cuda_autocast(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).sum()
        loss.backward()

    Args:
        policy: ``"2.12"``, the lists of torch 2.12 and later (``rms_norm`` runs in float32), whatever torch is
            installed; ``"installed"``, those of the installed torch (below 2.12 they lack ``rms_norm``).

    It nests, with the same policy or another, and the innermost holds. Kernels are registered for the whole process:
    every thread that is in a CPU autocast region meanwhile is affected. It must be open wherever the forward runs,
    so also during ``backward`` where activations are checkpointed. Under ``torch.compile`` open it around the call of
    the compiled function, not inside; in one thread, code compiled outside is not run inside, nor the reverse.

    What differs from CUDA: a weight that is used twice is cast twice (autocast's cache of casts is not emulated), and
    ``torch.autocast("cpu", dtype=torch.float32)`` disables itself before we see it (``torch.set_autocast_enabled`` and
    ``torch.set_autocast_dtype`` do not).

    Raises:
        ValueError: ``policy`` is neither of the two.
    """
    if policy not in _MARKER:
        raise ValueError(f"policy must be {' or '.join(map(repr, _MARKER))}, got {policy!r}")
    return _Emulation(policy)


class _Emulation(contextlib.ContextDecorator):
    def __init__(self, policy: str) -> None:
        self._policy = policy

    def __enter__(self) -> None:
        _registry.push(self._policy)

    def __exit__(self, *exc: object) -> None:
        _registry.pop(self._policy)


class _Registry:
    """The policies that are open in this process, and the kernels of the one that was opened last."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[tuple[int, str]] = []
        self._installed: str | None = None
        self._library: torch.library.Library | None = None

    def push(self, policy: str) -> None:
        with self._lock:
            self._settle([*self._open, (threading.get_ident(), policy)])

    def pop(self, policy: str) -> None:
        with self._lock:
            # Threads need not leave in the order in which they came.
            last = len(self._open) - 1 - self._open[::-1].index((threading.get_ident(), policy))
            self._settle(self._open[:last] + self._open[last + 1 :])

    def _settle(self, wanted: list[tuple[int, str]]) -> None:
        self._install(wanted[-1][1] if wanted else None)
        self._open = wanted
        # Both marks belong to a thread, as its autocast state does.
        here = [policy for thread, policy in wanted if thread == threading.get_ident()][-1:]
        for policy, device in _MARKER.items():
            torch.set_autocast_enabled(device, here == [policy])
        tag = torch.compiler.config.cache_key_tag.partition(_CACHE_TAG)[0]
        torch.compiler.config.cache_key_tag = tag + _CACHE_TAG + here[0] if here else tag

    def _install(self, policy: str | None) -> None:
        if policy == self._installed:
            return
        kernels = _kernels(policy) if policy else {}
        if self._library is not None:
            self._library._destroy()
            self._library = self._installed = None
        if policy is not None:
            self._library = _register(kernels)
            self._installed = policy


_registry = _Registry()


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _kernels(policy: str) -> dict[str, _Kernel]:
    """What to register at ``AutocastCPU``, by name of operator."""
    rules = {name: rule for rule, names in _POLICY.items() for name in names.split()}
    if policy == "installed":
        on_cuda = _registered("AutocastCUDA")
        if unknown := {name for name in on_cuda - rules.keys() if not _NO_RULE.fullmatch(name)}:
            warnings.warn(
                f"emulate_cuda_autocast leaves alone what it has no rule for, and CUDA autocast of torch "
                f"{torch.__version__} has: {', '.join(sorted(unknown))}",
                stacklevel=6,
            )
        rules = {name: rule for name, rule in rules.items() if name in on_cuda}
    kernels: dict[str, _Kernel] = dict.fromkeys(_registered("AutocastCPU"), torch.library.fallthrough_kernel)
    for name, rule in rules.items():
        if (op := _overload(name)) is not None:
            kernels[name] = _RULES[rule](op)
    return kernels


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _register(kernels: dict[str, _Kernel]) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels.items():
            library.impl(name, kernel, allow_override=True)
    return library


def _eligible(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    return value.to(dtype) if _eligible(value) else value


def _widest(values: Any, dtype: torch.dtype) -> torch.dtype:
    """The dtype that autocast promotes ``values`` to: ``dtype``, unless one of them is float32."""
    lower = torch.get_autocast_dtype("cpu")
    for value in values:
        if isinstance(value, (list, tuple)):
            dtype = _widest(value, dtype)
        elif _eligible(value):
            if torch.float32 in (dtype, value.dtype):
                dtype = torch.float32
            elif value.dtype != lower:
                raise RuntimeError(f"CUDA autocast to {lower} cannot promote an argument of dtype {value.dtype}")
    return dtype


def _casting(op: _Kernel, choose: Callable[[tuple[Any, ...]], torch.dtype]) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose((*args, *kwargs.values()))
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            return op(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})

    return kernel


def _float32_result(op: Any) -> _Kernel:
    index = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[index] if len(args) > index else kwargs.get("dtype")
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            if given is not None or not _eligible(args[0]):
                return op(*args, **kwargs)
            return op(*args[:index], **{**kwargs, "dtype": torch.float32})

    return kernel


def _float32_overload(op: Any) -> _Kernel:
    with_dtype = _overload(_WITH_DTYPE[op._schema.name.removeprefix("aten::") + "." + op._schema.overload_name])

    def kernel(*args: Any) -> Any:
        # The dispatcher leaves out arguments that equal their default, which the other overload does not have.
        rest = [argument.default_value for argument in op._schema.arguments[len(args) :]]
        dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            return with_dtype(*args, *rest, dtype=dtype)

    return kernel


def _banned(op: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"CUDA autocast refuses {op}: use binary_cross_entropy_with_logits, which it allows")

    return kernel


_RULES: dict[str, Callable[[Any], _Kernel]] = {
    "lower_precision": lambda op: _casting(op, lambda values: torch.get_autocast_dtype("cpu")),
    "float32": lambda op: _casting(op, lambda values: torch.float32),
    "float32_result": _float32_result,
    "float32_overload": _float32_overload,
    "widest": lambda op: _casting(op, lambda values: _widest(values, torch.get_autocast_dtype("cpu"))),
    "banned": _banned,
}
