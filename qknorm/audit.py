"""Which dtypes reach attention, call by call; why; which backends would refuse them; and what a swap would fix.

Imports torch and our modules up to ``replace``; diffusers is imported when it is asked what its backends refuse.
"""

import contextlib
import copy
import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from .adapters import Adapter
from .autocast import emulate_cuda_autocast
from .capture import OPERANDS, AttentionCall, Trace, capture_attention, short_name
from .replace import _pattern, find_qk_norms, replace_qk_norms, table_of

__all__ = ["AuditReport", "audit", "audit_qk_dtypes", "backends_refusing", "capture_attention"]

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
        for name, dtype in zip(OPERANDS, dtypes, strict=True)
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
        stopped: the error that ended the forward after a leak, so that the calls that follow are missing.
        stopped_after_replacing: the same of the forward with the norms replaced.
    """

    model: str
    how: str
    calls: list[AttentionCall]
    calls_after_replacing: list[AttentionCall] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    norms_without_attention: list[str] = field(default_factory=list)
    depth: dict[str, tuple[int, int]] = field(default_factory=dict)
    stopped: str | None = None
    stopped_after_replacing: str | None = None

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
            "stopped_after_replacing": self.stopped_after_replacing,
            "calls": [call.as_dict() for call in self.calls],
            "leaks": len(self),
            "fixed_by_replacing": len(self.fixed_by_replacing),
            "left_after_replacing": [call.as_dict() for call in self.left_after_replacing],
            "refused_by": {", ".join(map(short_name, d)): backends_refusing(*d) for d in self._dtypes()},
            "skipped": self.skipped,
            "norms_without_attention": self.norms_without_attention,
        }

    def __str__(self) -> str:
        lines = [f"audit_qk_dtypes of {self.model}: {len(self.calls)} attention calls, {len(self)} leak", self.how]
        lines += [f"reduced depth: {name} {kept} of {total}" for name, (kept, total) in self.depth.items()]
        lines += _table(self.calls)
        lines += _ending(self.stopped)
        for dtypes in self._dtypes():
            if refusing := backends_refusing(*dtypes):
                lines.append(f"{', '.join(map(short_name, dtypes))} refused by: {' '.join(refusing)}")
        if self.leaks:
            left = self.left_after_replacing
            lines.append(f"replace_qk_norms fixes {len(self.fixed_by_replacing)}, and leaves {len(left)}")
            lines += [*_table(left), *_ending(self.stopped_after_replacing)]
        lines += [f"replace_qk_norms skips {name}: {reason}" for name, reason in _grouped(self.skipped)]
        if self.norms_without_attention:
            names = ", ".join(dict.fromkeys(map(_pattern, self.norms_without_attention)))
            lines.append(f"no attention call was seen after {names}: that attention is hand-written")
        return "\n".join(lines)

    def _dtypes(self) -> list[_Dtypes]:
        return list(dict.fromkeys(call.dtypes for call in self.calls))


def _ending(error: str | None) -> list[str]:
    return [f"the forward ended there, and what follows was not seen: {error}"] if error else []


def _grouped(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((_pattern(name), reason) for name, reason in reasons.items()))


def _table(calls: Sequence[AttentionCall]) -> list[str]:
    rows: dict[tuple[str, ...], int] = {}
    for call in calls:
        where = ", ".join(name.removeprefix(call.fqn + ".") for name in call.where)
        cause = ", ".join(call.causes) + (f": {where}" if where else "")
        row = (_pattern(call.fqn) or "(the model)", *map(short_name, call.dtypes), call.verdict, cause)
        rows[row] = rows.get(row, 0) + 1
    return table_of(("module", "count", *OPERANDS, "verdict", "cause"), rows)


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
        depth: how many blocks of each list of like blocks with q/k norms are to run, for a model too large to run.
        on_meta: run a copy without weights and data, under the CPU's policy; None: where all parameters are on meta.

    Raises:
        ValueError: ``depth`` is below 1.
        RuntimeError: on meta, the forward asks for the value of a tensor.
        Exception: whatever the forward raises, unless a leak came before it: then the report says so.
    """
    if depth is not None and depth < 1:
        raise ValueError(f"depth must be at least 1, but is {depth}")
    kwargs = dict(kwargs or {})
    parameters = list(model.parameters())
    if on_meta is None:
        on_meta = bool(parameters) and all(p.is_meta for p in parameters)
    fake = FakeTensorMode(allow_non_fake_inputs=True) if on_meta else contextlib.nullcontext()
    if on_meta:
        model, args, kwargs = _without_data(fake, (model, args, kwargs))
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)] + parameters
    # Weights may wait on the CPU, or on meta, for an offloading hook.
    accelerators = [x.device for x in tensors if x.device.type not in ("cpu", "meta")]
    device = accelerators[0] if accelerators and not on_meta else torch.device("cpu")
    due = autocast_dtype or _usual_dtype(parameters)

    def run() -> tuple[Trace, Exception | None]:
        trace, error = Trace(model, due=due), None
        given, named = tree_map(lambda x: x, (tuple(args), kwargs))  # containers of its own, to change as it likes
        devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices), fake, _autocast(device.type, autocast_dtype):
            with trace.watching():
                try:
                    model(*given, **named)
                except Exception as raised:
                    error = raised
        return trace, error

    with contextlib.nullcontext() if on_meta else _as_found(model):
        report = AuditReport(type(model).__name__, _how(device, on_meta, autocast_dtype), [])
        if depth is not None:
            report.depth = _reduce_depth(model, depth)
        trace, error = run()
        report.calls, report.norms_without_attention = trace.calls, list(trace.unattended)
        if error is not None:
            if not report.leaks:
                if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
                    raise RuntimeError(
                        f"{report.model} cannot run on the meta device: its forward asks for the values of a tensor "
                        f"({error.func}); audit it with weights, and with depth= where it is too large"
                    ) from error
                raise error
            report.stopped = _one_line(error)
        if report.leaks and any(isinstance(verdict, Adapter) for _, _, verdict in find_qk_norms(model)):
            skipped = replace_qk_norms(model).skipped
            trace, error = run()
            report.calls_after_replacing = trace.calls
            report.stopped_after_replacing = _one_line(error) if error else None
            causing = {name for call in report.left_after_replacing for name in call.where}
            report.skipped = {entry.fqn: str(entry.reason) for entry in skipped if entry.fqn in causing}
    return report


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def _how(device: torch.device, on_meta: bool, autocast_dtype: torch.dtype | None) -> str:
    where = "run on the meta device, with no data" if on_meta else f"run on {device}"
    if autocast_dtype is None:
        return f"{where}, without autocast"
    policy = (
        "CUDA's policy of torch 2.12 on, emulated"
        if device.type == "cpu"
        else f"the real policy of torch {torch.__version__}"
    )
    return f"{where}, autocast to {short_name(autocast_dtype)}: {policy}"


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
    buffers = [(b, b.clone()) for b in model.buffers() if not (b.is_meta or b.is_inference())]
    try:
        yield
    finally:
        for attributes, before, held in saved:
            for now, then in [(attributes, before), *held]:
                now.clear()
                now.extend(then) if isinstance(now, list) else now.update(then)
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):  # its version does not tell: BatchNorm changes buffers silently
                    buffer.copy_(value)


def _reduce_depth(model: nn.Module, depth: int) -> dict[str, tuple[int, int]]:
    """Cut every outermost list of like blocks that have q/k norms to its first ``depth``."""
    norms = [name for name, norm, _ in find_qk_norms(model) if norm is not None]
    cut: dict[str, tuple[int, int]] = {}
    for name, blocks in list(model.named_modules()):
        if not isinstance(blocks, nn.ModuleList) or any(name.startswith(outer + ".") for outer in cut):
            continue
        kinds = {(type(block), *(p.shape for p in block.parameters())) for block in blocks}
        if len(kinds) == 1 and len(blocks) > depth and any(norm.startswith(name + ".") for norm in norms):
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
                    memo[id(x)] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    return copy.deepcopy(held, memo)
