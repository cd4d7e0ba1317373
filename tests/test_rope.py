"""``qk_rms_norm_rope`` against the chain of modules and functions that it replaces, and against float64."""

import itertools

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm
from oracle import HALF, ROUNDINGS, assert_near, oracle

import qknorm
from qknorm import emulate_cuda_autocast, ops

EPS = 1e-6
B, S, T, H, K, D = 2, 5, 3, 4, 2, 64

pytestmark = pytest.mark.usefixtures("one_thread")


def angles(length: int, rotary: int = D, batch: int | None = None) -> torch.Tensor:
    shape = (length, rotary // 2) if batch is None else (batch, length, rotary // 2)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def table(angle: torch.Tensor, kind: str, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if kind == "complex":
        return torch.polar(torch.ones_like(angle), angle), None
    cos, sin = angle.cos(), angle.sin()
    if kind == "shared":
        return cos, sin
    if interleaved:
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


def stream(length: int = S, dtype=torch.bfloat16, seed: int = 0, sequence_dim: int = 1, fused: bool = False):
    """(q, k, q_weight, k_weight), q and k as chunks of a fused projection or dense."""
    g = torch.Generator().manual_seed(seed)
    whole = (2 * torch.randn(B, length, (H + K) * D + 8, generator=g)).to(dtype)
    q, k = whole[..., : H * D].unflatten(-1, (H, D)), whole[..., H * D : (H + K) * D].unflatten(-1, (K, D))
    if not fused:
        q, k = q.contiguous(), k.contiguous()
    if sequence_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    weights = (1 + 0.3 * torch.randn(2, D, generator=g)).to(dtype)
    return q, k, weights[0].clone(), weights[1].clone()


def rotated(n: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[B, S, H, D] in float64, by the complex plane's own multiplication."""
    rotary = 2 * angle.shape[-1]
    turn = torch.polar(torch.ones_like(angle, dtype=torch.float64), angle.double()).unsqueeze(-2)
    part = n[..., :rotary]
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else torch.stack(part.chunk(2, -1), -1)
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    out = out.flatten(-2) if interleaved else torch.cat(out.unbind(-1), -1)
    return torch.cat([out, n[..., rotary:]], -1)


def exact(x, weight, angle, interleaved=True, sequence_dim=1, **options):
    if sequence_dim == 2:
        return exact(x.transpose(1, 2), weight, angle, interleaved, **options).transpose(1, 2)
    return rotated(oracle(x, weight, EPS, **options), angle, interleaved)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", ["repeated", "shared", "complex"])
@pytest.mark.parametrize("sequence_dim", [1, 2])
@pytest.mark.parametrize(("rotary", "batch"), [(D, None), (D, B), (D // 4, None)])
def test_forward_and_gradients_are_those_of_float64(interleaved, kind, sequence_dim, rotary, batch):
    if kind == "shared" and rotary != D:
        rotary = D  # D / 2 columns always mean the whole row
    angle = angles(S, rotary, batch)
    cos, sin = table(angle, kind, interleaved)
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [t.detach().requires_grad_() for t in stream(dtype=dtype, sequence_dim=sequence_dim, fused=True)]
        options = {"interleaved": interleaved, "sequence_dim": sequence_dim}
        y = qknorm.qk_rms_norm_rope(*leaves, cos, sin, EPS, **options)
        wanted = [exact(x, w, angle, **options) for x, w in ((leaves[0], leaves[2]), (leaves[1], leaves[3]))]
        dy = [torch.randn(t.shape, generator=torch.Generator().manual_seed(3)).to(dtype) for t in y]
        got = torch.autograd.grad(y, leaves, dy)
        expected = torch.autograd.grad(wanted, leaves, [t.double() for t in dy])
        for actual, target in zip((*y, *got), (*wanted, *expected), strict=True):
            assert actual.dtype is dtype
            assert actual.is_contiguous()
            assert_near(actual, target.detach(), 2, (torch.float32,))


def stock(q, k, norm_q, norm_k, cos, sin, unbind_dim=-1):
    rotate = {"sequence_dim": 1, "use_real_unbind_dim": unbind_dim}
    return tuple(apply_rotary_emb(n(x), (cos, sin), **rotate) for n, x in ((norm_q, q), (norm_k, k)))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("norm", [torch.nn.RMSNorm, RMSNorm])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_by_default_the_bits_are_the_stock_chains_under_cuda_autocast_cast_at_the_end(
    interleaved, dtype, norm, weight_dtype
):
    q, k, *weights = stream(dtype=dtype, fused=True)
    weights = [w.to(weight_dtype or dtype) for w in weights]
    norms = [norm(D, eps=EPS).to(weight_dtype or dtype) for _ in range(2)]
    for module, weight in zip(norms, weights, strict=True):
        module.weight.data.copy_(weight)
    cos, sin = table(angles(S), "repeated", interleaved)
    with torch.no_grad(), emulate_cuda_autocast(), torch.autocast("cpu", dtype=dtype):
        wanted = stock(q, k, *norms, cos, sin, -1 if interleaved else -2)
        rounding = "once" if norm is torch.nn.RMSNorm else "weight"
        ours = qknorm.qk_rms_norm_rope(q, k, *weights, cos, sin, EPS, interleaved=interleaved, rounding=rounding)
    for actual, expected in zip(ours, wanted, strict=True):
        assert torch.equal(actual, expected.to(dtype))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_round_before_rope_has_the_bits_of_norm_and_rotation_in_two_steps(rounding, dtype):
    q, k, q_weight, k_weight = stream(dtype=dtype)
    cos, sin = table(angles(S), "repeated", True)
    options = {"rounding": rounding, "unit_offset": True}
    ours = qknorm.qk_rms_norm_rope(q, k, q_weight, k_weight, cos, sin, EPS, round_before_rope=True, **options)
    steps = qknorm.qk_rms_norm(q, k, q_weight, k_weight, EPS, **options)
    for actual, n in zip(ours, steps, strict=True):
        assert torch.equal(actual, apply_rotary_emb(n, (cos, sin), sequence_dim=1))


def test_a_complex_table_has_the_bits_of_the_models_that_use_one():
    q, k, q_weight, k_weight = stream(dtype=torch.float32)
    cos, _ = table(angles(S), "complex", True)
    ours = qknorm.qk_rms_norm_rope(q, k, q_weight, k_weight, cos, None, EPS)
    for actual, n in zip(ours, qknorm.qk_rms_norm(q, k, q_weight, k_weight, EPS), strict=True):
        assert_near(actual, apply_rotary_emb(n, cos[None], use_real=False).double(), 1)


@pytest.mark.parametrize("sequence_dim", [1, 2])
def test_a_context_stands_in_front_with_its_own_weights_and_the_bits_of_a_cat(sequence_dim):
    main = [t.detach().requires_grad_() for t in stream(sequence_dim=sequence_dim, fused=True)]
    text = [t.detach().requires_grad_() for t in stream(T, seed=1, sequence_dim=sequence_dim)]
    cos, sin = table(angles(T + S), "repeated", True)
    options = {"sequence_dim": sequence_dim}
    joint = qknorm.qk_rms_norm_rope(*main, cos, sin, EPS, context=tuple(text), **options)
    parts = [
        qknorm.qk_rms_norm_rope(*text, cos[:T], sin[:T], EPS, **options),
        qknorm.qk_rms_norm_rope(*main, cos[T:], sin[T:], EPS, **options),
    ]
    wanted = [torch.cat(each, sequence_dim) for each in zip(*parts, strict=True)]
    dy = [torch.randn_like(t) for t in joint]
    for actual, expected in zip(joint, wanted, strict=True):
        assert actual.is_contiguous()
        assert torch.equal(actual, expected)
    for actual, expected in zip(
        torch.autograd.grad(joint, main + text, dy), torch.autograd.grad(wanted, main + text, dy), strict=True
    ):
        assert torch.equal(actual, expected)


def test_backward_saves_q_and_k_as_they_came_in_and_rstd_and_nothing_else():
    q, k, *weights = (t.detach().requires_grad_() for t in stream(fused=True))
    cos, sin = table(angles(S), "repeated", True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        qknorm.qk_rms_norm_rope(q, k, *weights, cos, sin, EPS)
    own = {t.data_ptr() for t in (q, k, *weights, cos, sin)}
    others = [t for t in saved if t.data_ptr() not in own]
    assert [(t.shape, t.dtype) for t in others] == [((B, S, H), torch.float32), ((B, S, K), torch.float32)]


def saved_bytes(run) -> int:
    """Of all storages that ``run`` keeps for backward, each counted once."""
    sizes = {}

    def keep(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        kept.append(t)  # so that no storage is freed and its address given to another
        return t

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run()
    return sum(sizes.values())


def test_saved_for_backward_is_at_most_052_of_what_the_stock_chain_saves_under_cuda_autocast():
    q, k, *weights = (t.detach().contiguous().requires_grad_() for t in stream(length=64))
    norms = [torch.nn.RMSNorm(D, EPS) for _ in range(2)]
    cos, sin = table(angles(64), "repeated", True)

    def chain():
        with torch.autocast("cpu", torch.bfloat16):
            return [x.to(torch.bfloat16) for x in stock(q, k, *norms, cos, sin)]

    with emulate_cuda_autocast():
        theirs = saved_bytes(chain)
    assert saved_bytes(lambda: qknorm.qk_rms_norm_rope(q, k, *weights, cos, sin, EPS)) <= 0.52 * theirs


def test_frozen_weights_and_inputs_get_no_gradient_and_others_the_same():
    tensors = stream()
    cos, sin = table(angles(S), "shared", True)

    def gradients(*trained):
        leaves = [t.detach().requires_grad_(i in trained) for i, t in enumerate(tensors)]
        q, k = qknorm.qk_rms_norm_rope(*leaves, cos, sin, EPS)
        (q.float().cos().sum() + k.float().cos().sum()).backward()
        return [leaf.grad for leaf in leaves]

    full = gradients(0, 1, 2, 3)
    for trained in ((0, 1), (2, 3), (0,), (1, 2)):
        for i, grad in enumerate(gradients(*trained)):
            assert (grad is None) == (i not in trained)
            assert grad is None or torch.equal(grad, full[i])


@pytest.mark.parametrize("interleaved", [True, False])
def test_every_order_of_differentiation_holds_in_float64(interleaved):
    leaves = [t[:1, :2].detach().requires_grad_() if t.dim() == 4 else t for t in stream(dtype=torch.float64)]
    leaves = [t.detach().requires_grad_() for t in leaves]
    cos, sin = table(angles(2), "repeated", interleaved)

    def call(*tensors):
        return qknorm.qk_rms_norm_rope(*tensors, cos, sin, EPS, interleaved=interleaved)

    torch.autograd.gradcheck(call, leaves, fast_mode=True, check_forward_ad=True)
    torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_jvp_and_func_grad_agree_with_the_eager_gradient():
    q, k, q_weight, k_weight = stream(dtype=torch.float64)
    cos, sin = table(angles(S), "shared", False)

    def call(q):
        return qknorm.qk_rms_norm_rope(q, k, q_weight, k_weight, cos, sin, EPS, interleaved=False)[0].sin().sum()

    leaf, tangent = q.clone().requires_grad_(), torch.randn_like(q)
    (dq,) = torch.autograd.grad(call(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(call)(q), dq)
    torch.testing.assert_close(torch.func.jvp(call, (q,), (tangent,))[1], (dq * tangent).sum())


def test_compiled_it_is_one_graph_forward_and_backward():
    leaves = [t.detach().requires_grad_() for t in stream(fused=True)]
    cos, sin = table(angles(S), "repeated", True)

    def call(*tensors):
        return qknorm.qk_rms_norm_rope(*tensors, cos, sin, EPS)

    results = []
    for run in (call, torch.compile(call, fullgraph=True)):
        y = run(*leaves)
        results.append((*y, *torch.autograd.grad(y, leaves, [torch.ones_like(t) for t in y])))
    for eager, compiled in zip(*results, strict=True):
        assert compiled.dtype is eager.dtype
        assert_near(compiled, eager.double(), 2, (torch.float32,))


def test_autocast_of_any_kind_changes_no_bit():
    leaves = [t.detach().requires_grad_() for t in stream()]
    cos, sin = table(angles(S), "repeated", True)
    plain = qknorm.qk_rms_norm_rope(*leaves, cos, sin, EPS)
    for dtype, enabled in itertools.product(HALF, (True, False)):
        with emulate_cuda_autocast(), torch.autocast("cpu", dtype=dtype, enabled=enabled):
            cast = qknorm.qk_rms_norm_rope(*leaves, cos, sin, EPS)
        assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(cast, plain, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: a.update(cos=a["cos"].double()), TypeError, "cos must be torch.float32, but is torch.float64"),
        (lambda a: a.update(cos=a["cos"][:-1], sin=a["sin"][:-1]), ValueError, r"cos must be \[5, R\]"),
        (lambda a: a.update(sin=None), TypeError, "cos must be torch.complex64 where sin is None"),
        (lambda a: a.update(sin=a["sin"][:, :32]), ValueError, "cos and sin must have one shape"),
        (lambda a: a.update(k=a["k"].float()), TypeError, "k must be torch.bfloat16 on cpu, as q"),
        (lambda a: a.update(k=a["k"][:, 1:]), ValueError, "q and k must have one sequence length"),
        (lambda a: a.update(q=a["q"].flatten(2)), ValueError, "q_weight must have shape"),
        (lambda a: a.update(q_weight=torch.ones(3)), ValueError, r"q_weight must have shape \[64\]"),
        (lambda a: a.update(sequence_dim=3), ValueError, "sequence_dim must be 1 .* or 2"),
        (lambda a: a.update(cos=a["cos"].requires_grad_()), ValueError, "cos gets no gradient"),
        (lambda a: a.update(context=stream(T)), ValueError, r"cos must be \[8, R\]"),
        (lambda a: a.update(backend="triton"), RuntimeError, "backend='triton' cannot run"),
        (lambda a: a.update(rounding="twice"), ValueError, "rounding must be one of"),
    ],
)
def test_bad_input_is_one_clear_error(change, error, message):
    names = ("q", "k", "q_weight", "k_weight")
    cos, sin = table(angles(S), "repeated", True)
    arguments = {**dict(zip(names, stream(), strict=True)), "cos": cos, "sin": sin}
    change(arguments)
    with pytest.raises(error, match=message):
        qknorm.qk_rms_norm_rope(**arguments)


def test_on_a_gpu_each_stream_is_one_launch_a_direction_and_one_reduction(monkeypatch):
    host_cost = pytest.importorskip("qknorm_benchmarks.host_cost")
    launched = []
    with host_cost.fake_gpu():
        from qknorm_kernels import qk_norm_rope

        compile_ = qk_norm_rope._compile

        def recording(kernel, *arguments):
            start = compile_(kernel, *arguments)
            return lambda *head: (launched.append(kernel.__name__), start(*head))[1]

        monkeypatch.setattr(qk_norm_rope, "_compile", recording)
        monkeypatch.setattr("qknorm_kernels.rms_norm._compile", recording)
        main, text = ([t.detach().requires_grad_() for t in stream(n)] for n in (S, T))
        cos, sin = table(angles(T + S), "repeated", True)
        for context, streams in ((None, 1), (tuple(text), 2)):
            launched.clear()
            start = 0 if context else T
            y = qknorm.qk_rms_norm_rope(*main, cos[start:], sin[start:], EPS, context=context)
            assert launched == ["forward_kernel"] * streams
            torch.autograd.backward(y, [torch.ones_like(t) for t in y])
            assert launched[streams:] == ["backward_kernel", "reduce_kernel"] * streams
        for kernel in (qk_norm_rope.forward_kernel, qk_norm_rope.backward_kernel):
            kernel.device_caches.clear()
    assert ops.rope_kernels_for(main[0], cos, sin, True, "auto") is None
