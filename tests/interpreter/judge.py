"""Calls of the kernels on poisoned memory, held to the float64 oracle and to the torch path."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import HALF, oracle
from qknorm_kernels import rms_norm as kernels
from torch import Tensor

from qknorm import reference

# The one table: units in the last place from the correctly rounded float64 result. In float32 the sum, the root and
# two products round as well: torch's own kernel is three off in one value of 2000.
ULPS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 3, torch.float64: 1}
RSTD_ULPS = 2
# A gradient: one such unit, and float32 arithmetic relative to the terms that it is a sum of.
SUM = 2.0**-21

_GUARD = 1024


class Memory:
    """What was allocated while poisoned: every byte 0xff, a NaN in every dtype, and as much before and after."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[Tensor, int]] = {}

    def allocate(self, shape: Any, dtype: torch.dtype) -> Tensor:
        shape = torch.Size([shape] if isinstance(shape, int) else shape)
        size = shape.numel() * dtype.itemsize
        block = torch.ones(size + 2 * _GUARD, dtype=torch.uint8).mul_(255)
        self.blocks[block.data_ptr()] = block, size
        return block[_GUARD : _GUARD + size].view(dtype).view(shape)

    def check(self, *outputs: Tensor | None) -> None:
        """Each output is contiguous and new, and nothing was written before or after it."""
        for t in outputs:
            if t is not None:
                assert t.is_contiguous()
                assert t.untyped_storage().data_ptr() in self.blocks, "not allocated through the patched names"
        for block, size in self.blocks.values():
            assert (block[:_GUARD] == 255).all(), "written before an output"
            assert (block[_GUARD + size :] == 255).all(), "written past an output"


@contextmanager
def poisoned(copies: bool = True) -> Iterator[Memory]:
    """What the kernels allocate is NaN; without ``copies`` a copy of an input is an error."""
    memory = Memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda t, dtype=None, **_: memory.allocate(t.shape, dtype or t.dtype))
        patch.setattr(Tensor, "new_empty", lambda t, shape, dtype=None, **_: memory.allocate(shape, dtype or t.dtype))
        if not copies:
            for name in ("contiguous", "clone", "float", "to", "reshape"):
                patch.setattr(Tensor, name, _same_memory(getattr(Tensor, name)))
        yield memory


def _same_memory(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = method(t, *args, **kwargs)
        assert result.data_ptr() == t.data_ptr(), "an input was copied"
        return result

    return call


@contextmanager
def unchanged(*tensors: Tensor | None) -> Iterator[None]:
    """Nothing is written to the memory of these tensors, gaps included."""
    storages = [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for t in tensors if t is not None]
    before = [s.clone() for s in storages]
    yield
    for s, b in zip(storages, before, strict=True):
        assert torch.equal(s, b), "an input was written to"


def _check_hints(arguments: dict[str, Any]) -> None:
    """What a kernel is told of alignment is true: the interpreter reads on where a GPU would not."""
    if arguments.get("ALIGN", 1) > 1:
        for name, value in arguments.items():
            if name.rstrip("2") in ("x", "y", "dy", "dx") and value is not None:
                assert value.data_ptr() % 16 == 0, f"{name} is not aligned"
            if "stride" in name and value is not None:
                assert value % arguments["ALIGN"] == 0, f"{name} is not aligned"
    if arguments.get("PACKED_WEIGHT"):
        assert all(w is None or w.data_ptr() % 16 == 0 for w in (arguments["weight"], arguments["weight2"]))


@contextmanager
def counted() -> Iterator[list[str]]:
    """The kernels that are launched, in their order, and nothing untrue said to them."""
    launches: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name.removesuffix("_kernel"), getattr(kernels, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **options: Any) -> None:
                launches.append(self.name)
                _check_hints(dict(zip(self.kernel.arg_names, arguments, strict=True)))
                self.kernel[grid](*arguments, **options)

            return launch

    kernels._plans.clear()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward_kernel", "backward_kernel", "reduce_kernel"):
            patch.setattr(kernels, name, Counted(name))
        yield launches
    kernels._plans.clear()


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit in the last place of float64 values in a dtype."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.abs()).exponent - 1
    return torch.ldexp(torch.full_like(values, info.eps, dtype=torch.float64), exponent).clamp_min(info.eps * info.tiny)


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, what
    assert actual.isfinite().all(), f"{what} has elements that were not written, or NaN from outside"
    over = (actual.double() - expected.double()).abs() / bound
    assert not (over > 1).any(), f"{what} is off by {over.max().item():.3g} of what is allowed"


def steps(x: Tensor, weight: Tensor | None, unit_offset: bool, rounding: str) -> list[torch.dtype]:
    """Half dtypes that a value is rounded to on its way to y."""
    if weight is None:
        return []
    found = [weight.dtype] if unit_offset else []
    if rounding == "weight":
        found += [weight.dtype, weight.dtype]
    elif rounding == "input":
        found += [x.dtype, torch.promote_types(x.dtype, weight.dtype)]
    return [dtype for dtype in found if dtype in HALF]


class Expected:
    """The float64 result of a call, the torch path's, and how far from either a kernel may be."""

    def __init__(self, x: Tensor, dy: Tensor, weight: Tensor | None, eps: float, unit_offset: bool, rounding: str):
        self.x, self.dy, self.weight, self.options = x, dy, weight, (eps, unit_offset, rounding)
        self.steps = steps(x, weight, unit_offset, rounding)
        self.rstd64 = torch.rsqrt(x.double().square().mean(-1) + eps)
        self.leaves = [t.detach().requires_grad_() for t in (x, weight) if t is not None]
        self.y64 = oracle(self.leaves[0], self.leaves[1] if weight is not None else None, *self.options)

    def check_forward(self, y: Tensor, rstd: Tensor | None) -> None:
        assert y.dtype == self.x.dtype
        expected = self.y64.detach()
        doubled = self.weight is not None and self.weight.dtype is torch.float64  # cast to float32 first
        tight = (ULPS[y.dtype] + (doubled and y.dtype is torch.float32)) * spacing(expected, y.dtype)
        # A value whose float32 error puts it on the other side of a tie is one step off, in each rounding; then y too.
        loose = tight + sum(torch.finfo(dtype).eps for dtype in self.steps) * expected.abs()
        loose += 0.5 * spacing(expected, y.dtype) if self.steps else 0
        torch_y, torch_rstd = reference.rms_norm(self.x, self.weight, *self.options)
        assert_within(y, expected.to(y.dtype), loose, "y, from float64,")
        assert_within(y, torch_y, loose + (tight if y.dtype is torch.float32 else 0), "y, from the torch path,")
        if torch.bfloat16 not in self.steps:  # which the interpreter truncates to
            many = ((y.double() - expected.to(y.dtype).double()).abs() > tight).sum().item()
            assert many <= max(1, y.numel() // 100), f"{many} elements of y are a step off"
        if rstd is not None:
            bound = RSTD_ULPS * spacing(self.rstd64, torch.float32)
            assert rstd.dtype == torch.float32
            assert_within(rstd, self.rstd64.float(), bound, "rstd, from float64,")
            assert_within(rstd, torch_rstd, bound, "rstd, from the torch path,")

    def check_backward(self, dx: Tensor, dw: Tensor, mask: int) -> None:
        x, dy, weight = self.x, self.dy, self.weight
        _, unit_offset, rounding = self.options
        wanted = torch.autograd.grad(self.y64, self.leaves, dy.double(), retain_graph=True)
        torch_dx, torch_dw = reference.rms_norm_backward(dy, x, weight, None, *self.options, mask)
        n = x.double().abs() * self.rstd64.unsqueeze(-1)
        if mask & 1:
            assert dx.dtype == x.dtype
            factor = 1.0 if weight is None else (weight + 1 if unit_offset else weight).double().abs()
            g = dy.double().abs() * factor
            terms = self.rstd64.unsqueeze(-1) * (g + n * (g * n).mean(-1, keepdim=True))
            truncated = unit_offset and weight is not None and weight.dtype is torch.bfloat16
            bound = spacing(wanted[0].double(), dx.dtype) + (SUM + (2.0**-7 if truncated else 0)) * terms
            assert_within(dx, wanted[0], bound, "dx, from float64,")
            assert_within(dx, torch_dx, bound, "dx, from the torch path,")
        else:
            assert dx.numel() == 0
        if mask & 2 and weight is not None:
            assert dw.dtype == weight.dtype
            terms = (dy.double().abs() * n).reshape(-1, x.shape[-1])
            unit = 1.5 if dw.dtype is torch.bfloat16 else 1.0  # truncated, after another value was
            bound = unit * spacing(wanted[1].double(), dw.dtype) + SUM * terms.sum(0)
            normed = {"once": None, "weight": weight.dtype, "input": x.dtype}[rounding]
            if normed is torch.bfloat16:  # truncated
                bound += 2.0**-7 * terms.sum(0)
            elif normed is torch.float16 and len(terms):  # a value in a thousand is on the other side of a tie
                many = ((dw.double() - wanted[1].double()).abs() > bound).sum().item()
                assert many <= max(1, dw.numel() // 100), f"{many} elements of dw have another value of x * rstd"
                bound += 2.0**-10 * terms.amax(0)
            assert_within(dw, wanted[1], bound, "dw, from float64,")
            assert_within(dw, torch_dw, bound, "dw, from the torch path,")
        else:
            assert dw.numel() == 0


def must_copy(*tensors: Tensor, weight: Tensor | None) -> bool:
    """Whether the documented copies are due: a last stride other than one, a weight that no kernel reads."""
    strided = any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in tensors)
    return strided or (weight is not None and (weight.dtype is torch.float64 or not weight.stride(0) == 1))


def check(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    rounding: str = "once",
    mask: int = 3,
    save: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """One forward and one backward: the numbers, every element written, nothing else written, no needless copy."""
    expected = Expected(x, dy, weight, eps, unit_offset, rounding)
    with unchanged(x, weight), poisoned(must_copy(x, weight=weight)) as memory:
        y, rstd = kernels.forward(x, weight, eps, unit_offset, rounding, save)
    memory.check(y, rstd)
    assert (rstd is not None) == save
    expected.check_forward(y, rstd)
    given = expected.rstd64.float() if rstd is None else rstd
    with unchanged(x, dy, weight, given), poisoned(must_copy(x, dy, weight=weight)) as memory:
        dx, dw = kernels.backward(dy, x, weight, given, unit_offset, rounding, mask)
    memory.check(dx, dw)
    expected.check_backward(dx, dw, mask)
    return y, rstd, dx, dw


def check_pair(
    x: tuple[Tensor, Tensor],
    dy: tuple[Tensor, Tensor],
    weight: tuple[Tensor | None, Tensor | None],
    unit_offset: bool = False,
    rounding: str = "once",
    mask: tuple[int, int] = (3, 3),
    save: bool = True,
) -> tuple[list[str], list[str]]:
    """``check`` of q and k together; which kernels the forward and the backward launched."""
    eps = 1e-6
    both = [Expected(*each, eps, unit_offset, rounding) for each in zip(x, dy, weight, strict=True)]
    with unchanged(*x, *weight), poisoned() as memory, counted() as forward:
        results = kernels.forward_pair(x, weight, eps, unit_offset, rounding, save)
    for expected, (y, rstd) in zip(both, results, strict=True):
        memory.check(y, rstd)
        assert (rstd is not None) == save
        expected.check_forward(y, rstd)
    rstds = tuple(
        expected.rstd64.float() if rstd is None else rstd for expected, (_, rstd) in zip(both, results, strict=True)
    )
    with unchanged(*x, *dy, *weight), poisoned() as memory, counted() as backward:
        gradients = kernels.backward_pair(dy, x, weight, rstds, unit_offset, rounding, mask)
    for expected, (dx, dw), wanted in zip(both, gradients, mask, strict=True):
        memory.check(dx, dw)
        expected.check_backward(dx, dw, wanted)
    return forward, backward
