"""fuse_qk_norm_rope: whole models against the stock model, and every reason for which an attention runs as it did."""

import copy
import io
import pickle
import subprocess
import sys
from fnmatch import fnmatchcase

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook
from diffusers.hooks.layerwise_casting import apply_layerwise_casting_hook
from diffusers.models import attention_dispatch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor, Flux2KVParallelSelfAttnProcessor
from norms import assert_same_bits, flux
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from qknorm import (
    QKRMSNorm,
    fuse_qk_norm_rope,
    ops,
    processors,
    replace_qk_norms,
    restore_qk_norms,
    tiny,
    unfuse_qk_norm_rope,
)
from qknorm.autocast import emulate_cuda_autocast
from qknorm.capture import capture_attention
from qknorm.processors.base import FusedProcessor

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Every family, with the number of its attentions that a call fuses.
FAMILIES = {
    "FluxTransformer2DModel": 2,
    "ChromaTransformer2DModel": 2,
    "FluxControlNetModel": 2,
    "QwenImageControlNetModel": 2,
    "Flux2Transformer2DModel": 2,
    "Flux3Transformer2DModel": 4,
    "Krea2Transformer2DModel": 3,
    "QwenImageTransformer2DModel": 2,
    "ZImageTransformer2DModel": 3,
    "LTXVideoTransformer3DModel": 2,
    "Ideogram4Transformer2DModel": 2,
}
# Its stock RoPE multiplies and adds in the dtype of the hidden states, ours in float32.
COARSE_ROPE = "Ideogram4Transformer2DModel"


def attentions(model):
    return [m for m in model.modules() if isinstance(getattr(m, "processor", None), FusedProcessor)]


def tensors(result):
    """The tensors of a model's output, whatever it is."""
    if isinstance(result, torch.Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, list | tuple) else []
    return [t for part in parts for t in tensors(part)]


def run(model, inputs, cast=None):
    """Outputs, gradients by name and attention calls of one step."""
    model.zero_grad()
    with emulate_cuda_autocast(policy="2.12"):
        with torch.autocast("cpu", cast, cast is not None), capture_attention(keep_tensors=True) as calls:
            outputs = tensors(model(**inputs))
        sum(t.float().square().mean() for t in outputs).backward()
    return outputs, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, calls


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def distance(ours, theirs):
    """Relative L2 distance of two lists of tensors, each taken as one vector."""

    def vector(side):
        return torch.cat([whole(t.detach()).double().flatten() for t in side])

    a, b = vector(ours), vector(theirs)
    return ((a - b).norm() / b.norm()).item()


def in_float32(name, model, inputs):
    """The same model and inputs, run in float32."""
    wide, wide_inputs = tiny.build(name, dtype=FP32)
    wide.load_state_dict(model.state_dict())
    taken = {k: v.float() if isinstance(v, torch.Tensor) and v.dtype is BF16 else v for k, v in inputs.items()}
    return run(wide, {**wide_inputs, **{k: v for k, v in taken.items() if isinstance(v, torch.Tensor)}})


# Whole models


@pytest.mark.parametrize("replaced", [False, True], ids=["stock norms", "replaced norms"])
@pytest.mark.parametrize(
    ("dtype", "cast"),
    [(FP32, None), (FP32, BF16), (FP32, FP16), (BF16, None), (BF16, BF16)],
    ids=["float32", "float32 in autocast", "float32 in fp16 autocast", "bf16", "bf16 in autocast"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_q_k_and_v_at_attention_are_the_stock_models_bit_for_bit(name, dtype, cast, replaced):
    model, inputs = tiny.build(name, dtype=dtype)
    _, _, stock = run(model, inputs, cast)
    if replaced:
        replace_qk_norms(model)
    assert len(fuse_qk_norm_rope(model)) == FAMILIES[name]
    _, _, fused = run(model, inputs, cast)
    assert len(fused) == len(stock) > 0
    exact = name != COARSE_ROPE or (dtype is FP32 and cast is None)
    for ours, theirs in zip(fused, stock, strict=True):
        for mine, other in ((ours.query, theirs.query), (ours.key, theirs.key)):
            assert mine.tensor.stride(-1) == 1
            if exact:
                assert_same_bits(mine.tensor, other.tensor.to(mine.dtype))
            else:
                assert distance([mine.tensor], [other.tensor]) < 2e-2
    crossing = name == "LTXVideoTransformer3DModel" and not replaced and cast is not None  # no RoPE: it stays as it was
    leaks = {call.dtypes for call in fused if len(set(call.dtypes)) > 1}
    assert leaks == ({(FP32, FP32, cast)} if crossing else set())


@pytest.mark.parametrize("cast", [None, BF16], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_of_a_bf16_model_are_as_near_to_float32_as_the_stock_models(name, cast):
    model, inputs = tiny.build(name, dtype=BF16)
    stock_out, stock_grads, _ = run(model, inputs, cast)
    true_out, true_grads, _ = in_float32(name, model, inputs)
    fuse_qk_norm_rope(model)
    out, grads, _ = run(model, inputs, cast)
    assert grads.keys() == stock_grads.keys() == true_grads.keys()
    assert distance(out, true_out) <= min(0.02, 1.1 * distance(stock_out, true_out))
    ours, stocks, trues = (list(g.values()) for g in (grads, stock_grads, true_grads))
    assert distance(ours, trues) <= 1.1 * distance(stocks, trues)
    norms = [n for n in grads if "norm_q" in n or "norm_k" in n or "norm_added" in n]
    assert {grads[n].dtype for n in norms} == {BF16}
    ours, stocks, trues = ([g[n] for n in norms] for g in (grads, stock_grads, true_grads))
    assert distance(ours, trues) <= 1.25 * distance(stocks, trues)  # of few values, so chance has its part


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_a_float32_model_are_the_stock_models(name):
    model, inputs = tiny.build(name, dtype=FP32)
    _, stock, _ = run(model, inputs)
    fuse_qk_norm_rope(model)
    _, grads, _ = run(model, inputs)
    assert grads.keys() == stock.keys()
    for n, grad in grads.items():
        scale = stock[n].abs().max().item()
        torch.testing.assert_close(grad, stock[n], rtol=1e-4, atol=2e-6 * scale + 1e-12)


def test_float32_weights_under_autocast_leak_no_more_where_rope_was_the_cause():
    model, inputs = tiny.build(COARSE_ROPE, dtype=FP32)
    replace_qk_norms(model)
    _, _, calls = run(model, inputs, BF16)
    assert {call.dtypes for call in calls} == {(FP32, FP32, BF16)}
    fuse_qk_norm_rope(model)
    _, _, calls = run(model, inputs, BF16)
    assert {call.dtypes for call in calls} == {(BF16, BF16, BF16)}


@pytest.mark.parametrize("name", [n for n in FAMILIES if "ControlNet" not in n])
def test_a_fused_model_compiles_as_one_graph_and_gives_the_same_bits(name):
    torch._dynamo.reset()
    model, inputs = tiny.build(name, dtype=BF16)
    fuse_qk_norm_rope(model)
    expected, expected_grads, _ = run(model, inputs)
    model.zero_grad()
    outputs = tensors(torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs))
    sum(t.float().square().mean() for t in outputs).backward()
    for ours, eager in zip(outputs, expected, strict=True):
        assert_same_bits(ours, eager)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == expected_grads.keys()
    assert distance(grads.values(), expected_grads.values()) < 1e-2


def test_a_compiled_model_that_is_fused_afterwards_runs_fused():
    torch._dynamo.reset()
    model, inputs = flux(BF16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = compiled(**inputs).sample
    assert len(fuse_qk_norm_rope(compiled)) == 2
    nodes = []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=lambda graph, _: nodes.extend(graph.graph.nodes) or graph, fullgraph=True)
    assert_same_bits(compiled(**inputs).sample, expected)
    assert not any("apply_rotary_emb" in str(n.meta.get("stack_trace")) for n in nodes)
    assert any("norm_and_rotate" in str(n.meta.get("stack_trace")) for n in nodes)


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel"])
@pytest.mark.parametrize("cast", [None, BF16], ids=["plain", "autocast"])
def test_gradient_checkpointing_gives_the_same_bits(name, cast):
    model, inputs = tiny.build(name, dtype=BF16)
    model.train()
    fuse_qk_norm_rope(model)
    out, grads, _ = run(model, inputs, cast)
    out, grads = out[0].clone(), {n: g.clone() for n, g in grads.items()}
    model.enable_gradient_checkpointing()
    again, grads_again, _ = run(model, inputs, cast)
    assert_same_bits(again[0], out)
    assert grads_again.keys() == grads.keys()
    for n, grad in grads_again.items():
        assert_same_bits(grad, grads[n])


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("FluxTransformer2DModel", ["to_q", "to_k", "to_v", "add_q_proj", "to_out.0"]),
        ("Flux2Transformer2DModel", ["to_q", "add_k_proj", "to_qkv_mlp_proj", "to_add_out"]),
        ("Krea2Transformer2DModel", ["to_q", "to_gate"]),
        ("LTXVideoTransformer3DModel", ["to_q", "to_k"]),
    ],
)
def test_lora_on_projections_trains_as_in_the_stock_model(name, targets):
    stock, inputs = tiny.build(name, dtype=FP32)
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False)
    torch.manual_seed(0)
    stock.add_adapter(config)
    out, grads, _ = run(stock, inputs)
    assert fuse_qk_norm_rope(stock).replaced
    fused_out, fused_grads, _ = run(stock, inputs)
    assert_same_bits(fused_out[0], out[0])
    assert fused_grads.keys() == grads.keys()
    assert all("lora" in n for n in grads)
    assert distance(fused_grads.values(), grads.values()) < 1e-5


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    "name", ["FluxTransformer2DModel", "ChromaTransformer2DModel", "Flux2Transformer2DModel", "Flux3Transformer2DModel"]
)
def test_fused_projections_are_used(name, order):
    model, inputs = tiny.build(name, dtype=BF16)
    with torch.no_grad():
        if order == "before":
            fuse_qk_norm_rope(model)
        for module in model.modules():
            if hasattr(module, "fuse_projections"):
                module.fuse_projections()
                if hasattr(module, "to_qkv"):
                    module.to_qkv.weight.mul_(1.5)  # so that the projections that it came from would be wrong
        if order == "after":
            fuse_qk_norm_rope(model)
        assert any(hasattr(attn, "to_qkv") for attn in attentions(model))
        ours = tensors(model(**inputs))
        unfuse_qk_norm_rope(model)
        for mine, stock in zip(ours, tensors(model(**inputs)), strict=True):
            assert_same_bits(mine, stock)


# What goes to attention beside q, k and v


@pytest.fixture
def dispatched(monkeypatch):
    """The keyword arguments of every call of diffusers' attention, however it was imported."""
    calls = []
    real = attention_dispatch.dispatch_attention_fn

    def dispatch(query, key, value, **options):
        calls.append(options)
        return real(query, key, value, **{**options, "parallel_config": None})

    for module in [m for n, m in sys.modules.items() if n.startswith("diffusers.")]:
        if module.__dict__.get("dispatch_attention_fn") is real:
            monkeypatch.setattr(module, "dispatch_attention_fn", dispatch)
    return calls


@pytest.fixture
def backend_restored():
    """``set_attention_backend`` sets it for the whole process too."""
    with attention_dispatch.attention_backend():
        yield


@pytest.mark.parametrize("name", FAMILIES)
def test_mask_backend_and_parallel_config_reach_attention_as_in_the_stock_model(name, dispatched, backend_restored):
    model, inputs = tiny.build(name, dtype=FP32)
    model.set_attention_backend("_native_math")
    config = object()
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor._parallel_config = config
    model(**inputs)
    stock = [*dispatched]
    dispatched.clear()
    fuse_qk_norm_rope(model)
    model(**inputs)
    assert len(dispatched) == len(stock) > 0
    for ours, theirs in zip(dispatched, stock, strict=True):
        assert ours["parallel_config"] is theirs["parallel_config"] is config
        assert ours["backend"] == theirs["backend"] == "_native_math"
        if theirs["attn_mask"] is None:
            assert ours["attn_mask"] is None
        else:
            assert_same_bits(ours["attn_mask"], theirs["attn_mask"])


@pytest.mark.parametrize(
    ("name", "keyword", "build"),
    [
        ("FluxTransformer2DModel", "attention_mask", lambda b, s: torch.rand(b, 1, s, s) > 0.3),
        ("Flux2Transformer2DModel", "attention_mask", lambda b, s: torch.rand(b, 1, 1, s) > 0.3),
        ("Flux3Transformer2DModel", "attention_mask", lambda b, s: torch.rand(b, 1, 1, s) > 0.3),
        ("Krea2Transformer2DModel", "attention_mask", lambda b, s: torch.rand(b, 1, 1, s) > 0.3),
        ("ZImageTransformer2DModel", "attention_mask", lambda b, s: torch.rand(b, s) > 0.3),
        ("LTXVideoTransformer3DModel", "attention_mask", lambda b, s: torch.zeros(b, 1, s)),
        ("QwenImageTransformer2DModel", "encoder_hidden_states_mask", lambda b, s: torch.rand(b, s) > 0.3),
    ],
)
def test_a_mask_is_given_to_attention_in_the_stock_shape(name, keyword, build, dispatched):
    model, inputs = tiny.build(name, dtype=FP32)
    attn = next(m for m in model.modules() if hasattr(m, "processor"))
    given = []
    handle = attn.register_forward_pre_hook(lambda *call: given.append(call[1:]), with_kwargs=True)
    model(**inputs)
    handle.remove()
    dispatched.clear()
    args, kwargs = given[0]
    x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    text = kwargs.get("encoder_hidden_states")
    batch, sequence = x.shape[:2]
    if text is not None:
        sequence = text.shape[1] if keyword.startswith("encoder") else sequence + text.shape[1]
    torch.manual_seed(0)
    kwargs = {**kwargs, keyword: build(batch, sequence)}
    with torch.no_grad():
        stock = tensors(attn(*args, **kwargs))
        assert fuse_qk_norm_rope(model).replaced
        for ours, theirs in zip(tensors(attn(*args, **kwargs)), stock, strict=True):
            assert_same_bits(ours, theirs)
    theirs, ours = (call["attn_mask"] for call in dispatched)
    assert ours is not None
    assert_same_bits(ours, theirs)


def test_a_backend_set_on_the_fused_model_is_the_stock_processors_too(backend_restored):
    model, _ = flux()
    stock = [m.processor for m in model.modules() if hasattr(m, "processor")]
    fuse_qk_norm_rope(model)
    model.set_attention_backend("_native_math")
    unfuse_qk_norm_rope(model)
    assert {processor._attention_backend for processor in stock} == {"_native_math"}


# An attention runs as it did where its norm is more than its class says


class Counting(ModelHook):
    calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


class Doubled(nn.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Tripled(nn.Module):
    def forward(self, weight):
        return 3 * weight


def forward_hook(attn):
    attn.norm_q.register_forward_hook(lambda module, args, y: 2 * y)


def forward_pre_hook(attn):
    attn.norm_k.register_forward_pre_hook(lambda module, args: (-args[0],))


def backward_hook(attn):
    attn.norm_q.register_full_backward_hook(lambda module, dx, dy: (2 * dx[0],))


def backward_pre_hook(attn):
    attn.norm_q.register_full_backward_pre_hook(lambda module, dy: (2 * dy[0],))


def instance_forward(attn):
    original = attn.norm_q.forward
    attn.norm_q.forward = lambda x: 2 * original(x)


def accelerate_hook(attn):
    add_hook_to_module(attn.norm_q, Counting())


def diffusers_hook(attn):
    HookRegistry.check_if_exists_or_initialize(attn.norm_q).register_hook(DiffusersHook(), "nothing")


def layerwise_casting(attn):
    apply_layerwise_casting_hook(attn.norm_q, BF16, FP32, non_blocking=False)


def compiled(attn):
    attn.norm_q.compile(backend="eager")


def wrapped_by_compile(attn):
    attn.norm_q = torch.compile(attn.norm_q, backend="eager")


def modules_to_save(attn):
    wrapper = peft.utils.ModulesToSaveWrapper(attn.norm_q, "default")
    wrapper.modules_to_save["default"].weight.data.mul_(2)
    wrapper.set_adapter("default")
    attn.norm_q = wrapper


def parametrised(attn):
    nn.utils.parametrize.register_parametrization(attn.norm_q, "weight", Tripled())


def subclass(attn):
    attn.norm_q.__class__ = Doubled


def unknown_class(attn):
    attn.norm_q = nn.LayerNorm(attn.head_dim)


def other_eps(attn):
    attn.norm_k.eps = 0.5


def no_norm(attn):
    attn.norm_q = nn.Identity()


def sharded_norm(attn):
    fully_shard(attn.norm_q, mesh=dist.init_device_mesh("cpu", (1,)))


TAKEN_OVER = "norm_q: something took over its forward (offloading, layerwise casting, compiling)"
OBSTACLES = {
    forward_hook: "norm_q: it has hooks, which a fused call would not run",
    forward_pre_hook: "norm_k: it has hooks, which a fused call would not run",
    backward_hook: "norm_q: it has hooks, which a fused call would not run",
    backward_pre_hook: "norm_q: it has hooks, which a fused call would not run",
    instance_forward: TAKEN_OVER,
    accelerate_hook: TAKEN_OVER,
    diffusers_hook: TAKEN_OVER,
    layerwise_casting: TAKEN_OVER,
    compiled: TAKEN_OVER,
    wrapped_by_compile: "norm_q: nothing of torch.*.OptimizedModule is known to be an RMSNorm",
    modules_to_save: "norm_q: nothing of peft.*.ModulesToSaveWrapper is known to be an RMSNorm",
    parametrised: "norm_q: nothing of torch.nn.utils.parametrize.ParametrizedRMSNorm is known to be an RMSNorm",
    subclass: "norm_q: nothing of test_processors.Doubled is known to be an RMSNorm",
    unknown_class: "norm_q: nothing of torch.nn.modules.normalization.LayerNorm is known to be an RMSNorm",
    no_norm: "norm_q: nothing of torch.nn.modules.linear.Identity is known to be an RMSNorm",
    other_eps: "norm_k: its eps, offset or rounding is not that of norm_q",
    sharded_norm: "norm_q: nothing of torch.*.FSDPRMSNorm is known to be an RMSNorm",
}


@pytest.fixture(scope="module")
def process_group():
    """A world of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("when", ["after", "before"])
@pytest.mark.parametrize("obstruct", OBSTACLES, ids=lambda f: f.__name__)
def test_an_attention_runs_unfused_and_says_so_where_its_norm_is_more_than_its_class_says(
    obstruct, when, process_group
):
    ops.warn_once.cache_clear()
    reason = OBSTACLES[obstruct]
    stock, inputs = flux()
    obstruct(stock.transformer_blocks[0].attn)
    expected, expected_grads, _ = run(stock, inputs)
    model, _ = flux()
    attn = model.transformer_blocks[0].attn
    if when == "before":
        obstruct(attn)
        report = fuse_qk_norm_rope(model)
        assert type(attn.processor) is FluxAttnProcessor
        [skipped] = report.skipped
        assert (skipped.fqn, skipped.before) == ("transformer_blocks.0.attn", "FluxAttnProcessor")
        assert fnmatchcase(skipped.reason, reason)
        assert [e.fqn for e in report.replaced] == ["single_transformer_blocks.0.attn"]
        out, grads, _ = run(model, inputs)
    else:
        assert len(fuse_qk_norm_rope(model)) == 2
        obstruct(attn)
        with pytest.warns(UserWarning, match="FusedFluxAttnProcessor runs unfused: ") as caught:
            out, grads, _ = run(model, inputs)
        assert sum(fnmatchcase(str(w.message), f"*runs unfused: {reason}") for w in caught) == 1
        reasons = {e.fqn: e.reason for e in fuse_qk_norm_rope(model).skipped}
        assert fnmatchcase(reasons["transformer_blocks.0.attn"], f"it is fused, but runs unfused: {reason}")
        assert reasons["single_transformer_blocks.0.attn"] == "it is fused already"
    assert_same_bits(out[0], expected[0])
    assert grads.keys() == expected_grads.keys()
    block = "transformer_blocks.0."
    assert (
        distance(
            [g for n, g in grads.items() if n.startswith(block)],
            [g for n, g in expected_grads.items() if n.startswith(block)],
        )
        < 1e-6
    )


def test_a_norm_with_a_bias_or_another_weight_runs_unfused():
    model, _ = tiny.build("QwenImageTransformer2DModel", dtype=BF16)
    first, second = (block.attn for block in model.transformer_blocks)
    first.norm_q.bias = nn.Parameter(torch.full_like(first.norm_q.weight, 0.5))
    second.norm_k.weight = nn.Parameter(second.norm_k.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.warns(UserWarning, match="found nothing to fuse"):
        report = fuse_qk_norm_rope(model)
    assert [e.reason for e in report.skipped] == [
        "norm_q: it has a bias",
        "norm_k: its weight is torch.float8_e4m3fn of shape [16]",
    ]


def test_a_block_that_fsdp2_shards_runs_fused_for_its_weights_are_whole_then(process_group):
    model, inputs = flux()
    expected, _, _ = run(model, inputs)
    fuse_qk_norm_rope(model)
    mesh = dist.init_device_mesh("cpu", (1,))
    for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    seen = []
    for attn in attentions(model):
        attn.register_forward_hook(lambda module, args, y: seen.append(module.processor.obstacle(module)))
    assert_same_bits(model(**inputs).sample, expected[0])
    assert seen == [None, None]
    reasons = {e.reason for e in fuse_qk_norm_rope(model).skipped}
    assert reasons == {"it is fused, but runs unfused: norm_q: its weight is a DTensor"}


# Processors and models that it does not know


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("FluxTransformer2DModel", lambda attn: type("Custom", (FluxAttnProcessor,), {})()),
        ("FluxTransformer2DModel", lambda attn: FluxIPAdapterAttnProcessor(attn.inner_dim, attn.inner_dim)),
        ("Flux2Transformer2DModel", lambda attn: Flux2KVAttnProcessor()),
        ("Flux2Transformer2DModel", lambda attn: Flux2KVParallelSelfAttnProcessor()),
    ],
    ids=["custom subclass", "IP adapter", "kv cache", "kv cache, parallel"],
)
def test_a_processor_that_it_does_not_know_is_left_alone_and_reported(name, build):
    model, _ = tiny.build(name)
    attn = model.transformer_blocks[0].attn
    attn.set_processor(build(attn))
    before = attn.processor
    report = fuse_qk_norm_rope(model)
    assert attn.processor is before
    assert [(e.before, e.reason) for e in report.skipped] == [
        (type(before).__name__, "no fused processor stands in for its class")
    ]
    assert [e.fqn for e in report.replaced] == ["single_transformer_blocks.0.attn"]


def test_a_rope_that_does_not_fit_is_reported_with_the_reason():
    model, _ = tiny.build("WanTransformer3DModel")
    with pytest.warns(UserWarning, match="found nothing to fuse; skipped: WanAttnProcessor: it norms across heads and"):
        report = fuse_qk_norm_rope(model)
    assert len(report.skipped) == 4
    assert "4 skipped" in str(report)


def test_finding_nothing_warns():
    with pytest.warns(UserWarning, match="fuse_qk_norm_rope found nothing to fuse; skipped: none"):
        assert len(fuse_qk_norm_rope(nn.Linear(2, 2))) == 0


@pytest.mark.parametrize("function", [fuse_qk_norm_rope, unfuse_qk_norm_rope])
def test_a_model_that_is_no_module_is_a_type_error(function):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, but is str"):
        function("model")


@pytest.mark.parametrize("rope", ["none", "bf16", "one row"])
def test_a_call_without_the_rope_of_its_family_runs_as_before(rope):
    model, _ = flux()
    attn = model.single_transformer_blocks[0].attn
    x = torch.randn(1, 6, attn.query_dim)
    angles = torch.randn(6, attn.head_dim)
    tables = {
        "none": None,
        "bf16": (angles.cos().to(BF16), angles.sin().to(BF16)),
        "one row": (angles.cos()[:1], angles.sin()[:1]),  # the stock code broadcasts it over the sequence
    }[rope]
    expected = attn(x, image_rotary_emb=tables)
    fuse_qk_norm_rope(model)
    assert_same_bits(attn(x, image_rotary_emb=tables), expected)


# The way back, and what a trainer does with a model


@pytest.mark.parametrize("name", FAMILIES)
def test_unfuse_restores_the_very_objects(name):
    model, _ = tiny.build(name)
    before = {n: m.processor for n, m in model.named_modules() if hasattr(m, "processor")}
    state, modules = list(model.state_dict()), dict(model.named_modules())
    fuse_qk_norm_rope(model)
    assert list(model.state_dict()) == state
    assert dict(model.named_modules()) == modules
    report = unfuse_qk_norm_rope(model)
    assert len(report) == FAMILIES[name]
    after = {n: m.processor for n, m in model.named_modules() if hasattr(m, "processor")}
    assert after.keys() == before.keys()
    assert all(after[n] is before[n] for n in before)
    assert len(unfuse_qk_norm_rope(model)) == 0


def test_calling_twice_changes_nothing_and_says_so(recwarn):
    model, _ = flux()
    fuse_qk_norm_rope(model)
    fused = [attn.processor for attn in attentions(model)]
    report = fuse_qk_norm_rope(model)
    assert len(report) == 0
    assert {e.reason for e in report.skipped} == {"it is fused already"}
    assert [attn.processor for attn in attentions(model)] == fused
    assert not [w for w in recwarn if "fuse" in str(w.message)]


def test_a_processor_of_two_attentions_stays_one():
    model, _ = flux()
    model.set_attn_processor(FluxAttnProcessor())
    fuse_qk_norm_rope(model)
    assert len({id(attn.processor) for attn in attentions(model)}) == 1


def test_the_report_prints_a_table():
    model, _ = flux()
    assert str(fuse_qk_norm_rope(model)).splitlines() == [
        "fuse_qk_norm_rope: 2 replaced, 0 skipped",
        "module                            count  from               to",
        "transformer_blocks.*.attn         1      FluxAttnProcessor  FusedFluxAttnProcessor",
        "single_transformer_blocks.*.attn  1      FluxAttnProcessor  FusedFluxAttnProcessor",
    ]


def test_norms_replaced_and_restored_under_fused_processors_give_the_same_bits():
    model, inputs = flux(BF16)
    fuse_qk_norm_rope(model)
    expected, _, _ = run(model, inputs, BF16)
    assert len(replace_qk_norms(model)) == 6
    assert isinstance(model.transformer_blocks[0].attn.norm_q, QKRMSNorm)
    assert_same_bits(run(model, inputs, BF16)[0][0], expected[0])
    assert len(restore_qk_norms(model)) == 6
    assert_same_bits(run(model, inputs, BF16)[0][0], expected[0])


def test_a_new_weight_is_read_at_the_next_call():
    model, inputs = flux()
    fuse_qk_norm_rope(model)
    model(**inputs)
    attn = model.transformer_blocks[0].attn
    attn.norm_q.weight = nn.Parameter(attn.norm_q.weight.detach() * 2)
    fused = model(**inputs).sample
    unfuse_qk_norm_rope(model)
    assert_same_bits(fused, model(**inputs).sample)


def test_a_fused_model_can_be_copied_pickled_and_saved_whole():
    model, inputs = flux()
    fuse_qk_norm_rope(model)
    expected = model(**inputs).sample
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        assert len(attentions(other)) == 2
        assert_same_bits(other(**inputs).sample, expected)
        assert len(unfuse_qk_norm_rope(other)) == 2
    assert len(attentions(model)) == 2


def test_every_known_processor_exists_in_diffusers_under_that_name():
    for path, found in processors._FUSED.items():
        module, _, name = path.rpartition(".")
        cls = getattr(__import__(module, fromlist=[name]), name)
        assert f"{cls.__module__}.{cls.__qualname__}" == path
        if not isinstance(found, str):
            fused = processors._fused(cls())
            assert type(fused).__name__ == found[1]
            assert type(type(fused)().stock) is cls


def test_importing_qknorm_loads_no_family_and_no_diffusers():
    code = (
        "import sys, qknorm; print([m for m in sys.modules "
        "if m.startswith(('diffusers', 'qknorm.processors.')) and m != 'qknorm.processors.base'])"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[]"
