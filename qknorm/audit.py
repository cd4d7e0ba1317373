"""Which dtypes reach attention, call by call; why; which backends would refuse them; and what a swap would fix.

Imports torch and our modules up to ``replace``; diffusers is looked up when an audit ends, never for a capture.
"""

import contextlib
import copy
import functools
import importlib
import linecache
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from .adapters import Adapter
from .autocast import emulate_cuda_autocast
from .replace import _base_name, _pattern, find_qk_norms, replace_qk_norms

_OPERANDS = ("query", "key", "value")


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
        for name in _OPERANDS:
            x = getattr(self, name)
            plain[name] = {"dtype": _short(x.dtype), "shape": x.shape, "stride": x.stride, "device": str(x.device)}
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
    trace = _Trace(model, keep_tensors=keep_tensors)
    with trace.watching():
        yield trace.calls


@dataclass(eq=False)
class _Event:
    """Something that left a dtype other than the one due: a q/k norm (also where it did not), a module, a function."""

    kind: str
    name: str
    dtype: torch.dtype
    source: torch.dtype | None = None  # a norm's: the dtype that it was given
    role: str = ""
    cause: str = ""


class _Trace(TorchFunctionMode):
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
            leave = register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
            stack.callback(leave.remove)
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
        backends, constraints, checked = registry._backends, registry._constraints, registry._checks_enabled
        registry._backends = {name: self._recording(name, run, registry) for name, run in backends.items()}
        registry._constraints = {
            name: [functools.partial(self._record, "dispatch_attention_fn", name.value, ()), *checks]
            for name, checks in constraints.items()
        }
        if self._due is not None:  # an audit says itself what they refuse, and wants to see the calls that follow
            registry._checks_enabled = False
        try:
            yield
        finally:
            registry._backends, registry._constraints, registry._checks_enabled = backends, constraints, checked

    def _recording(self, name: Any, run: Callable[..., Any], registry: Any) -> Callable[..., Any]:
        @functools.wraps(run)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not registry._checks_enabled:  # otherwise the first check has recorded it
                self._record("dispatch_attention_fn", name.value, args, **kwargs)
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
        if func is torch.nn.functional.scaled_dot_product_attention:
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

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._stack or self._stack[-1][0] != id(module):
            return
        y = next((x for x in tree_leaves(output) if isinstance(x, Tensor)), None)
        given = [x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
        name, role = self._stack[-1][1], self._roles.get(id(module))
        if self._due and given and y is not None:
            if role:
                cause = self._cause_in_norm(module, args, kwargs, given[0], y) if y.dtype != given[0] else ""
                self._log.append(_Event("norm", name, y.dtype, given[0], role, cause))
                self.unattended[name] = None
            elif self._due in given and y.dtype not in given and _is_odd(y.dtype, self._due):
                self._log.append(_Event("module", name, y.dtype))
        self._stack.pop()

    def _cause_in_norm(self, norm: nn.Module, args: Any, kwargs: Any, given: torch.dtype, y: Tensor) -> str:
        """Why a norm changed the dtype: it is run again on the same input, without autocast."""
        if torch.is_autocast_enabled(y.device.type):
            try:
                with torch.autocast(y.device.type, enabled=False):
                    again = norm.forward(*(x.clone() if isinstance(x, Tensor) else x for x in args), **kwargs)
            except RuntimeError:  # only autocast lets it take these dtypes at all
                return "autocast policy"
            if again.dtype == given:
                return "autocast policy"
        return "weight dtype" if any(p.dtype == y.dtype for p in norm.parameters()) else "norm"

    def _record(self, entry: str, backend: str | None, args: Sequence[Any], **kwargs: Any) -> None:
        tensors: list[Any] = [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(_OPERANDS)]
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


_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep


def _source_line() -> tuple[str, bool]:
    """The line outside torch that is running, and whether it speaks of a rotary embedding."""
    frame: Any = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename.startswith(_TORCH_ROOT) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    code, number = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, number).strip()
    is_rope = re.search(r"rot|rope|freqs|\bcos|\bsin", f"{code.co_qualname} {text}", re.IGNORECASE) is not None
    return f"{os.path.basename(code.co_filename)}:{number} `{text}`", is_rope


# What diffusers' constraints ask of dtypes, for where diffusers is not installed: that query, key and value agree, ...
BACKENDS = {
    "equal": "flex native _native_efficient _native_math _native_xla _sage_qk_int8_pv_fp8_cuda"
    " _sage_qk_int8_pv_fp8_cuda_sm90 _sage_qk_int8_pv_fp16_cuda _sage_qk_int8_pv_fp16_triton xformers".split(),
    # ... on bf16 or fp16,
    "half": "flash flash_hub flash_varlen flash_varlen_hub flash_4_hub _flash_3 _flash_varlen_3 _flash_3_hub"
    " _flash_3_varlen_hub _native_cudnn _native_flash _native_npu sage sage_hub sage_blackwell_hub"
    " sage_varlen".split(),
    # ... on bf16.
    "bfloat16": ["aiter_fa2_hub"],
}
_Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]


def backends_refusing(query: torch.dtype, key: torch.dtype, value: torch.dtype) -> list[str]:
    """The attention backends whose registered constraints in diffusers refuse these dtypes, on a device that they take.

    diffusers enforces the constraints under ``DIFFUSERS_ATTN_CHECKS=1`` alone; without it most of these raise anyway,
    in a kernel, while the ``native`` ones accept and cast under autocast. Without diffusers a table of ours answers.
    """
    dtypes = query, key, value
    try:
        registry = importlib.import_module("diffusers.models.attention_dispatch")._AttentionBackendRegistry
    except (ImportError, AttributeError):
        equal, half = len({*dtypes}) == 1, query in (torch.bfloat16, torch.float16)
        accepted = {"equal": equal, "half": equal and half, "bfloat16": equal and query == torch.bfloat16}
        return [name for need, names in BACKENDS.items() if not accepted[need] for name in names]
    bf16 = (torch.bfloat16,) * 3  # which all of them take: a refusal of these is about something else, the device say
    return [
        name.value
        for name, checks in registry._constraints.items()
        if any(_refusal(check, dtypes) not in (None, _refusal(check, bf16)) for check in checks)
    ]


def _refusal(check: Callable[..., None], dtypes: _Dtypes) -> str | None:
    operands = {
        name: torch.empty(1, 16, 2, 64, dtype=dtype, device="meta")
        for name, dtype in zip(_OPERANDS, dtypes, strict=True)
    }
    try:
        check(**operands, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)
    except Exception as error:
        return str(error)
    return None


@dataclass
class AuditReport:
    """What an audit found. ``len()`` counts ``leaks``, and ``str()`` is a table, alike calls in one row.

    ``bool()`` is always true: ask ``report.leaks``.

    Attributes:
        model: the class of the model.
        how: where it ran and under which autocast policy.
        calls: every attention call of the forward, in order.
        calls_after_replacing: the same with ``replace_qk_norms`` applied; empty where nothing leaked.
        skipped: q/k norms that ``replace_qk_norms`` must leave alone and that a leak comes from: name, and the reason.
        norms_without_attention: q/k norms that ran with no attention call to follow: that attention is hand-written.
        depth: where the depth was reduced, each list of blocks, how many of them ran and how many there are.
        stopped: the error by which a leak ended the forward, so that the calls after it are missing.
    """

    model: str
    how: str
    calls: list[AttentionCall]
    calls_after_replacing: list[AttentionCall] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    norms_without_attention: list[str] = field(default_factory=list)
    depth: dict[str, tuple[int, int]] = field(default_factory=dict)
    stopped: str | None = None

    @property
    def leaks(self) -> list[AttentionCall]:
        """The calls with a verdict that is not ok."""
        return [call for call in self.calls if call.verdict != "ok"]

    @property
    def fixed_by_replacing(self) -> list[AttentionCall]:
        """The leaks, as found, that are none once ``replace_qk_norms`` has run."""
        pairs = zip(self.calls, self.calls_after_replacing, strict=False)
        return [call for call, after in pairs if call.verdict != "ok" and after.verdict == "ok"]

    @property
    def left_after_replacing(self) -> list[AttentionCall]:
        """The leaks that ``replace_qk_norms`` leaves, with the causes that then remain."""
        unseen = self.calls[len(self.calls_after_replacing) :]
        return [call for call in self.calls_after_replacing + unseen if call.verdict != "ok"]

    def __len__(self) -> int:
        return len(self.leaks)

    def __bool__(self) -> bool:
        return True

    def as_dict(self) -> dict[str, Any]:
        """The report in types that JSON knows."""
        return {
            "model": self.model,
            "how": self.how,
            "depth": self.depth,
            "stopped": self.stopped,
            "calls": [call.as_dict() for call in self.calls],
            "leaks": len(self),
            "fixed_by_replacing": len(self.fixed_by_replacing),
            "left_after_replacing": [call.as_dict() for call in self.left_after_replacing],
            "refused_by": {", ".join(map(_short, d)): backends_refusing(*d) for d in self._dtypes()},
            "skipped": self.skipped,
            "norms_without_attention": self.norms_without_attention,
        }

    def __str__(self) -> str:
        lines = [f"audit_qk_dtypes of {self.model}: {len(self.calls)} attention calls, {len(self)} leak", self.how]
        lines += [f"reduced depth: {name} {kept} of {total}" for name, (kept, total) in self.depth.items()]
        lines += _table(self.calls)
        if self.stopped:
            lines.append(f"the leak stopped the forward, what follows it was not seen: {self.stopped}")
        for dtypes in self._dtypes():
            if refusing := backends_refusing(*dtypes):
                lines.append(f"refused by, for {', '.join(map(_short, dtypes))}: {' '.join(refusing)}")
        if self.leaks:
            left = self.left_after_replacing
            lines.append(f"replace_qk_norms fixes {len(self.fixed_by_replacing)}, and leaves {len(left)}")
            lines += _table(left) if left else []
        lines += [f"replace_qk_norms skips {name}: {reason}" for name, reason in _grouped(self.skipped)]
        if self.norms_without_attention:
            names = ", ".join(dict.fromkeys(map(_pattern, self.norms_without_attention)))
            lines.append(f"no attention call was seen after {names}: that attention is hand-written")
        return "\n".join(lines)

    def _dtypes(self) -> list[_Dtypes]:
        return list(dict.fromkeys(call.dtypes for call in self.calls))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _grouped(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((_pattern(name), reason) for name, reason in reasons.items()))


def _table(calls: Sequence[AttentionCall]) -> list[str]:
    rows: dict[tuple[str, ...], int] = {}
    for call in calls:
        where = ", ".join(name.removeprefix(call.fqn + ".") for name in call.where)
        cause = ", ".join(call.causes) + (f": {where}" if where else "")
        row = (_pattern(call.fqn) or "(the model)", *map(_short, call.dtypes), call.verdict, cause)
        rows[row] = rows.get(row, 0) + 1
    if not rows:
        return []
    table: list[tuple[str, ...]] = [("module", "count", *_OPERANDS, "verdict", "cause")]
    table += [(row[0], str(count), *row[1:]) for row, count in rows.items()]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def audit_qk_dtypes(
    model: nn.Module, *args: Any, autocast_dtype: torch.dtype | None = torch.bfloat16, **kwargs: Any
) -> AuditReport:
    """Run ``model(*args, **kwargs)`` and report which dtypes reach each attention call, why, and what a swap would fix.

    ``audit`` with its defaults: it says how, and has the options.
    """
    return audit(model, args, kwargs, autocast_dtype=autocast_dtype)


def audit(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    autocast_dtype: torch.dtype | None = torch.bfloat16,
    depth: int | None = None,
    on_meta: bool | None = None,
) -> AuditReport:
    """Audit the forward ``model(*args, **kwargs)``: once as it is and, where that leaks, with its q/k norms replaced.

    It runs under ``no_grad`` where the inputs are, in the mode that the model is in: on a GPU under the real autocast,
    on the CPU under ``emulate_cuda_autocast``. The model is left as it was found, the random state too.

    Args:
        model: any module.
        args, kwargs: the inputs of its forward.
        autocast_dtype: of the autocast region around the forward; None for none.
        depth: how many blocks of each list of blocks with q/k norms are to run, for a model too large to run in full.
        on_meta: run a copy with no data and no weights, on the CPU's policy; None: where all parameters are on meta.

    Raises:
        Exception: whatever the forward raises, unless a leak came before it: then the report says so.
    """
    kwargs = dict(kwargs or {})
    parameters = list(model.parameters())
    if on_meta is None:
        on_meta = bool(parameters) and all(p.is_meta for p in parameters)
    fake = FakeTensorMode(allow_non_fake_inputs=True) if on_meta else contextlib.nullcontext()
    if on_meta:
        model, args, kwargs = _without_data(fake, (model, args, kwargs))
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)] + parameters
    device = torch.device("cpu") if on_meta or not tensors else tensors[0].device
    due = autocast_dtype or _usual_dtype(parameters)

    def run() -> tuple[_Trace, Exception | None]:
        trace, error = _Trace(model, due=due), None
        given, named = tree_map(lambda x: x, (tuple(args), kwargs))  # containers of its own, to change as it likes
        devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices), fake, _autocast(device.type, autocast_dtype):
            with trace.watching():
                try:
                    model(*given, **named)
                except Exception as raised:
                    error = raised
        return trace, error

    with _as_found(model):
        report = AuditReport(type(model).__name__, _how(device, on_meta, autocast_dtype), [])
        if depth is not None:
            report.depth = _reduce_depth(model, depth)
        trace, error = run()
        report.calls, report.norms_without_attention = trace.calls, list(trace.unattended)
        if error is not None:
            if not report.leaks:
                raise error
            report.stopped = f"{type(error).__name__}: {error}"
        if report.leaks and any(isinstance(verdict, Adapter) for _, _, verdict in find_qk_norms(model)):
            skipped = replace_qk_norms(model).skipped
            report.calls_after_replacing = run()[0].calls
            causing = {name for call in report.left_after_replacing for name in call.where}
            report.skipped = {entry.fqn: str(entry.reason) for entry in skipped if entry.fqn in causing}
    return report


def _how(device: torch.device, on_meta: bool, autocast_dtype: torch.dtype | None) -> str:
    where = "run on the meta device, with no data" if on_meta else f"run on {device}"
    if autocast_dtype is None:
        return f"{where}, without autocast"
    policy = "CUDA's policy, emulated" if device.type == "cpu" else f"the real policy of torch {torch.__version__}"
    return f"{where}, autocast to {_short(autocast_dtype)}: {policy}"


@contextlib.contextmanager
def _autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if dtype is not None and device == "cpu":
            stack.enter_context(emulate_cuda_autocast())
        stack.enter_context(torch.autocast(device, enabled=dtype is not None))
        if dtype is not None:  # torch.autocast itself refuses some, float32 on the CPU
            torch.set_autocast_dtype(device, dtype)
        yield


def _usual_dtype(parameters: Sequence[Tensor]) -> torch.dtype:
    """The dtype of most weights; one of 8 bits is for storage, and attention is not due in it."""
    sizes: dict[torch.dtype, int] = {}
    for p in parameters:
        if p.is_floating_point() and p.dtype.itemsize > 1:
            sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.get_default_dtype())


@contextlib.contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Put back, at the end, every attribute of every module, what is in its dicts, lists and sets, and its buffers."""
    saved = []
    for module in model.modules():
        held = [(x, copy.copy(x)) for x in vars(module).values() if type(x) in (dict, OrderedDict, list, set)]
        saved.append((vars(module), dict(vars(module)), held))
    buffers = [(b, b._version, b.clone()) for b in model.buffers() if not b.is_inference()]
    try:
        yield
    finally:
        for attributes, before, held in saved:
            for now, then in [(attributes, before), *held]:
                now.clear()
                now.extend(then) if isinstance(now, list) else now.update(then)
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


def _reduce_depth(model: nn.Module, depth: int) -> dict[str, tuple[int, int]]:
    """Cut every outermost list of like blocks that have q/k norms to its first ``depth``."""
    norms = [name for name, norm, _ in find_qk_norms(model) if norm is not None]
    cut: dict[str, tuple[int, int]] = {}
    for name, blocks in list(model.named_modules()):
        if not isinstance(blocks, nn.ModuleList) or any(name.startswith(outer + ".") for outer in cut):
            continue
        alike = len({type(block) for block in blocks}) == 1
        if alike and len(blocks) > depth and any(norm.startswith(name + ".") for norm in norms):
            cut[name] = (depth, len(blocks))
            del blocks[depth:]
    return cut


def _without_data(mode: Any, held: Any) -> Any:
    """A deep copy in which every tensor is a fake one on the CPU, of the same layout; weights are not copied."""
    memo: dict[int, Any] = {}
    model, args, kwargs = held
    for holder in [(args, kwargs), *map(vars, model.modules())]:
        for x in tree_leaves(holder):
            if isinstance(x, Tensor) and id(x) not in memo:
                with mode:
                    fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
                memo[id(x)] = nn.Parameter(fake, x.requires_grad) if isinstance(x, nn.Parameter) else fake
    return copy.deepcopy(held, memo)
