"""What ``qknorm demo`` shows: a real diffusers model that leaks float32 into attention, and the same model repaired.

Computes and judges, prints nothing: ``cli`` renders it. Imports our modules; diffusers when it runs.
"""

import contextlib
import copy
import importlib.util
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import audit, replace, tiny
from .autocast import emulate_cuda_autocast

MODELS = {
    "chroma": "ChromaTransformer2DModel",
    "flux": "FluxTransformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "krea2": "Krea2Transformer2DModel",
}
# The bounds that a bf16 model is held to: relative L2 distance from its float32 run, and against the stock model's.
FLOAT32_BOUND = 0.02
STOCK_SLACK = 1.1


@dataclass
class Step:
    """One thing that should hold. ``ok`` is None where this machine cannot run it, and ``detail`` says why."""

    name: str
    ok: bool | None
    detail: str


@dataclass
class Demo:
    """All that a run found; ``failed`` decides the exit status."""

    model: str
    device: str
    policy: str
    cause: str
    before: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[dict[str, str]] = field(default_factory=list)
    report: str = ""
    replaced: int = 0
    after: list[dict[str, Any]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def failed(self) -> list[Step]:
        """The steps that should hold and do not."""
        return [step for step in self.steps if step.ok is False]

    def as_dict(self) -> dict[str, Any]:
        """The run in types that JSON knows."""
        return {**asdict(self), "failed": [step.name for step in self.failed]}


def run(model_name: str = "chroma") -> Demo:
    """Build the model, show the leak and what refuses it, replace its q/k norms, and check what should hold then.

    Args:
        model_name: a key of ``MODELS``.

    Raises:
        ImportError: diffusers is not installed.
        KeyError: ``model_name`` is unknown.
    """
    name = MODELS[model_name]
    device = torch.device("cuda" if _gpu_has_policy() else "cpu")
    model, inputs = tiny.build(name, dtype=torch.bfloat16, device=device)
    if "guidance" in inputs:  # 1000 times it is a bf16 number: what a model loses before its norms is not our subject
        inputs["guidance"] = torch.full_like(inputs["guidance"], 4.0)
    exact = _float32_output(model, inputs)
    demo = Demo(
        model=name,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        policy="the real one" if device.type == "cuda" else "that of torch 2.12 and later, emulated on the CPU",
        cause="",
    )

    stock = audit.audit(model, (), inputs)
    demo.before = [call.as_dict() for call in stock.calls]
    causes = sorted({cause for call in stock.leaks for cause in call.causes})
    demo.cause = ", ".join(causes) or "none: this model's own norms hand back the dtype of their input"
    stock_calls, output = _captured(model, inputs, device)
    demo.refusals = _refusals(stock_calls)
    stock_distance = _distance(output, exact)
    stock_bytes = _saved_bytes(model, inputs, device)
    if stock.leaks:
        leak = "leaks as it comes: CUDA autocast runs its norms in float32"
        demo.steps.append(Step("the stock model", causes == ["autocast policy"], leak))
        demo.steps.append(Step("the flash backend's constraints", bool(demo.refusals), "refuse what they are handed"))
    else:
        demo.steps.append(Step("the stock model", not demo.refusals, "leaks nothing; it is replaced for memory"))

    report = replace.replace_qk_norms(model)
    demo.report, demo.replaced = str(report), len(report)
    demo.steps.append(Step("replace_qk_norms", bool(report.replaced), f"replaced {len(report)} norms"))

    calls, output = _captured(model, inputs, device)
    demo.after = [call.as_dict() for call in calls]
    uniform = all(set(call.dtypes) == {torch.bfloat16} for call in calls)
    demo.steps.append(Step("q, k and v", uniform, "are bfloat16 at every attention call"))
    refusals = _refusals(calls)
    detail = refusals[0]["error"] if refusals else "let every attention call pass"
    demo.steps.append(Step("the flash backend's constraints", not refusals, detail))

    demo.steps.append(_trains("forward and backward, eager", model, inputs, device))
    demo.steps.append(_compiled(model, inputs, device))
    if device.type == "cuda":
        demo.steps.append(_flash_attention(model, inputs, device))

    distance = _distance(output, exact)
    near = distance <= FLOAT32_BOUND and distance <= STOCK_SLACK * stock_distance
    detail = f"{distance:.2%} from a float32 run (stock: {stock_distance:.2%}; bound: {FLOAT32_BOUND:.0%})"
    demo.steps.append(Step("output, native attention", near, detail))
    saved = _saved_bytes(model, inputs, device)
    detail = f"{saved:,} (stock: {stock_bytes:,}), {1 - saved / stock_bytes:.0%} fewer"
    demo.steps.append(Step("bytes saved for backward", saved < stock_bytes, detail))
    return demo


def _gpu_has_policy() -> bool:
    """Whether there is a GPU whose own autocast shows the cause: ``rms_norm`` is on its list from torch 2.12 on."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return torch.cuda.is_available() and version >= (2, 12)


@contextlib.contextmanager
def _autocast(device: torch.device) -> Any:
    policy = emulate_cuda_autocast() if device.type == "cpu" else contextlib.nullcontext()
    with policy, torch.autocast(device.type, dtype=torch.bfloat16):
        yield


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output.sample


def _float32_output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    wide = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        return _first(copy.deepcopy(model).float()(**wide))


def _distance(output: Tensor, exact: Tensor) -> float:
    return ((output - exact).norm() / exact.norm()).item()


def _captured(
    model: nn.Module, inputs: dict[str, Any], device: torch.device
) -> tuple[list[audit.AttentionCall], Tensor]:
    """The attention calls of a forward under autocast, and its output in float32."""
    with torch.no_grad(), _autocast(device), audit.capture_attention(model, keep_tensors=True) as calls:
        output = _first(model(**inputs)).float()
    return calls, output


def _refusals(calls: list[audit.AttentionCall]) -> list[dict[str, str]]:
    """What the constraints that diffusers registers for its flash backend raise on captured q, k and v."""
    from diffusers.models import attention_dispatch

    flash = attention_dispatch.AttentionBackendName.FLASH
    refusals = []
    for call in calls:
        operands = {name: getattr(call, name).tensor for name in ("query", "key", "value")}
        for check in attention_dispatch._AttentionBackendRegistry._constraints[flash]:
            try:
                check(**operands)
            except ValueError as error:
                message = f"{type(error).__name__}: {error}"
                refusals.append({"module": call.fqn, "check": check.__name__, "error": message})
    return refusals


def _step(model: nn.Module, inputs: dict[str, Any], device: torch.device) -> Tensor:
    with _autocast(device):
        loss = _first(model(**inputs)).float().square().mean()
    loss.backward()
    return loss.detach()


def _trains(name: str, model: nn.Module, inputs: dict[str, Any], device: torch.device) -> Step:
    model.zero_grad(set_to_none=True)
    loss = _step(model, inputs, device)
    norms = [module for _, module, _ in replace.find_qk_norms(model) if module is not None]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    trained = all(p.grad is not None and p.grad.abs().sum() > 0 for norm in norms for p in norm.parameters())
    finite = math.isfinite(loss) and all(g.isfinite().all() for g in gradients)
    dtypes = all(p.grad.dtype == p.dtype for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    faults = [
        fault
        for fault, holds in (
            ("a gradient or the loss is not finite", finite),
            ("a q/k norm got no gradient", trained),
            ("a gradient is not in its parameter's dtype", dtypes),
        )
        if not holds
    ]
    found = "; ".join(faults) or "every gradient finite and in its parameter's dtype"
    return Step(name, not faults, f"loss {loss.item():.4f}, {found}")


def _compiled(model: nn.Module, inputs: dict[str, Any], device: torch.device) -> Step:
    name = "forward and backward, transformer_blocks under torch.compile(fullgraph=True)"
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return Step(name, None, "not run: no C++ compiler on this machine (g++ or clang++, or set CXX)")
    torch._dynamo.reset()
    regional = copy.deepcopy(model)
    # The blocks of one kind, in place: a C++ compiler takes minutes over a whole model, and shows no more by it.
    for block in regional.transformer_blocks:  # type: ignore[union-attr]
        block.compile(fullgraph=True)
    return _trains(name, regional, inputs, device)


def _flash_attention(model: nn.Module, inputs: dict[str, Any], device: torch.device) -> Step:
    name = "forward and backward, flash-attn"
    if importlib.util.find_spec("flash_attn") is None:
        return Step(name, None, 'not run: flash-attn is not installed (pip install "qknorm[flash-attn]")')
    model.set_attention_backend("flash")  # type: ignore[operator]
    try:
        return _trains(name, model, inputs, device)
    finally:
        model.set_attention_backend("native")  # type: ignore[operator]


def _saved_bytes(model: nn.Module, inputs: dict[str, Any], device: torch.device) -> int:
    """Bytes that a forward keeps for its backward, each storage once, parameters and inputs left out."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *inputs.values()) if isinstance(t, Tensor)}
    storages: dict[int, int] = {}
    kept = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(t)  # alive, so that no later storage takes its address
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), _autocast(device):
        _first(model(**inputs))
    return sum(storages.values())
