"""The operators: opcheck, fakes, compiled against eager, higher order, and what compilers and exporters see."""

import itertools
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from oracle import ROUNDINGS, TOLERANCE, layouts
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import qknorm
from qknorm import ops, reference

EPS = 1e-6
SUFFIXES = ("", "_opaque")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def op(name: str, suffix: str = ""):
    return getattr(torch.ops.qknorm, name + suffix)


def direct(x, w):
    return torch.ops.qknorm.rms_norm(x, w, EPS)[0]


def public(x, w):
    return qknorm.rms_norm(x, w, EPS)


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "unit_offset", "trainable"),
    [
        (torch.bfloat16, torch.bfloat16, False, True),
        (torch.bfloat16, torch.float32, True, True),
        (torch.float16, torch.float16, True, False),
        (torch.float32, torch.bfloat16, False, True),
        (torch.float64, torch.float64, True, True),
        (torch.bfloat16, None, False, True),
    ],
)
def test_opcheck_passes_in_full(x_dtype, w_dtype, unit_offset, trainable, rounding, suffix):
    for x in (torch.randn(2, 5, 3, 8).to(x_dtype).transpose(1, 2), torch.randn(8).to(x_dtype)):
        w = None if w_dtype is None else torch.randn(8).to(w_dtype)
        leaves = [t if t is None else t.detach().requires_grad_(trainable) for t in (x, w)]
        opcheck(op("rms_norm", suffix), (*leaves, EPS, unit_offset, rounding))
        y, rstd = op("rms_norm", suffix)(x, w, EPS, unit_offset, rounding)
        for mask in (1, 2, 3):
            args = (torch.randn_like(y), x, w, rstd, EPS, unit_offset, rounding, mask)
            opcheck(op("rms_norm_backward", suffix), args)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fakes_have_the_strides_that_the_implementation_allocates(dtype, suffix, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 40)
    w = torch.randn(8).to(dtype)
    for x, dy in itertools.product(layouts((2, 3, 4, 8), dtype).values(), layouts((2, 3, 4, 8), dtype, 1).values()):
        real = op("rms_norm", suffix)(x, w, EPS)
        real += op("rms_norm_backward", suffix)(dy, x, w, real[1], EPS)
        with torch._subclasses.FakeTensorMode() as mode:
            fx, fdy, fw = map(mode.from_tensor, (x, dy, w))
            fake = op("rms_norm", suffix)(fx, fw, EPS)
            fake += op("rms_norm_backward", suffix)(fdy, fx, fw, fake[1], EPS)
        for r, f in zip(real, fake, strict=True):
            assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)


def test_schemas_are_functional_and_autocast_has_no_rule_for_them():
    for name, suffix in itertools.product(("rms_norm", "rms_norm_backward"), SUFFIXES):
        schema = op(name, suffix).default._schema
        assert not schema.is_mutable
        assert not any(a.alias_info for a in (*schema.arguments, *schema.returns))
        for key in ("AutocastCUDA", "AutocastCPU"):
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"qknorm::{name}{suffix}", key)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_direct_call_is_differentiable_and_equals_the_eager_path(dtype, rounding, suffix):
    x, w, dy = (torch.randn(s).to(dtype) for s in ((4, 6, 16), (16,), (4, 6, 16)))
    results = []
    for call in (
        lambda x, w: qknorm.rms_norm(x, w, EPS, unit_offset=True, rounding=rounding),
        lambda x, w: op("rms_norm", suffix)(x, w, EPS, True, rounding)[0],
    ):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = call(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(torch.bfloat16, torch.float16), (torch.float16, torch.float32)])
def test_the_composite_route_has_the_values_and_gradients_of_the_operator(x_dtype, w_dtype, rounding):
    x, w, dy = torch.randn(5, 7, 16).to(x_dtype), torch.randn(16).to(w_dtype), torch.randn(5, 7, 16).to(x_dtype)

    def call(x, w):
        return qknorm.rms_norm(x, w, EPS, rounding=rounding)

    y, pullback = torch.func.vjp(call, x, w)
    dx, dw = pullback(dy)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    plain = call(*leaves)
    want_dx, want_dw = torch.autograd.grad(plain, leaves, dy)
    assert torch.equal(y, plain)
    scale = want_dx.abs().max().item()
    assert (dx.double() - want_dx.double()).abs().max().item() <= TOLERANCE[x_dtype] * scale
    assert (dw.double() - want_dw.double()).abs().max().item() <= 2 * TOLERANCE[w_dtype] * want_dw.abs().max().item()


@pytest.mark.parametrize("call", [public, direct])
def test_every_order_of_differentiation_holds_in_float64(call):
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        call, (x, w), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(
        call, (x, w), check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("call", [public, direct])
def test_tangents_are_right_by_number_with_no_input_requiring_grad(call, compiled):
    x, tx = (torch.randn(4, 8, dtype=torch.float64) for _ in range(2))
    w, tw = (torch.randn(8, dtype=torch.float64) for _ in range(2))
    step = 1e-6
    expected = (call(x + step * tx, w + step * tw) - call(x - step * tx, w - step * tw)) / (2 * step)

    def jvp(x, w):
        return torch.func.jvp(call, (x, w), (tx, tw))[1]

    torch.testing.assert_close(torch.compile(jvp, fullgraph=True)(x, w) if compiled else jvp(x, w), expected)
    if not compiled:
        with forward_ad.dual_level():
            y = call(forward_ad.make_dual(x, tx), forward_ad.make_dual(w, tw))
            torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("call", [public, direct])
def test_vmap_and_func_grad_agree_with_a_loop(call, compiled):
    wrap = torch.compile(fullgraph=True) if compiled else (lambda f: f)
    x, w, ws = torch.randn(5, 3, 8), torch.randn(8), torch.randn(5, 8)
    torch.testing.assert_close(wrap(torch.vmap(call, (0, None)))(x, w), torch.stack([call(r, w) for r in x]))
    torch.testing.assert_close(wrap(torch.vmap(call, (1, None), 1))(x, w), call(x, w))
    torch.testing.assert_close(
        wrap(torch.vmap(call))(x, ws), torch.stack([call(r, s) for r, s in zip(x, ws, strict=True)])
    )
    torch.testing.assert_close(wrap(torch.vmap(call, (None, 0)))(x[0], ws), torch.stack([call(x[0], s) for s in ws]))

    def loss(w, x):
        return call(x, w).sin().sum()

    per_sample = wrap(torch.vmap(torch.func.grad(loss), (None, 0)))(w, x)
    leaf = w.clone().requires_grad_()
    expected = torch.stack([torch.autograd.grad(loss(leaf, r), leaf)[0] for r in x])
    torch.testing.assert_close(per_sample, expected)


def test_vmap_of_the_backward_operator_agrees_with_a_loop():
    x, dy, w = torch.randn(4, 3, 8), torch.randn(3, 4, 8), torch.randn(8)
    _, rstd = torch.ops.qknorm.rms_norm(x, w, EPS)
    dx, dw = torch.vmap(lambda dy, x, r: torch.ops.qknorm.rms_norm_backward(dy, x, w, r, EPS), (1, 0, 0))(dy, x, rstd)
    for i in range(4):
        one = torch.ops.qknorm.rms_norm_backward(dy[:, i], x[i], w, rstd[i], EPS)
        torch.testing.assert_close((dx[i], dw[i]), one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_forward_and_backward_agree_with_eager_in_one_graph(dtype):
    def step(x, w):
        return qknorm.rms_norm(x * 2, w, EPS).float().sin()

    for w_grad in (True, False):
        x = torch.randn(3, 5, 4, 64).to(dtype).transpose(1, 2)
        results = []
        for f in (step, torch.compile(step, fullgraph=True)):
            leaf, w = x.clone().requires_grad_(), torch.linspace(0.5, 1.5, 64).to(dtype).requires_grad_(w_grad)
            y = f(leaf, w)
            leaves = (leaf, w) if w_grad else (leaf,)
            results.append((y, *torch.autograd.grad(y.sum(), leaves)))
        for eager, compiled in zip(*results, strict=True):
            assert eager.dtype == compiled.dtype
            scale = eager.abs().max().item()
            assert (eager.double() - compiled.double()).abs().max().item() <= 2 * TOLERANCE[dtype] * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compiled_forward_equals_the_replaced_class_compiled_the_same_way_bit_for_bit(dtype):
    from diffusers.models.normalization import RMSNorm

    for old in (torch.nn.RMSNorm(64, eps=EPS), RMSNorm(64, EPS)):
        with torch.no_grad():
            old.weight.copy_(torch.linspace(0.5, 1.5, 64))
        old = old.to(dtype)
        new = qknorm.QKRMSNorm.from_norm(old)
        x = torch.randn(2, 33, 4, 64).to(dtype)
        with torch.no_grad():
            assert torch.equal(torch.compile(new, fullgraph=True)(x), torch.compile(old, fullgraph=True)(x).to(dtype))


def test_compiled_opaque_operator_equals_eager_bit_for_bit():
    def forward(x, w):
        return torch.ops.qknorm.rms_norm_opaque(x, w, EPS, False, "weight", ops.REVISION)[0]

    x, w, dy = torch.randn(6, 7, 64).bfloat16(), torch.rand(64).bfloat16(), torch.randn(6, 7, 64).bfloat16()
    results = []
    for f in (forward, torch.compile(forward, fullgraph=True)):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = f(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_inductor_decomposes_the_plain_pair_and_keeps_the_opaque_one(tmp_path):
    def generated(f):
        torch._dynamo.reset()
        x = torch.randn(4, 8, 64, dtype=torch.bfloat16, requires_grad=True)
        w = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
        _, codes = torch._inductor.utils.run_fw_bw_and_get_code(lambda: torch.compile(f, fullgraph=True)(x, w))
        return "\n".join(codes)

    assert "qknorm" not in generated(lambda x, w: qknorm.rms_norm(x, w) * 2).replace(str(tmp_path), "")
    opaque = generated(lambda x, w: torch.ops.qknorm.rms_norm_opaque(x, w, EPS)[0] * 2)
    assert "qknorm.rms_norm_opaque" in opaque
    assert "qknorm.rms_norm_backward_opaque" in opaque


def test_no_recompile_over_sequence_lengths():
    norm = torch.compile(qknorm.QKRMSNorm(64), fullgraph=True, dynamic=True)
    norm(torch.randn(2, 7, 3, 64, requires_grad=True)).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in range(8, 18):
            norm(torch.randn(2, length, 3, 64, requires_grad=True)).sum().backward()


def test_the_graph_of_a_compiler_holds_the_revision_of_the_maths():
    constants = []

    def backend(gm, example_inputs):
        def inner(graph_module, _):
            constants.extend(
                node.args[-1] for node in graph_module.graph.nodes if "qknorm.rms_norm" in str(node.target)
            )
            return graph_module.forward

        return aot_module_simplified(gm, example_inputs, fw_compiler=inner, bw_compiler=inner)

    x = torch.randn(3, 8, requires_grad=True)
    for call in (public, direct):
        torch.compile(call, backend=backend)(x, torch.ones(8)).sum().backward()
    assert constants == [ops.REVISION] * 4


def test_backend_triton_takes_the_opaque_pair_in_a_trace():
    graph = make_fx(lambda x: qknorm.rms_norm(x, None, backend="triton"))(torch.randn(3, 8))
    assert "qknorm.rms_norm_opaque" in graph.code
    graph = make_fx(lambda x: qknorm.rms_norm(x))(torch.randn(3, 8))
    assert "qknorm.rms_norm_opaque" not in graph.code
    assert "qknorm.rms_norm" in graph.code


def test_selective_checkpointing_sees_the_operator_and_does_not_run_it_twice(monkeypatch):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    calls = []
    original = reference.rms_norm_in_blocks
    monkeypatch.setattr(reference, "rms_norm_in_blocks", lambda *args: calls.append(1) or original(*args))

    def policy(ctx, func, *args, **kwargs):
        keep = func == torch.ops.qknorm.rms_norm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    x, w = torch.randn(4, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    y = checkpoint(
        lambda x: qknorm.rms_norm(x, w).sin(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    y.sum().backward()
    assert len(calls) == 1


def test_jit_trace_records_the_operator():
    traced = torch.jit.trace(qknorm.QKRMSNorm(8), torch.randn(3, 8))
    assert "qknorm::rms_norm" in str(traced.inlined_graph)
    x = torch.randn(5, 8)
    assert torch.equal(traced(x), qknorm.QKRMSNorm(8)(x))


def test_export_keeps_the_operator_and_run_decompositions_removes_it():
    program = torch.export.export(qknorm.QKRMSNorm(8), (torch.randn(3, 8),))
    assert "qknorm.rms_norm" in program.graph_module.code
    table = {torch.ops.qknorm.rms_norm.default: lambda x, w, eps, *o: reference.rms_norm(x, w, eps, *o[:2])}
    lowered = program.run_decompositions(table)
    assert "qknorm" not in lowered.graph_module.code
    x = torch.randn(3, 8)
    torch.testing.assert_close(lowered.module()(x), program.module()(x))


def test_first_compile_in_a_fresh_process_is_one_full_graph_and_decomposed(tmp_path):
    code = """
        import torch, qknorm
        x = torch.randn(4, 8, 64, dtype=torch.bfloat16, requires_grad=True)
        norm = qknorm.QKRMSNorm(64, dtype=torch.bfloat16)
        f = torch.compile(lambda x: norm(x) * 2, fullgraph=True)
        y, codes = torch._inductor.utils.run_fw_bw_and_get_code(lambda: f(x))
        assert y.dtype is torch.bfloat16 and len(codes) == 2
        assert all("ops.qknorm" not in code for code in codes)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
