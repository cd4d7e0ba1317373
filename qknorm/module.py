"""``QKRMSNorm`` and its kin: drop-in modules that hand back the dtype of their input.

The kin differ in the name of their parameter, which must stay what it was for ``state_dict``, or carry a bias. The
twins (``QKLayerNorm``, ``QKLpNorm``, ``QKDynamicTanh``) stand in for q/k norms that are no RMSNorms; each is a subclass
of the class that it replaces, built when first asked for, so that importing this imports torch alone.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import adapters, functional, reference


@dataclass(frozen=True)
class Origin:
    """What ``restore_qk_norms`` needs: the class that was replaced, and the attributes that it did not have."""

    cls: type
    added: tuple[str, ...]


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
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.unit_offset = unit_offset
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
        weight = self._parameters.get(self.weight_name)
        if weight is None:
            weight = getattr(self, self.weight_name)
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
    weight = property(lambda self: self.scale)


class QKGammaRMSNorm(QKRMSNorm):
    """``QKRMSNorm`` whose parameter is called ``gamma``, as in Stable Audio 3; ``weight`` reads it too."""

    weight_name = "gamma"
    weight = property(lambda self: self.gamma)


class QKBiasRMSNorm(QKRMSNorm):
    """``QKRMSNorm`` with a bias, added in the dtype in which the replaced class adds it. Torch path only."""

    def forward(self, x: Tensor) -> Tensor:
        functional.check_tensors(x, self.weight)
        eps = reference.default_eps(x) if self.eps is None else self.eps
        bias = self._parameters["bias"]
        return reference.rms_norm(
            x, self.weight, eps, self.unit_offset, self.rounding, bias=bias, straight_through=True
        )[0]


_KIN = {cls.weight_name: cls for cls in (QKRMSNorm, QKScaleRMSNorm, QKGammaRMSNorm)}

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
    return isinstance(norm, QKRMSNorm) or (type(norm).__module__ == __name__ and type(norm).__name__ in _TWINS)


def obstacle_to(norm: nn.Module, adapter: adapters.Adapter) -> str | None:
    """Why this very module cannot be replaced, and the way out; None where it can."""
    if "forward" in norm.__dict__:
        return "a hook (accelerate, diffusers offloading) took over its forward; replace before it is attached"
    if norm._compiled_call_impl is not None:
        return "it is compiled by itself; replace before norm.compile()"
    if any(getattr(hook, "with_module", False) for hook in norm._load_state_dict_pre_hooks.values()):
        return "a load_state_dict hook is bound to the module object; replace before it is registered"
    if norm._modules:
        return f"it has submodules ({', '.join(norm._modules)})"
    if adapter.twin:
        return None
    for name, value in adapter.requires.items():
        if getattr(norm, name, None) != value:
            return f"its {name} is {getattr(norm, name, None)!r}; only {value!r} is known to be bit-equal"
    unknown = [name for name in norm._parameters if name not in (adapter.weight, "bias")] + list(norm._buffers)
    if unknown:
        return f"it has parameters or buffers of its own ({', '.join(unknown)})"
    weight = getattr(norm, adapter.weight, None)
    if getattr(norm, "bias", None) is not None and (adapter.weight != "weight" or weight is None):
        return "it has a bias but no weight parameter"
    if weight is None:
        return None if _shape_without_weight(norm) else "it has no weight, and no dim or normalized_shape to go by"
    if weight.dtype not in functional.FLOAT_DTYPES:
        return f"its {adapter.weight} is {weight.dtype} ({type(weight).__name__}), quantised; dequantise it first"
    if type(weight) not in (nn.Parameter, Tensor):
        return f"its {adapter.weight} is a {type(weight).__name__}; replace before sharding or wrapping the model"
    return None


def from_adapter(norm: nn.Module, adapter: adapters.Adapter, backend: str = "auto") -> nn.Module:
    """The module that stands in for ``norm``; ``obstacle_to`` must have found none."""
    cls: type
    attributes: dict[str, Any] = {}
    if adapter.twin:
        cls = globals().get(adapter.twin) or __getattr__(adapter.twin)
    else:
        weight = getattr(norm, adapter.weight, None)
        cls = _KIN[adapter.weight] if getattr(norm, "bias", None) is None else QKBiasRMSNorm
        attributes = {
            "normalized_shape": _shape_without_weight(norm) if weight is None else tuple(weight.shape),
            "eps": getattr(norm, adapter.eps) if isinstance(adapter.eps, str) else adapter.eps,
            "elementwise_affine": weight is not None,
            "unit_offset": adapter.unit_offset,
            "rounding": adapter.rounding,
            "backend": backend,
        }
    added = tuple(name for name in attributes if name not in norm.__dict__)
    return _rebuilt(norm, cls, {**attributes, "_qknorm_origin": Origin(type(norm), (*added, "_qknorm_origin"))})


def original_of(norm: nn.Module) -> nn.Module | None:
    """The module that was replaced, built again around the current parameters; None for one that replaced nothing."""
    origin = norm.__dict__.get("_qknorm_origin")
    if origin is None:
        return None
    old = _rebuilt(norm, origin.cls, {})
    for name in origin.added:
        old.__dict__.pop(name, None)
    return old


def _rebuilt(norm: nn.Module, cls: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    new: nn.Module = cls.__new__(cls)
    # Hook dicts are shared on purpose: a RemovableHandle made before finds its hook in them.
    new.__dict__.update(norm.__dict__)
    new.__dict__["_parameters"] = dict(norm._parameters)
    new.__dict__.update(attributes)
    return new


def _shape_without_weight(norm: nn.Module) -> tuple[int, ...] | None:
    shape = getattr(norm, "normalized_shape", getattr(norm, "dim", None))
    if isinstance(shape, int):
        return (shape,)
    return None if shape is None else tuple(shape)
