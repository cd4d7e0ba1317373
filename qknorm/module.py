"""``QKRMSNorm`` and its kin: drop-in modules that hand back the dtype of their input.

The kin differ in the name of their parameter, which must stay what it was for ``state_dict``, or carry a bias. The
twins (``QKLayerNorm``, ``QKLpNorm``, ``QKDynamicTanh``) stand in for q/k norms that are no RMSNorms; each is a subclass
of the class that it replaces, built when first asked for, so that importing this imports torch alone.
"""

import importlib
import numbers
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from . import adapters, functional, reference


@dataclass(frozen=True)
class Origin:
    """What ``restore_qk_norms`` needs: the class that was replaced, and which attributes were added and changed."""

    cls: type
    added: tuple[str, ...]
    changed: dict[str, Any] = field(default_factory=dict)  # to what they were


class QKRMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` that returns the dtype of its input, under any autocast and any weight dtype.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in ``torch.nn.RMSNorm``.
        unit_offset, rounding, backend: as in ``qknorm.rms_norm``; a weight with unit offset starts at zero.

    Shape: [..., *normalized_shape] to the same shape, fresh and contiguous. Errors: those of ``qknorm.rms_norm``.
    """

    weight_name = "weight"

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        unit_offset: bool = False,
        rounding: str = "once",
        backend: str = "auto",
    ) -> None:
        functional.check_options(rounding, backend)
        nn.Module.__init__(self)  # nn.RMSNorm's own would call the parameter ``weight`` in the kin, too
        self.normalized_shape = _as_shape(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.unit_offset = unit_offset
        self.float32_weight = False  # an adapter's affair: see ``Adapter``
        self.rounding = rounding
        self.backend = backend
        weight = torch.empty(self.normalized_shape, device=device, dtype=dtype) if elementwise_affine else None
        self.register_parameter(self.weight_name, None if weight is None else nn.Parameter(weight))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that it multiplies by one."""
        if self.elementwise_affine:
            nn.init.constant_(getattr(self, self.weight_name), 0.0 if self.unit_offset else 1.0)

    @classmethod
    def from_norm(cls, norm: nn.Module) -> nn.Module:
        """A dtype-preserving module in place of any known norm, with the same Parameters, hooks, mode and attributes.

        The kin or twin of the class decides the type of the result. ``norm`` itself is not changed; hook dicts are
        shared with it, so that a handle made before still removes its hook.

        Raises:
            TypeError: nothing is known of the exact class of ``norm``; ``qknorm.register_norm`` adds one.
            ValueError: its class is known, but this module cannot be replaced; the message says why.
        """
        adapter = adapters.adapter_for(type(norm))
        if adapter is None:
            raise TypeError(
                f"no adapter for {adapters.class_path(type(norm))}; teach it with qknorm.register_norm(cls, adapter)"
            )
        if isinstance(adapter, str):
            raise ValueError(f"{adapters.class_path(type(norm))} is left alone: {adapter}")
        obstacle = obstacle_to(norm, adapter)
        if obstacle:
            raise ValueError(f"this {type(norm).__name__} cannot be replaced: {obstacle}")
        return from_adapter(norm, adapter)

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            dims = len(self.normalized_shape)
            return _scripted(x, self.weight, self.eps, dims, self.unit_offset, self.float32_weight, self.rounding)
        else:  # explicit, for TorchScript compiles whatever follows the if
            weight: Tensor | None = self._parameters.get(self.weight_name)
            if weight is None:
                weight = getattr(self, self.weight_name)
            if self.float32_weight and weight is not None:
                weight = weight.to(reference.accumulate_dtype(x))
            if len(self.normalized_shape) != 1:
                return self._forward_over_many(x, weight)
            return functional.rms_norm(
                x, weight, self.eps, unit_offset=self.unit_offset, rounding=self.rounding, backend=self.backend
            )

    def _forward_over_many(self, x: Tensor, weight: Tensor | None) -> Tensor:
        dims = len(self.normalized_shape)
        if x.shape[-dims:] != self.normalized_shape:
            raise ValueError(f"x must end in {list(self.normalized_shape)}, but is {list(x.shape)}")
        y = functional.rms_norm(
            x.flatten(-dims),
            None if weight is None else weight.flatten(),
            self.eps,
            unit_offset=self.unit_offset,
            rounding=self.rounding,
            backend=self.backend,
        )
        return y.view(x.shape)

    # Complete, not an extension of nn.RMSNorm's: Dynamo cannot trace that one.
    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, "
            f"unit_offset={self.unit_offset}, rounding={self.rounding!r}, backend={self.backend!r}"
        )


class QKScaleRMSNorm(QKRMSNorm):
    """``QKRMSNorm`` whose parameter is called ``scale``, as in BFL's code; ``weight`` reads it too."""

    weight_name = "scale"
    scale: Tensor | None

    @property
    def weight(self) -> Tensor | None:  # type: ignore[override]
        """``scale``, by the name that others read; a parameter of that name would be in ``state_dict``."""
        return self.scale


class QKGammaRMSNorm(QKRMSNorm):
    """``QKRMSNorm`` whose parameter is called ``gamma``, as in Stable Audio 3; ``weight`` reads it too."""

    weight_name = "gamma"
    gamma: Tensor | None

    @property
    def weight(self) -> Tensor | None:  # type: ignore[override]
        """``gamma``, by the name that others read; a parameter of that name would be in ``state_dict``."""
        return self.gamma


class QKBiasRMSNorm(QKRMSNorm):
    """``QKRMSNorm`` with a bias, added in the dtype in which the replaced class adds it. Torch path only."""

    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        functional.check_tensors(x, self.weight)
        eps = reference.default_eps(x) if self.eps is None else self.eps
        return reference.rms_norm(
            x, self.weight, eps, self.unit_offset, self.rounding, bias=self.bias, straight_through=True
        )[0]


_KIN = {cls.weight_name: cls for cls in (QKRMSNorm, QKScaleRMSNorm, QKGammaRMSNorm)}


def is_kin(cls: type) -> bool:
    """Whether ``cls`` is one of the classes that compute ``qknorm.rms_norm`` and nothing else; subclasses are not."""
    return any(cls is kin for kin in _KIN.values())


_TWINS = {
    "QKLayerNorm": ("torch.nn.modules.normalization", "LayerNorm"),
    "QKLpNorm": ("diffusers.models.normalization", "LpNorm"),
    "QKDynamicTanh": ("diffusers.models.autoencoders.autoencoder_same", "DynamicTanh"),
}


def __getattr__(name: str) -> type:
    """The twins, each made when first asked for (by ``from_norm`` or by unpickling)."""
    if name not in _TWINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, base_name = _TWINS[name]
    base = getattr(importlib.import_module(module_name), base_name)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return base.forward(self, x).to(x.dtype)

    doc = f"``{base_name}`` that returns the dtype of its input."
    twin = type(name, (base,), {"forward": forward, "__module__": __name__, "__qualname__": name, "__doc__": doc})
    globals()[name] = twin
    return twin


def is_ours(norm: nn.Module) -> bool:
    """Whether a module is a ``QKRMSNorm``, one of its kin, or a twin."""
    return isinstance(norm, QKRMSNorm) or any(
        cls.__module__ == __name__ and cls.__name__ in _TWINS for cls in type(norm).__mro__
    )


def obstacle_to(norm: nn.Module, adapter: adapters.Adapter) -> str | None:
    """Why this very module cannot be replaced, and the way out; None where it can."""
    obstacle = obstacle_to_rebuilding(norm)
    if obstacle or adapter.twin:
        return obstacle
    for name, value in adapter.requires.items():
        if getattr(norm, name, None) != value:
            return f"its {name} is {getattr(norm, name, None)!r}; only {value!r} is known to be bit-equal"
    if isinstance(adapter.eps, str) and not hasattr(norm, adapter.eps):
        return f"it has no attribute {adapter.eps!r}, which its adapter names as eps"
    unknown = [name for name in norm._parameters if name not in (adapter.weight, "bias")] + list(norm._buffers)
    if unknown:
        return f"it has parameters or buffers of its own ({', '.join(unknown)})"
    own_format = [name for name in _STATE_METHODS if getattr(type(norm), name) is not getattr(nn.Module, name)]
    if own_format:
        return f"its class has a {own_format[0]} of its own, which would be lost"
    weight = getattr(norm, adapter.weight, None)
    if _bias(norm) is not None and (adapter.weight != "weight" or weight is None):
        return "it has a bias but no weight parameter"
    for name, tensor in ((adapter.weight, weight), ("bias", _bias(norm))):
        if tensor is not None and tensor.dtype not in functional.FLOAT_DTYPES:
            return f"its {name} is {tensor.dtype} ({type(tensor).__name__}), quantised; dequantise it first"
    shape = _shape(norm, weight)
    if shape is None:
        return "it has no weight, and no dim or normalized_shape to go by"
    if len(shape) != 1 and (not shape or not isinstance(norm, nn.RMSNorm)):
        return f"its shape is {shape}; only torch.nn.RMSNorm is known to norm over several dimensions"
    return None


def obstacle_to_rebuilding(norm: nn.Module) -> str | None:
    """Why neither ``replace_qk_norms`` nor ``restore_qk_norms`` may put another module object in place of ``norm``."""
    if "forward" in norm.__dict__ and not _is_own_forward(norm):
        return (
            "a hook (accelerate, diffusers offloading) took over its forward; remove it, or swap before it is attached"
        )
    if norm._compiled_call_impl is not None:
        return "it is compiled by itself; swap before norm.compile()"
    if any(getattr(hook, "with_module", False) for hook in norm._load_state_dict_pre_hooks.values()):
        return "a load_state_dict hook is bound to the module object; swap before it is registered"
    if nn.utils.parametrize.is_parametrized(norm):
        return "it is parametrised; remove the parametrisation, or swap before adding it"
    if norm._modules:
        return f"it has submodules ({', '.join(norm._modules)})"
    if type(norm._parameters) not in (dict, OrderedDict):
        return f"its parameters are kept by a {type(norm._parameters).__name__}; swap before wrapping the model"
    for name, tensor in norm._parameters.items():
        if tensor is not None and type(tensor) not in (nn.Parameter, Tensor, FakeTensor):
            way_out = "swap before sharding or wrapping the model"
            if tensor.dtype not in functional.FLOAT_DTYPES:
                way_out = "quantised; dequantise it first"
            return f"its {name} is a {type(tensor).__name__} of {tensor.dtype}; {way_out}"
    return None


def from_adapter(norm: nn.Module, adapter: adapters.Adapter, backend: str = "auto") -> nn.Module:
    """The module that stands in for ``norm``; ``obstacle_to`` must have found none."""
    cls: type
    attributes: dict[str, Any] = {}
    if adapter.twin:
        cls = globals().get(adapter.twin) or __getattr__(adapter.twin)
    else:
        weight = getattr(norm, adapter.weight, None)
        cls = _KIN[adapter.weight] if _bias(norm) is None else QKBiasRMSNorm
        attributes = {
            "normalized_shape": _shape(norm, weight),
            "eps": getattr(norm, adapter.eps) if isinstance(adapter.eps, str) else adapter.eps,
            "elementwise_affine": weight is not None,
            "unit_offset": adapter.unit_offset,
            "float32_weight": adapter.float32_weight,
            "rounding": adapter.rounding,
            "backend": backend,
        }
    had = norm.__dict__
    added = (*(name for name in attributes if name not in had), "_qknorm_origin")
    changed = {name: had[name] for name, value in attributes.items() if name in had and had[name] is not value}
    return _rebuilt(norm, cls, {**attributes, "_qknorm_origin": Origin(type(norm), added, changed)})


def original_of(norm: nn.Module) -> nn.Module | None:
    """The module that was replaced, built again around the current parameters; None for one that replaced nothing."""
    origin = norm.__dict__.get("_qknorm_origin")
    if origin is None:
        return None
    old = _rebuilt(norm, origin.cls, origin.changed)
    for name in origin.added:
        old.__dict__.pop(name, None)
    return old


def _rebuilt(norm: nn.Module, cls: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    new: nn.Module = cls.__new__(cls)
    # Hook dicts are shared on purpose: a RemovableHandle made before finds its hook in them.
    new.__dict__.update(norm.__dict__)
    new.__dict__["_parameters"] = type(norm._parameters)(norm._parameters)
    # What removed hooks leave behind, and is bound to the module object: its own forward, an empty registry.
    new.__dict__.pop("forward", None)
    new.__dict__.pop("_diffusers_hook", None)
    new.__dict__.update(attributes)
    return new


# What a class may override to keep its state in a form of its own.
_STATE_METHODS = ("_save_to_state_dict", "_load_from_state_dict", "get_extra_state", "set_extra_state", "_apply")


def _is_own_forward(norm: nn.Module) -> bool:
    """Whether the instance attribute ``forward`` is the method of the class: accelerate leaves it so."""
    forward = norm.__dict__["forward"]
    return getattr(forward, "__self__", None) is norm and getattr(forward, "__func__", None) is type(norm).forward


def _bias(norm: nn.Module) -> Tensor | None:
    bias = getattr(norm, "bias", None)
    return bias if isinstance(bias, Tensor) else None


def _shape(norm: nn.Module, weight: Tensor | None) -> tuple[int, ...] | None:
    if weight is not None:
        return tuple(weight.shape)
    shape = getattr(norm, "normalized_shape", getattr(norm, "dim", None))
    return None if shape is None else _as_shape(shape)


def _as_shape(shape: Any) -> tuple[int, ...]:
    return (int(shape),) if isinstance(shape, numbers.Integral) else tuple(shape)


def _scripted(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    dims: int,
    unit_offset: bool,
    float32_weight: bool,
    rounding: str,
) -> Tensor:
    """``QKRMSNorm.forward`` for ``torch.jit.script``, which knows tensors and operators alone."""
    if eps is None:
        eps = 2.220446049250313e-16 if x.dtype == torch.float64 else 1.1920928955078125e-07
    if weight is not None:
        if float32_weight:
            weight = weight.double() if x.dtype == torch.float64 else weight.float()
        weight = weight.flatten()
    return torch.ops.qknorm.rms_norm(x.flatten(-dims), weight, eps, unit_offset, rounding)[0].view(x.shape)
