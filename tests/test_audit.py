"""The audit: what it sees, the causes that it measures, what a swap would fix, and that it touches nothing."""

import copy
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn
from torch.nn.modules import module as torch_module

from qknorm import QKRMSNorm, find_qk_norms, replace_qk_norms, tiny
from qknorm.audit import BACKENDS, audit, audit_qk_dtypes, backends_refusing, capture_attention
from qknorm.autocast import emulate_cuda_autocast

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LEAK = (FP32, FP32, BF16)


class Attention(nn.Module):
    """Attention with q/k norms, and a place for each thing that can go wrong around them."""

    def __init__(self, dim=16, norm=nn.RMSNorm, attend=F.scaled_dot_product_attention):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = norm(dim // 2), norm(dim // 2)
        self.attend = attend
        self.after_norm = lambda q, k: (q, k)

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (2, -1)).transpose(1, 2) for proj in (self.to_q, self.to_k, self.to_v))
        q, k = self.after_norm(self.norm_q(q), self.norm_k(k))
        return self.to_out(self.attend(q, k, v).transpose(1, 2).flatten(2).to(x.dtype))


class Model(nn.Module):
    """Two such blocks, with everything in it that a forward may change."""

    def __init__(self, **kwargs):
        super().__init__()
        self.blocks = nn.ModuleList(Attention(**kwargs) for _ in range(2))
        self.dropout = nn.Dropout(0.5)
        self.stats = nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.zeros(1))
        self.cache, self.history, self.last = {}, [], None

    def forward(self, x, fail=False):
        self.cache["x"] = self.last = x
        self.history.append(x)
        self.seen.add_(1)
        self.register_buffer("late", x.detach())
        for block in self.blocks:
            x = x + self.dropout(block(x))
        if fail:
            raise LookupError("the forward's own\nand more of it")
        return self.stats(x.transpose(1, 2).float())


class Float32LoRA(nn.Module):
    """A low-rank adapter with float32 weights outside autocast: whatever it wraps hands back float32."""

    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped
        self.down, self.up = nn.Linear(wrapped.in_features, 2), nn.Linear(2, wrapped.out_features)

    def forward(self, x):
        return self.wrapped(x) + self.up(self.down(x.float()))


def small(dtype=BF16, **kwargs):
    torch.manual_seed(0)
    model = Model(**kwargs).to(dtype).eval()
    model.stats.float()
    return model, torch.randn(2, 4, 16, dtype=dtype)


# Causes


@pytest.mark.parametrize("weights", [BF16, FP32])
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "ChromaTransformer2DModel"])
def test_flux_leaks_by_the_autocast_policy_and_replacing_fixes_all_of_it(name, weights):
    model, inputs = tiny.build(name, dtype=weights)
    report = audit_qk_dtypes(model, **inputs)
    assert [call.fqn for call in report.calls] == ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"]
    assert [call.entry for call in report.calls] == ["dispatch_attention_fn"] * 2
    assert all(call.dtypes == LEAK and call.verdict == "leak" for call in report.calls)
    assert all(call.causes == ("autocast policy",) for call in report.calls)
    norms = {name for name, norm, _ in find_qk_norms(model) if norm is not None}
    assert {name for call in report.leaks for name in call.where} == norms
    assert report.fixed_by_replacing == report.leaks == report.calls
    assert report.left_after_replacing == []
    assert [call.dtypes for call in report.calls_after_replacing] == [(BF16,) * 3] * 2
    assert "emulated" in report.how
    assert len(report) == 2


def test_without_autocast_the_same_model_is_clean():
    model, inputs = tiny.build("FluxTransformer2DModel", dtype=BF16)
    report = audit_qk_dtypes(model, **inputs, autocast_dtype=None)
    assert (len(report.calls), len(report)) == (2, 0)
    assert "without autocast" in report.how


def test_a_clean_model_has_no_leak_and_is_run_once():
    model, x = small(norm=lambda dim: QKRMSNorm(dim))
    with capture_attention(model) as seen:
        report = audit_qk_dtypes(model, x)
    assert [call.verdict for call in report.calls] == ["ok"] * 2
    assert report.leaks == report.fixed_by_replacing == report.left_after_replacing == []
    assert len(seen) == 2
    assert bool(report)  # a report is there, whatever it says
    assert not len(report)


def test_float32_norm_weights_without_autocast_are_named_as_the_cause():
    model, inputs = tiny.build("QwenImageTransformer2DModel", dtype=BF16)
    norms = [name for name, norm, _ in find_qk_norms(model) if norm is not None and norm.float()]
    report = audit_qk_dtypes(model, **inputs, autocast_dtype=None)
    (call,) = report.leaks
    assert (call.dtypes, call.causes) == (LEAK, ("weight dtype",))
    assert sorted(call.where) == sorted(name for name in norms if name.startswith("transformer_blocks.0."))
    assert "Expected query, key, and value to have the same dtype" in report.stopped
    assert report.stopped_after_replacing is None
    assert len(report.fixed_by_replacing) == 1
    assert report.left_after_replacing == []
    assert len(report.calls_after_replacing) > 1


@pytest.mark.parametrize("name", ["Ideogram4Transformer2DModel", "Cosmos3OmniTransformer#silu_rms"])
def test_rope_that_promotes_after_the_norm_is_named_and_left_by_replacing(name):
    model, inputs = tiny.build(name, dtype=FP32)
    report = audit_qk_dtypes(model, **inputs)
    assert {call.causes for call in report.leaks} == {("weight dtype",)}
    assert report.fixed_by_replacing == []
    assert len(report.left_after_replacing) == len(report.leaks) > 0
    for call in report.left_after_replacing:
        assert call.causes == ("RoPE",)
        assert all("transformer_" in line and "cos" in line for line in call.where)


def test_a_promotion_after_the_norm_that_is_no_rope_is_located():
    def upcast(q, k):
        return q * torch.ones(1, 1, 1, 8), k

    model, x = small()
    model.blocks[1].after_norm = upcast
    report = audit_qk_dtypes(model, x, autocast_dtype=None)
    (call,) = report.leaks
    assert (call.fqn, call.dtypes, call.causes) == ("blocks.1", (FP32, BF16, BF16), ("other",))
    (line,) = call.where
    assert line.startswith("mul at test_audit.py:")
    assert "q * torch.ones" in line
    assert report.left_after_replacing == [call]


def test_float32_lora_upstream_is_named_module_by_module():
    model, x = small()
    attention = model.blocks[0]
    for name in ("to_q", "to_k", "to_v"):
        setattr(attention, name, Float32LoRA(getattr(attention, name)))
    report = audit_qk_dtypes(model, x, autocast_dtype=None)
    assert report.stopped is None
    (call,) = report.leaks
    assert (call.fqn, call.dtypes, call.verdict) == ("blocks.0", (FP32,) * 3, "wide")
    assert call.causes == ("upstream",)
    assert call.where == ("blocks.0.to_q", "blocks.0.to_k", "blocks.0.to_v")
    assert report.fixed_by_replacing == []
    assert report.left_after_replacing == [call]


def test_the_operand_that_is_off_is_the_one_explained():
    model, x = small()
    model.blocks[1].to_v = Float32LoRA(model.blocks[1].to_v)
    (call,) = audit_qk_dtypes(model, x, autocast_dtype=None).leaks
    assert (call.dtypes, call.verdict) == ((BF16, BF16, FP32), "leak")
    assert (call.causes, call.where) == (("upstream",), ("blocks.1.to_v",))


def test_a_stream_that_turned_float32_in_an_earlier_block_is_traced_to_it():
    model, x = small()
    model.blocks[0].to_out = Float32LoRA(model.blocks[0].to_out)
    model.blocks[1].float()
    model.ballast = nn.Parameter(torch.zeros(4096, dtype=BF16))  # so that bf16 is the dtype of most weights
    call = audit_qk_dtypes(model, x, autocast_dtype=None).leaks[0]
    assert (call.fqn, call.verdict, call.causes) == ("blocks.1", "wide", ("upstream",))
    assert call.where == ("blocks.0.to_out",)


def test_weights_stored_in_eight_bits_are_not_what_attention_is_due():
    model, x = small()
    model.storage = nn.Parameter(torch.zeros(4096).to(torch.float8_e4m3fn), requires_grad=False)
    assert audit_qk_dtypes(model, x, autocast_dtype=None).leaks == []


class UpcastingNorm(nn.RMSNorm):
    """Returns float32 by its own code, and no adapter knows it."""

    def forward(self, x):
        return x.float()


def test_a_norm_that_upcasts_by_itself_is_named_and_why_it_is_skipped():
    model, x = small(norm=UpcastingNorm)
    report = audit_qk_dtypes(model, x)
    assert {call.causes for call in report.leaks} == {("norm",)}
    assert report.left_after_replacing == report.leaks
    model.blocks[1].norm_q, model.blocks[1].norm_added_q = nn.RMSNorm(8, dtype=BF16), None
    report = audit_qk_dtypes(model, x)
    assert [call.causes for call in report.leaks] == [("norm",), ("autocast policy", "norm")]
    assert report.skipped.keys() == {"blocks.0.norm_q", "blocks.0.norm_k", "blocks.1.norm_k"}
    assert all("register_norm" in reason for reason in report.skipped.values())
    assert "replace_qk_norms skips blocks.*.norm_q" in str(report)


class Plain(nn.Module):
    """Attention without norms, after one with."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x.float(), x, x)


def test_the_norms_of_one_attention_are_not_blamed_for_the_next():
    model, x = small()
    model.blocks[0].to_out = nn.Sequential(model.blocks[0].to_out, Plain())
    report = audit_qk_dtypes(model, x)
    assert [call.fqn for call in report.calls] == ["blocks.0", "blocks.0.to_out.1", "blocks.1"]
    assert [call.causes for call in report.calls] == [("autocast policy",), ("upstream",), ("autocast policy",)]
    assert "x.float()" in report.calls[1].where[0]
    assert report.left_after_replacing == [report.calls[1]]


def test_layer_norm_and_fp16_are_judged_alike():
    model, x = small(FP16, norm=nn.LayerNorm)
    report = audit_qk_dtypes(model, x, autocast_dtype=FP16)
    assert {(call.dtypes, call.causes) for call in report.leaks} == {((FP32, FP32, FP16), ("autocast policy",))}
    assert len(report.fixed_by_replacing) == 2


def test_float32_autocast_is_what_it_says():
    model, x = small(BF16)
    report = audit_qk_dtypes(model, x, autocast_dtype=FP32)
    assert [(call.dtypes, call.verdict) for call in report.calls] == [((FP32,) * 3, "ok")] * 2


def test_hand_written_attention_is_said_to_be_unseen():
    model, inputs = tiny.build("SanaTransformer2DModel#qk_rms_across", dtype=BF16)
    report = audit_qk_dtypes(model, **inputs)
    assert {call.fqn.rpartition(".")[2] for call in report.calls} == {"attn2"}
    assert {name.split(".", 2)[2] for name in report.norms_without_attention} == {"attn1.norm_q", "attn1.norm_k"}
    assert "hand-written" in str(report)


# As it was found


def _state(model):
    modules = dict(model.named_modules())
    tensors = {name: (id(t), t.clone(), t._version, t.grad) for name, t in model.state_dict(keep_vars=True).items()}
    attributes = {}
    for name, module in modules.items():
        attributes[name] = {key: (id(value), copy.copy(value)) for key, value in vars(module).items()}
    hooks = [len(d) for d in vars(torch_module).values() if isinstance(d, dict)]
    registry = attention_dispatch._AttentionBackendRegistry
    tables = [id(registry._backends), id(registry._constraints), registry._checks_enabled]
    return modules, tensors, attributes, hooks, tables, torch.get_rng_state()


def assert_as_found(model, before):
    modules, tensors, attributes, hooks, tables, random = before
    now = _state(model)
    assert list(now[0]) == list(modules)
    assert all(now[0][name] is module for name, module in modules.items())
    assert now[1].keys() == tensors.keys()
    for name, (identity, value, _, grad) in tensors.items():
        assert now[1][name][0] == identity
        assert torch.equal(now[1][name][1], value)
        assert now[1][name][3] is grad
    for name, then in attributes.items():
        assert list(now[2][name]) == list(then)
        for key, (identity, value) in then.items():
            assert now[2][name][key][0] == identity, f"{name}.{key}"
            if isinstance(value, (dict, list, set)):
                assert [*now[2][name][key][1]] == [*value], f"{name}.{key}"
    assert now[3:5] == (hooks, tables)
    assert torch.equal(now[5], random)
    assert torch.is_autocast_enabled("cpu") is False


@pytest.mark.parametrize("kwargs", [{}, {"autocast_dtype": None}, {"depth": 1}, {"on_meta": True}])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was_found(training, kwargs):
    model, x = small()
    model.train(training)
    model.blocks[0].eval()
    model.blocks[0].norm_q.register_forward_hook(lambda module, args, output: None)
    model.seen.fill_(7)
    grad_modes = []
    model.blocks[0].after_norm = lambda q, k: grad_modes.append(torch.is_grad_enabled()) or (q, k)
    before = _state(model)
    report = audit(model, (x,), **kwargs)
    assert len(report.calls) == (1 if "depth" in kwargs else 2)
    assert set(grad_modes) == {False}
    assert_as_found(model, before)


def test_the_model_is_left_as_it_was_found_when_its_forward_raises():
    model, x = small(norm=lambda dim: QKRMSNorm(dim))
    before = _state(model.train())
    with pytest.raises(LookupError, match="the forward's own"):
        audit_qk_dtypes(model, x, fail=True)
    assert_as_found(model, before)


def test_an_error_after_a_leak_is_reported():
    model, x = small()
    report = audit_qk_dtypes(model, x, fail=True)
    assert report.stopped == report.stopped_after_replacing == "LookupError: the forward's own"
    assert len(report.fixed_by_replacing) == 2
    assert str(report).count("what follows was not seen: LookupError: the forward's own") == 2


class Popping(nn.Module):
    """A forward that empties the list that it is given."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, xs):
        return self.model(xs.pop())


def test_inputs_are_left_as_they_were_found():
    model, x = small()
    xs = [x]
    report = audit_qk_dtypes(Popping(model), xs)
    assert (len(report.fixed_by_replacing), len(xs), xs[0] is x) == (2, 1, True)


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "QwenImageTransformer2DModel", "ZImageTransformer2DModel"])
def test_a_real_model_is_left_as_it_was_found(name):
    model, inputs = tiny.build(name, dtype=FP32)
    with torch.no_grad():
        expected = model(**inputs, return_dict=False)[0]
    before = _state(model)
    assert len(audit_qk_dtypes(model, **inputs)) > 0 or name == "ZImageTransformer2DModel"
    assert_as_found(model, before)
    with torch.no_grad():
        again = model(**inputs, return_dict=False)[0]
    assert torch.equal(torch.stack([*again]), torch.stack([*expected]))


# Models too large to run


def test_on_meta_the_audit_says_what_a_run_says():
    model, inputs = tiny.build("FluxTransformer2DModel", dtype=BF16)
    real = audit_qk_dtypes(model, **inputs)
    on_meta = audit_qk_dtypes(model.to("meta"), **{key: value.to("meta") for key, value in inputs.items()})
    assert "meta device" in on_meta.how
    assert "meta device" not in real.how
    for name in ("fqn", "dtypes", "verdict", "causes", "where"):
        assert [getattr(c, name) for c in on_meta.calls] == [getattr(c, name) for c in real.calls]
    assert [call.query.shape for call in on_meta.calls] == [call.query.shape for call in real.calls]
    assert len(on_meta.fixed_by_replacing) == 2
    assert all(type(p) is nn.Parameter and p.is_meta for p in model.parameters())


def test_a_model_of_twelve_billion_weights_is_audited_on_meta():
    with torch.device("meta"):
        from diffusers import FluxTransformer2DModel

        model = FluxTransformer2DModel(num_layers=19, num_single_layers=38).to(BF16)
        inputs = {
            "hidden_states": torch.empty(1, 4096, 64, dtype=BF16),
            "encoder_hidden_states": torch.empty(1, 512, 4096, dtype=BF16),
            "pooled_projections": torch.empty(1, 768, dtype=BF16),
            "timestep": torch.empty(1),
            "img_ids": torch.empty(4096, 3),
            "txt_ids": torch.empty(512, 3),
        }
    report = audit(model, (), inputs, depth=2)
    assert report.depth == {"transformer_blocks": (2, 19), "single_transformer_blocks": (2, 38)}
    assert [call.query.shape for call in report.leaks] == [(1, 4608, 24, 128)] * 4
    assert len(report.fixed_by_replacing) == 4
    assert len(model.transformer_blocks) == 19
    text = str(report)
    assert "meta device" in text
    assert "reduced depth: single_transformer_blocks 2 of 38" in text


def test_a_forward_that_asks_for_values_is_told_so_on_meta():
    model, x = small()
    model.blocks[0].after_norm = lambda q, k: (q, k) if q.sum().item() else (k, q)
    with pytest.raises(RuntimeError, match=r"asks for the values of a tensor .* with depth="):
        audit(model, (x,), on_meta=True)


class Nested(nn.Module):
    """A list of models that have lists of blocks."""

    def __init__(self, outer):
        super().__init__()
        self.outer = outer

    def forward(self, x):
        return [block(x) for inner in self.outer for block in inner.blocks]


def test_reduced_depth_cuts_lists_of_like_blocks_alone():
    model, x = small()
    model.blocks.append(Attention())  # alike
    model.heads = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))  # no q/k norms
    model.stages = nn.ModuleList(Attention(dim) for dim in (16, 32, 64))  # not alike
    report = audit(model, (x,), depth=2)
    assert report.depth == {"blocks": (2, 3)}
    assert len(report.calls) == 2
    outer = nn.ModuleList(Model() for _ in range(3))
    assert audit(nn.Sequential(Nested(outer)).to(BF16), (x,), depth=1).depth == {"0.outer": (1, 3)}
    with pytest.raises(ValueError, match="depth must be at least 1, but is 0"):
        audit(model, (x,), depth=0)


# Backends


def test_backends_that_refuse_are_those_whose_constraints_do():
    everyone = {name.value for name in attention_dispatch._AttentionBackendRegistry._constraints}
    assert set(backends_refusing(*LEAK)) == everyone
    assert backends_refusing(BF16, BF16, BF16) == []
    assert backends_refusing(FP16, FP16, FP16) == ["aiter_fa2_hub"]
    assert {"flash", "sage", "_native_cudnn", "aiter_fa2_hub"} <= set(backends_refusing(FP32, FP32, FP32))
    assert not {"native", "flex", "xformers"} & set(backends_refusing(FP32, FP32, FP32))


def test_the_table_for_use_without_diffusers_says_what_diffusers_says(monkeypatch):
    triples = [(q, k, v) for q in (BF16, FP16, FP32) for k in (BF16, FP32) for v in (BF16, FP16, FP32)]
    triples += [(dtype,) * 3 for dtype in (BF16, FP16, FP32, torch.float64)]
    real = [sorted(backends_refusing(*dtypes)) for dtypes in triples]
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)
    assert [sorted(backends_refusing(*dtypes)) for dtypes in triples] == real
    assert len(real[triples.index(LEAK)]) == sum(map(len, BACKENDS.values()))


def test_a_report_prints_a_table_and_turns_into_json():
    model, inputs = tiny.build("WanTransformer3DModel", dtype=BF16)
    report = audit_qk_dtypes(model, **inputs)
    header, how, columns, *rows = str(report).splitlines()
    assert header == "audit_qk_dtypes of WanTransformer3DModel: 4 attention calls, 4 leak"
    assert how == report.how
    assert columns.split() == ["module", "count", "query", "key", "value", "verdict", "cause"]
    expected = "blocks.*.attn1 2 float32 float32 bfloat16 leak autocast policy: norm_q, norm_k"
    assert " ".join(rows[0].split()) == expected
    assert "float32, float32, bfloat16 refused by: flash " in rows[2]
    assert rows[-1] == "replace_qk_norms fixes 4, and leaves 0"
    plain = json.loads(json.dumps(report.as_dict()))
    assert (plain["leaks"], plain["fixed_by_replacing"], plain["left_after_replacing"]) == (4, 4, [])
    assert plain["calls"][0]["query"]["dtype"] == "float32"
    assert "flash" in plain["refused_by"]["float32, float32, bfloat16"]


# Capture


def test_a_call_through_diffusers_is_counted_once_with_its_tensors():
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
    with capture_attention(keep_tensors=True) as calls:
        dispatch_attention_fn(q, k, v)
        F.scaled_dot_product_attention(q, k, value=v.transpose(1, 2).transpose(1, 2))
    dispatch_attention_fn(q, k, v)
    first, second = calls
    assert (first.entry, first.backend, first.fqn) == ("dispatch_attention_fn", "native", "")
    assert (second.entry, second.backend) == ("scaled_dot_product_attention", None)
    assert torch.equal(first.query.tensor, q)
    assert not first.query.tensor.requires_grad
    assert (first.key.shape, first.key.stride, first.value.device) == (k.shape, k.stride(), v.device)


def test_tensors_are_kept_on_demand_alone():
    model, x = small()
    with capture_attention(model) as calls:
        model(x)
    assert [call.fqn for call in calls] == ["blocks.0", "blocks.1"]
    assert all(call.query.tensor is None for call in calls)


def test_a_call_that_diffusers_checks_refuse_is_seen_and_an_audit_sees_the_rest(monkeypatch):
    monkeypatch.setattr(attention_dispatch._AttentionBackendRegistry, "_checks_enabled", True)
    model, inputs = tiny.build("FluxTransformer2DModel", dtype=BF16)
    with emulate_cuda_autocast(), torch.autocast("cpu", dtype=BF16):
        with capture_attention(model) as calls, pytest.raises(ValueError, match="must have the same dtype"):
            model(**inputs)
        assert [call.dtypes for call in calls] == [LEAK]
        replace_qk_norms(model)
        with capture_attention(model) as calls:
            model(**inputs)
    assert [call.dtypes for call in calls] == [(BF16,) * 3] * 2
    report = audit_qk_dtypes(tiny.build("FluxTransformer2DModel", dtype=BF16)[0], **inputs)
    assert (len(report), report.stopped) == (2, None)


def test_a_capture_inside_a_capture_sees_the_same():
    model, _ = small(attend=lambda q, k, v: dispatch_attention_fn(*(t.transpose(1, 2) for t in (q, k, v))))
    tables = attention_dispatch._AttentionBackendRegistry._backends
    with capture_attention() as outer, capture_attention() as inner:
        model.blocks[0].attend(*(torch.randn(1, 2, 4, 8),) * 3)
    assert len(outer) == len(inner) == 1
    assert attention_dispatch._AttentionBackendRegistry._backends is tables


def test_compiled_blocks_are_seen_and_explained():
    model, x = small()
    compiled = copy.deepcopy(model)
    runs = []

    def backend(graph, inputs):
        return lambda *args: runs.append(1) or graph(*args)

    compiled.blocks[0].compile(backend=backend)
    compiled.blocks[1] = torch.compile(compiled.blocks[1], backend=backend)
    compiled(x)
    before = len(runs)
    assert before >= 2
    report = audit_qk_dtypes(compiled, x)
    assert len(runs) == before
    compiled(x)
    assert len(runs) == 2 * before
    assert [call.dtypes for call in report.calls] == [LEAK] * 2
    assert {call.causes for call in report.leaks} == {("autocast policy",)}
    assert len(report.fixed_by_replacing) == 2


def test_capture_works_in_training_and_leaves_nothing_after_an_error():
    model, x = small()
    hooks = [len(d) for d in vars(torch_module).values() if isinstance(d, dict)]
    with capture_attention(model) as calls:
        model.train()(x).sum().backward()
    assert len(calls) == 2
    assert model.blocks[0].to_q.weight.grad is not None
    with pytest.raises(LookupError), capture_attention(model) as calls:
        model(x, fail=True)
    assert len(calls) == 2
    assert [len(d) for d in vars(torch_module).values() if isinstance(d, dict)] == hooks
    assert torch.overrides._get_current_function_mode_stack() == []


def test_capture_does_not_import_diffusers_and_an_audit_works_without_it():
    script = """
import sys, torch
sys.modules["diffusers"] = None
from qknorm.audit import audit_qk_dtypes, capture_attention
model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_q = torch.nn.RMSNorm(8)
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(self.norm_q(x), x, x)
x = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
with capture_attention() as calls:
    Model()(x.float())
assert len(calls) == 1
report = audit_qk_dtypes(Model().bfloat16(), x)
assert len(report.fixed_by_replacing) == 1, report
assert "refused by: flex" in str(report)
print("done")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
