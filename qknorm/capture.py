"""See the attention calls of a forward, and find out by measurement why an operand came in the dtype that it has.

Imports torch and our modules up to ``replace``; diffusers is watched where it is loaded already, never imported.
"""

import contextlib
import functools
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .replace import _base_name, find_qk_norms

OPERANDS = ("query", "key", "value")


@dataclass(frozen=True)
class Operand:
    """A tensor of an attention call; ``tensor`` is itself, detached, where it was asked for."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    tensor: Tensor | None = field(default=None, repr=False, compare=False)


@dataclass
class AttentionCall:
    """One attention call: who made it, with what and, in an audit, what that means.

    Attributes:
        entry: "dispatch_attention_fn" (operands are [B, S, H, D]) or "scaled_dot_product_attention" ([B, H, S, D]).
        fqn: the module whose forward made it; empty for the model itself and where no model was given.
        backend: the one that diffusers dispatched to; None for the other entry.
        verdict: "ok"; "leak", where the dtypes of query, key and value differ; "wide", where they agree on one that is
            wider than the dtype due: that of autocast or, without it, of most weights.
        causes: of a verdict that is not ok: "autocast policy", "weight dtype" or "norm" (its own code) where a q/k norm
            changed the dtype; "RoPE" or "other" where it changed after the norm; "upstream" where it had before.
        where: the norms, modules or source lines that did it.
    """

    entry: str
    fqn: str
    backend: str | None
    query: Operand
    key: Operand
    value: Operand
    verdict: str = "ok"
    causes: tuple[str, ...] = ()
    where: tuple[str, ...] = ()

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Of query, key and value."""
        return self.query.dtype, self.key.dtype, self.value.dtype

    def as_dict(self) -> dict[str, Any]:
        """The record in types that JSON knows, without tensors."""
        plain: dict[str, Any] = {"entry": self.entry, "fqn": self.fqn, "backend": self.backend}
        for name in OPERANDS:
            x = getattr(self, name)
            plain[name] = {"dtype": short_name(x.dtype), "shape": x.shape, "stride": x.stride, "device": str(x.device)}
        return plain | {"verdict": self.verdict, "causes": [*self.causes], "where": [*self.where]}


@contextlib.contextmanager
def capture_attention(model: nn.Module | None = None, *, keep_tensors: bool = False) -> Iterator[list[AttentionCall]]:
    """Record attention calls, in order, in the list that is yielded.

    Seen are diffusers' ``dispatch_attention_fn``, however it was imported and whatever the backend, also where its
    checks refuse the call, and ``F.scaled_dot_product_attention``; the one inside the other is not counted again.
    Hand-written attention and kernels that are called directly are not seen. ``torch.compile``d code runs eagerly.

    Args:
        model: gives the records their ``fqn``.
        keep_tensors: keep the operands, detached.
    """
    trace = Trace(model, keep_tensors=keep_tensors)
    with trace.watching():
        yield trace.calls


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(eq=False)
class _Event:
    """Something that left a dtype other than the one due: a q/k norm (also where it did not), a module, a function."""

    kind: str
    name: str
    dtype: torch.dtype
    source: torch.dtype | None = None  # a norm's: the dtype that it was given
    role: str = ""
    cause: str = ""


class Trace(TorchFunctionMode):
    """Watches a forward: modules through global hooks, functions through the mode, diffusers through its registry.

    Nothing of the model is touched. With ``due``, the dtype that attention ought to see, each call is judged.
    """

    def __init__(self, model: nn.Module | None, *, keep_tensors: bool = False, due: torch.dtype | None = None) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []
        self.unattended: dict[str, None] = {}  # q/k norms that ran, and no attention call was seen to follow
        self._keep_tensors = keep_tensors
        self._due = due
        self._names = {} if model is None else {id(module): name for name, module in model.named_modules()}
        found = [] if model is None or due is None else find_qk_norms(model)
        # Every q of every spelling has a q in its attribute name, and no k has.
        self._roles = {id(norm): "q" if "q" in _base_name(name) else "k" for name, norm, _ in found if norm is not None}
        self._log: list[_Event] = []
        self._stack: list[tuple[int, str, int]] = []  # of modules: id, name, length of the log when it was entered
        self._last_call = 0  # the length of the log then
        self._inside_attention = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            # Not with_kwargs: of such a global hook remove() leaves an entry, and Dynamo believes that it is there.
            stack.callback(register_module_forward_hook(self._leave).remove)
            stack.enter_context(self._watching_diffusers())
            stack.enter_context(self)
            yield

    @contextlib.contextmanager
    def _watching_diffusers(self) -> Iterator[None]:
        # Models import dispatch_attention_fn by name, so what is swapped is the table in which it looks a backend up.
        registry = getattr(sys.modules.get("diffusers.models.attention_dispatch"), "_AttentionBackendRegistry", None)
        if registry is None:
            yield
            return
        record = functools.partial(self._record, "dispatch_attention_fn")
        backends, constraints, checked = registry._backends, registry._constraints, registry._checks_enabled
        registry._backends = {
            name: self._recording(functools.partial(record, name.value), run, registry)
            for name, run in backends.items()
        }
        registry._constraints = {
            name: [functools.partial(record, name.value, ()), *checks] for name, checks in constraints.items()
        }
        if self._due is not None:  # an audit says itself what they refuse, and wants to see the calls that follow
            registry._checks_enabled = False
        try:
            yield
        finally:
            registry._backends, registry._constraints, registry._checks_enabled = backends, constraints, checked

    def _recording(self, record: Callable[..., None], run: Callable[..., Any], registry: Any) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not registry._checks_enabled:  # otherwise the first check has recorded it
                record(args, **kwargs)
            outer, self._inside_attention = self._inside_attention, True
            try:
                return run(*args, **kwargs)
            finally:
                self._inside_attention = outer

        return recorded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside_attention:
            return func(*args, **kwargs)
        if func is torch._C._nn.scaled_dot_product_attention:  # which F may no longer be, where it was patched
            self._record("scaled_dot_product_attention", None, args, **kwargs)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        in_norm = self._stack and self._stack[-1][0] in self._roles
        if self._due and not in_norm and isinstance(result, Tensor) and _is_odd(result.dtype, self._due):
            if any(isinstance(x, Tensor) and x.dtype == self._due for x in tree_leaves((args, kwargs))):
                line, is_rope = _source_line()
                name = f"{getattr(func, '__name__', func)} at {line}"
                self._log.append(_Event("function", name, result.dtype, cause="RoPE" if is_rope else "other"))
        return result

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._names:
            self._stack.append((id(module), self._names[id(module)], len(self._log)))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        entered = [i for i, (key, _, _) in enumerate(self._stack) if key == id(module)]
        if not entered:
            return
        del self._stack[entered[-1] + 1 :]  # modules whose forward raised, which this one caught
        y = next((x for x in tree_leaves(output) if isinstance(x, Tensor)), None)
        given = [x.dtype for x in tree_leaves(args) if isinstance(x, Tensor) and x.is_floating_point()]
        name, role = self._stack[-1][1], self._roles.get(id(module))
        if self._due and given and y is not None:
            if role:
                cause = self._cause_in_norm(module, args, given[0], y) if y.dtype != given[0] else ""
                self._log.append(_Event("norm", name, y.dtype, given[0], role, cause))
                self.unattended[name] = None
            elif self._due in given and y.dtype not in given and _is_odd(y.dtype, self._due):
                self._log.append(_Event("module", name, y.dtype))
        self._stack.pop()

    def _cause_in_norm(self, norm: nn.Module, args: Any, given: torch.dtype, y: Tensor) -> str:
        """Why a norm changed the dtype: it is run again on the same input, without autocast."""
        if torch.is_autocast_enabled(y.device.type):
            try:
                with torch.autocast(y.device.type, enabled=False):
                    again = norm.forward(*(x.clone() if isinstance(x, Tensor) else x for x in args))
            except RuntimeError:  # only autocast lets it take these dtypes at all
                return "autocast policy"
            if again.dtype == given:
                return "autocast policy"
        return "weight dtype" if any(p.dtype == y.dtype for p in norm.parameters()) else "norm"

    def _record(self, entry: str, backend: str | None, args: Sequence[Any], **kwargs: Any) -> None:
        tensors: list[Any] = [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(OPERANDS)]
        if not all(isinstance(x, Tensor) for x in tensors):
            return  # a call that is about to fail
        query, key, value = (
            Operand(x.dtype, tuple(x.shape), x.stride(), x.device, x.detach() if self._keep_tensors else None)
            for x in tensors
        )
        call = AttentionCall(entry, self._stack[-1][1] if self._stack else "", backend, query, key, value)
        if self._due:
            self._judge(call, self._due)
        self.calls.append(call)
        self._last_call = len(self._log)

    def _judge(self, call: AttentionCall, due: torch.dtype) -> None:
        norms = self._norms_before()
        for norm in norms:
            self.unattended.pop(norm.name, None)
        if len(set(call.dtypes)) > 1:
            call.verdict = "leak"
        elif call.query.dtype.itemsize > due.itemsize:
            call.verdict = "wide"
        else:
            return
        found = [
            self._explain(role, dtype, [norm for norm in norms if norm.role == role])
            for role, dtype in zip("qkv", call.dtypes, strict=True)
            if dtype != due
        ]
        call.causes = tuple(dict.fromkeys(cause for cause, _ in found))
        call.where = tuple(dict.fromkeys(name for _, where in found for name in where))

    def _norms_before(self) -> list[_Event]:
        """The q/k norms that ran in the innermost of the running modules that has any; an earlier call's are not."""
        for depth, (_, _, start) in enumerate(reversed(self._stack)):
            events = self._log[max(start, self._last_call) if depth else start :]
            if norms := [e for e in events if e.kind == "norm"]:
                return norms
        return []

    def _explain(self, role: str, dtype: torch.dtype, norms: list[_Event]) -> tuple[str, list[str]]:
        """The cause for which an operand came as ``dtype``, and the names of what did it."""
        changing = [norm for norm in norms if norm.dtype == dtype != norm.source]
        if changing:
            return changing[0].cause, [norm.name for norm in changing]
        if norms and all(norm.dtype != dtype for norm in norms):
            after = [e for e in self._log[self._log.index(norms[-1]) :] if e.kind == "function"]
            return (after[0].cause, [after[0].name]) if after else ("other", [f"after {norms[-1].name}"])
        end = self._log.index(norms[0]) if norms else len(self._log)
        for depth, (_, name, start) in enumerate(reversed(self._stack)):
            for kind in ("module", "function"):
                turned = [e for e in self._log[start:end] if e.kind == kind and e.dtype == dtype]
                # Around the module that did it are others, which turned because of it.
                turned = [e for e in turned if not any(o.name.startswith(e.name + ".") for o in turned)]
                if depth == 0 and kind == "module":
                    turned = [e for e in turned if role in e.name[len(name) :]] or turned
                if turned:
                    return "upstream", [turned[-1].name]
        return "upstream", []


def _is_odd(dtype: torch.dtype, due: torch.dtype) -> bool:
    return dtype != due and (dtype.is_floating_point or dtype.is_complex)


_ROPE = re.compile(r"rotat|rotary|(?<![a-z])m?rope|freqs|(?<![a-z])(cos|sin)(?![a-z])", re.IGNORECASE)
_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep


def _source_line() -> tuple[str, bool]:
    """The line outside torch that is running, and whether it speaks of a rotary embedding."""
    frame: Any = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename.startswith(_TORCH_ROOT) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    code, number = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, number).strip()
    is_rope = _ROPE.search(f"{code.co_qualname.rpartition('<locals>.')[2]} {text}") is not None
    return f"{os.path.basename(code.co_filename)}:{number} `{text}`", is_rope
