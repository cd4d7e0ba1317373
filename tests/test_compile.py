"""Compiled, exported and packaged: what a compiler makes of a replaced norm, counted in the code that it generates."""

import math
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from onnx.reference import ReferenceEvaluator
from oracle import assert_near
from torch import nn
from torch._inductor.utils import run_fw_bw_and_get_code

import qknorm
from qknorm import emulate_cuda_autocast, ops, tiny

EPS = 1e-6
B, S, H, D = 2, 33, 4, 64

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rotary(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.outer(torch.arange(length).float(), torch.arange(D // 2).float() / D).repeat_interleave(2, dim=1)
    return angle.cos(), angle.sin()


class Attention(nn.Module):
    """Norm and RoPE of a query, as a Flux attention has them."""

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        self.norm_q = qknorm.QKRMSNorm(D, eps=EPS, dtype=torch.bfloat16, backend=backend)

    def forward(self, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return apply_rotary_emb(self.norm_q(q), (cos, sin), sequence_dim=1)


def query(length: int = S) -> torch.Tensor:
    return torch.randn(B, length, H, D, generator=torch.Generator().manual_seed(length)).bfloat16()


def kernels(code: str) -> int:
    """Calls of generated kernels in the wrapper of a graph."""
    return len(re.findall(r"^    +(?:cpp_fused|cpp_)\w*\(", code.split("def call(")[-1], re.MULTILINE))


def buffers(code: str) -> list[tuple[int, str]]:
    """Elements and dtype of every buffer that the wrapper of a graph allocates."""
    found = re.findall(r"empty_strided_cpu\(\(([^)]*)\), \([^)]*\), torch\.(\w+)\)", code.split("def call(")[-1])
    return [(math.prod(map(int, re.findall(r"\d+", sizes))), dtype) for sizes, dtype in found]


def test_norm_and_rope_are_one_kernel_each_way_and_no_float32_copy_reaches_memory():
    attention, (cos, sin) = Attention(), rotary(S)
    q = query().requires_grad_()
    attention.norm_q.weight.requires_grad_(False)
    _, (forward, backward) = run_fw_bw_and_get_code(lambda: torch.compile(attention, fullgraph=True)(q, cos, sin))
    assert (kernels(forward), kernels(backward)) == (1, 1)
    for code in (forward, backward):
        assert all(dtype == "bfloat16" for elements, dtype in buffers(code) if elements >= q.numel())


def test_compiled_autograd_saves_half_tensors_and_rstd_alone():
    attention, (cos, sin) = Attention(), rotary(S)
    q, saved = query().requires_grad_(), []
    compiled = torch.compile(attention, fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype, t.numel())) or t, lambda t: t):
        compiled(q, cos, sin)
    rows = B * S * H
    tables = {(torch.float32, S * D)}  # cos and sin are the caller's own
    assert {*saved} - tables <= {(torch.bfloat16, q.numel()), (torch.bfloat16, D), (torch.float32, rows)}
    assert sum(numel for dtype, numel in saved if dtype is torch.bfloat16) == q.numel() + D


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_every_mode_of_torch_compile_trains(mode):
    attention, (cos, sin) = Attention(), rotary(S)
    q, dy = query().requires_grad_(), query(S + 1)[:, 1:]
    results = []
    for run in (attention, torch.compile(attention, mode=mode, fullgraph=True)):
        y = run(q, cos, sin)
        results.append((y.detach(), *torch.autograd.grad(y, (q, attention.norm_q.weight), dy)))
    for eager, compiled in zip(*results, strict=True):
        assert eager.dtype is compiled.dtype
        assert_near(compiled, eager.double(), 2, (torch.float32,))


@pytest.mark.parametrize("dynamic", [True, None])
def test_ten_lengths_of_q_k_and_added_q_and_k_are_one_dynamic_graph(dynamic):
    norms = nn.ModuleList(qknorm.QKRMSNorm(D, eps=EPS, dtype=torch.bfloat16) for _ in range(4))
    graphs = []

    def counting(gm, inputs):
        graphs.append(gm)
        return gm.forward

    @torch.compile(backend=counting, fullgraph=True, dynamic=dynamic)
    def run(fused, context):
        q, k = (t.unflatten(-1, (H, D)) for t in fused.chunk(3, dim=-1)[:2])
        added = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in context.chunk(2, dim=-1))
        return [norm(t) for norm, t in zip(norms, (q, k, *added), strict=True)]

    def call(length):
        run(torch.randn(B, length, 3 * H * D).bfloat16(), torch.randn(B, length + 5, 2 * H * D).bfloat16())

    for length in (7, 8):
        call(length)
    after_two = len(graphs)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in range(9, 19):
            call(length)
    assert len(graphs) == after_two == (1 if dynamic else 2)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_autocast_entered_inside_or_outside_the_compiled_region_changes_nothing(where):
    attention, (cos, sin) = Attention(), rotary(S)
    attention.norm_q.float()
    seen = []

    def inner(q):
        seen.append(torch.is_autocast_enabled("cpu"))
        return attention(q, cos, sin)

    def autocast_inside(q):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner(q)

    run = torch.compile(autocast_inside if where == "inside" else inner, fullgraph=True, backend="aot_eager")
    q = query().requires_grad_()
    with emulate_cuda_autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "outside"):
            y = run(q)
        (dq,) = torch.autograd.grad(y.float().sum(), q)
    plain = attention(q, cos, sin)
    assert seen == [True]
    assert torch.equal(y, plain)
    assert torch.equal(dq, torch.autograd.grad(plain.float().sum(), q)[0])


@pytest.mark.parametrize("how", ["whole", "repeated blocks", "in place"])
def test_a_replaced_flux_compiles_whole_by_repeated_blocks_and_in_place(how):
    model, inputs = tiny.build("FluxTransformer2DModel", dtype=torch.bfloat16)
    qknorm.replace_qk_norms(model)
    with torch.no_grad():
        eager = model(**inputs).sample
    options = {"fullgraph": True, "backend": "aot_eager"}
    if how == "repeated blocks":
        model.compile_repeated_blocks(**options)
    elif how == "in place":
        model.compile(**options)
    run = torch.compile(model, **options) if how == "whole" else model
    out = run(**inputs).sample
    out.float().square().mean().backward()
    assert torch.equal(out.detach(), eager)
    norms = [module for _, module, _ in qknorm.find_qk_norms(model)]
    assert norms
    assert all(p.grad.abs().sum() > 0 for norm in norms for p in norm.parameters())


def test_an_upgrade_never_runs_code_from_a_stale_cache(tmp_path):
    script = textwrap.dedent(
        """
        import sys, torch
        from qknorm import ops, reference
        if sys.argv[1] == "new release":
            ops.REVISION += 1
            old = reference.rms_norm
            reference.rms_norm = lambda *args, **kw: tuple(2 * t for t in old(*args, **kw))
        import qknorm
        norm = torch.compile(lambda x: qknorm.rms_norm(x, None, 1e-6), fullgraph=True)
        print(norm(torch.ones(4, 8)).sum().item())
        """
    )
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run(release):
        command = [sys.executable, "-c", script, release]
        return float(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)

    assert run("old release") == pytest.approx(32, rel=1e-5)
    assert run("new release") == pytest.approx(64, rel=1e-5)


def exported() -> tuple[torch.export.ExportedProgram, tuple[torch.Tensor, ...], torch.Tensor]:
    attention, args = Attention(), (query(), *rotary(S))
    with torch.no_grad():
        return torch.export.export(attention, args), args, attention(*args)


def test_an_exported_block_keeps_the_operator_and_runs(tmp_path):
    program, args, eager = exported()
    assert any("qknorm.rms_norm" in str(node.target) for node in program.graph.nodes)
    torch.export.save(program, tmp_path / "block.pt2")
    assert torch.equal(torch.export.load(tmp_path / "block.pt2").module()(*args), eager)


def test_aot_inductor_packages_an_exported_block_for_the_cpu(tmp_path):
    program, args, eager = exported()
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "block.pt2"))
    with torch.no_grad():
        assert_near(torch._inductor.aoti_load_package(path)(*args), eager.double(), 2)


def test_onnx_by_the_dynamo_exporter_has_no_operator_of_ours(tmp_path):
    attention, args = Attention().float(), (query().float(), *rotary(S))
    with torch.no_grad():
        program = torch.onnx.export(attention, args, dynamo=True)
        eager = attention(*args)
    domains = {node.domain for node in program.model.graph}
    assert not any("qknorm" in domain for domain in domains)
    names = [value.name for value in program.model.graph.inputs]
    feeds = dict(zip(names, (t.numpy() for t in args), strict=True))
    (out,) = ReferenceEvaluator(program.model_proto).run(None, feeds)
    assert_near(torch.from_numpy(out), eager.double(), 2)


def test_the_opaque_operators_run_on_the_cpu_by_a_direct_call():
    x, weight, dy = query(), torch.rand(D).bfloat16(), query(S + 1)[:, 1:]
    y, rstd = torch.ops.qknorm.rms_norm_opaque(x, weight, EPS)
    assert torch.equal(y, qknorm.rms_norm(x, weight, EPS))
    opaque = torch.ops.qknorm.rms_norm_backward_opaque(dy, x, weight, rstd, EPS)
    plain = torch.ops.qknorm.rms_norm_backward(dy, x, weight, rstd, EPS, False, "once", 3, ops.REVISION)
    assert all(torch.equal(a, b) for a, b in zip(opaque, plain, strict=True))
