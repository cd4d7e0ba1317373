"""Activations that are computed again in backward: loss and gradients are those without checkpointing, bit for bit."""

import copy
import functools
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from norms import assert_same_bits
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from qknorm import QKRMSNorm, emulate_cuda_autocast, reference, replace_qk_norms, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, TEXT, IMAGE = 2, 6, 16
MODES = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
# Whether one opens the emulation too where autocast is entered: on a GPU its policy is always there.
PLACES = ["outside", "inside", "inside with the emulation"]
# The autocast that surrounds backward.
AROUND = {
    "nothing": nullcontext,
    "disabled": lambda: torch.autocast("cpu", enabled=False),
    "fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
}


@pytest.fixture(scope="module", autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def norm_calls(monkeypatch):
    """One entry for each forward of a norm; Inductor's code has none, for it decomposes the operator."""
    calls, original = [], reference.rms_norm_in_blocks
    monkeypatch.setattr(reference, "rms_norm_in_blocks", lambda *args: calls.append(1) or original(*args))
    return calls


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[1]))


def rotary(length):
    angle = random(length, 32).repeat_interleave(2, dim=1)
    return angle.cos(), angle.sin()


def chroma():
    model, inputs = tiny.build("ChromaTransformer2DModel")
    assert len(replace_qk_norms(model)) == 6
    return model.train(), inputs


def double_block(backend=None):
    """The double-stream block of Chroma, four q/k norms, and its inputs."""
    block = chroma()[0].transformer_blocks[0]
    if backend:
        block.compile(fullgraph=True, backend=backend)
    rope, dim = rotary(TEXT + IMAGE), block.norm2.normalized_shape[0]

    def forward(*args):
        return block(*args, rope)

    return block, forward, (random(BATCH, IMAGE, dim), random(BATCH, TEXT, dim), random(BATCH, 12, dim))


def attention(backend=None):
    """The attention of a single-stream block of Chroma, two q/k norms, and its input."""
    module = chroma()[0].single_transformer_blocks[0].attn
    if backend:
        module.compile(fullgraph=True, backend=backend)
    rope = rotary(TEXT + IMAGE)

    def forward(x):
        return (module(hidden_states=x, image_rotary_emb=rope),)

    return module, forward, (random(BATCH, TEXT + IMAGE, module.to_q.in_features),)


def query():
    """What a query passes in that attention: projection, norm and RoPE. Of one of these Inductor makes a kernel."""
    attn, _, inputs = attention()
    module, rope = nn.Sequential(OrderedDict(to_q=attn.to_q, norm_q=attn.norm_q)), rotary(TEXT + IMAGE)

    def forward(x):
        q = module.norm_q(module.to_q(x).unflatten(-1, (attn.heads, -1)))
        return (apply_rotary_emb(q, rope, sequence_dim=1),)

    return module, forward, inputs


def unchanged(region):
    return region


def checkpointed(region, reentrant=False):
    return lambda *args: checkpoint(region, *args, use_reentrant=reentrant)


def nested(region):
    return checkpointed(checkpointed(region))


def saving(policy):
    """Selective checkpointing that names the operator of the norm, and computes everything else again."""

    def choose(ctx, op, *args, **kwargs):
        return policy if op == torch.ops.qknorm.rms_norm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    return lambda region: lambda *args: checkpoint(region, *args, use_reentrant=False, context_fn=contexts)


MUST_SAVE, PREFER_SAVE = saving(CheckpointPolicy.MUST_SAVE), saving(CheckpointPolicy.PREFER_SAVE)


def step(case, wrap=unchanged, place="outside", around="nothing", backend=None):
    """Loss and every gradient, by name; ``backend`` compiles the checkpoint and what is inside it, as one graph."""
    module, forward, inputs = case
    module.zero_grad(set_to_none=True)
    inputs = [x.clone().requires_grad_() for x in inputs]
    emulation, inner_emulation = emulate_cuda_autocast(), nullcontext()
    if place == "inside with the emulation":
        emulation, inner_emulation = nullcontext(), emulate_cuda_autocast()

    def autocast(where):
        return torch.autocast("cpu", dtype=torch.bfloat16) if place.startswith(where) else nullcontext()

    def region(*args):
        with inner_emulation, autocast("inside"):
            return forward(*args)

    whole = wrap(region)
    if backend:
        torch._dynamo.reset()  # every region is one code object, whose graphs would add up to the recompile limit
        whole = torch.compile(whole, fullgraph=True, backend=backend)
    with emulation:
        with autocast("outside"):
            # Outside the graph: fused with what is before it, a sum over everything is taken in another order.
            loss = sum(y.float().square().mean() for y in whole(*inputs))
        with AROUND[around]():
            loss.backward()
    gradients = {f"input {i}": x.grad for i, x in enumerate(inputs)}
    gradients |= {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert all(norm.weight.grad.any() for norm in module.modules() if isinstance(norm, QKRMSNorm))
    return {"loss": loss.detach(), **gradients}


def assert_same_step(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert_same_bits(value, theirs[name])


# Around a block, eager and compiled


@pytest.fixture(scope="module", params=[None, "aot_eager"], ids=["eager", "aot_eager"])
def block(request):
    return double_block(request.param)


@MODES
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("around", AROUND)
def test_a_checkpointed_block_trains_as_without_wherever_autocast_is_entered(block, reentrant, place, around):
    if place == "inside with the emulation" and around == "fp16":
        around = "nothing"  # the next test
    ours = step(block, functools.partial(checkpointed, reentrant=reentrant), place, around)
    assert_same_step(ours, step(block, unchanged, place, around))


def rope_alone():
    """Rotary embedding of a bfloat16 tensor, with no norm."""
    x, (cos, sin) = random(BATCH, IMAGE, 2, 64).bfloat16(), rotary(IMAGE)
    return None, lambda x: (apply_rotary_emb(x, (cos, sin), sequence_dim=1),), (x,)


@pytest.mark.parametrize("case", [double_block, rope_alone])
@pytest.mark.parametrize("wrap", [unchanged, checkpointed])
def test_torch_itself_refuses_backward_of_rope_in_cpu_autocast_of_another_half_dtype(case, wrap):
    # CPU autocast's own policy promotes the operands of stack, which that backward calls on bfloat16, and knows no half
    # dtype but that of the region. CUDA's leaves stack alone: there, and in the emulation, it runs.
    _, forward, inputs = case()
    with emulate_cuda_autocast(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = wrap(forward)(*(x.requires_grad_() for x in inputs))[0].float().sum()
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(RuntimeError, match="Unexpected floating Scalar"):
        loss.backward()


@pytest.mark.parametrize("wrap", [unchanged, checkpointed])
def test_the_autocast_around_backward_changes_matmuls_alone_and_nothing_that_is_compiled(wrap):
    # In eager backward torch runs a matmul in the dtype of the autocast that is active then; the norm does not care.
    eager, compiled = attention(), attention("aot_eager")
    plain, other = step(eager, wrap), step(eager, wrap, around="fp16")
    changed = {name for name in plain if not torch.equal(plain[name], other[name])}
    assert changed == {"input 0", "to_q.weight", "to_k.weight", "to_v.weight"}
    assert_same_step(step(compiled, wrap, around="fp16"), plain)


# Inside one graph, and selective


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("place", ["outside", "inside"])
@pytest.mark.parametrize(
    ("wrap", "forwards"),
    [
        (unchanged, 2),
        (functools.partial(checkpointed, reentrant=True), 4),
        (functools.partial(checkpointed, reentrant=False), 4),
        (nested, 4),
        (MUST_SAVE, 2),
        (PREFER_SAVE, 2),
    ],
    ids=["no checkpoint", "reentrant", "non-reentrant", "nested", "MUST_SAVE", "PREFER_SAVE"],
)
def test_the_norms_run_twice_unless_the_policy_saves_them(backend, place, wrap, forwards, norm_calls):
    case = attention()
    expected = step(case, place=place)
    norm_calls.clear()
    ours = step(case, wrap, place, backend=backend)
    assert len(norm_calls) == forwards
    assert_same_step(ours, expected)


@pytest.mark.parametrize(("policy", "forwards"), [(MUST_SAVE, 4), (PREFER_SAVE, 4), (checkpointed, 8)])
def test_a_policy_that_names_the_operator_saves_the_norms_of_a_block(policy, forwards, norm_calls):
    case = double_block()
    expected = step(case)
    for around in AROUND:
        norm_calls.clear()
        ours = step(case, policy, around=around)
        assert len(norm_calls) == forwards
        assert_same_step(ours, expected if around != "fp16" else step(case, around=around))


def test_a_memory_budget_for_which_torch_compile_recomputes_by_itself_changes_nothing(norm_calls):
    case = attention()
    expected = step(case)
    norm_calls.clear()
    with functorch_config.patch(activation_memory_budget=0.0):
        ours = step(case, backend="aot_eager")
    assert len(norm_calls) == 4
    assert_same_step(ours, expected)


# Inductor


def test_inductor_code_that_is_computed_again_gives_the_same_bits():
    case = attention("inductor")
    expected = step(case)
    for reentrant in (True, False):
        assert_same_step(step(case, functools.partial(checkpointed, reentrant=reentrant)), expected)


def test_a_graph_of_inductor_with_a_checkpoint_inside_gives_the_same_bits_where_it_keeps_its_casts():
    # What is saved bounds what Inductor fuses, and inside a fused kernel it drops the casts to bfloat16, of any code:
    # without its switch that keeps them, a graph with a checkpoint in it may round less often than one without.
    case, kept = query(), []

    def pack(t):
        kept.append((t.dtype, t.numel()))
        return t

    normed = torch.float32, case[2][0].numel()  # as many as in the input and in what the loss squares, kept too
    with torch._inductor.config.patch(emulate_precision_casts=True):
        expected = step(case, backend="inductor")
        for wrap, float32_kept in ((checkpointed, 2), (PREFER_SAVE, 2), (MUST_SAVE, 3)):
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                ours = step(case, wrap, backend="inductor")
            assert_same_step(ours, expected)
            # Inductor decomposes the operator first: then MUST_SAVE holds for every part of it.
            assert kept.count(normed) == float32_kept


# Whole models


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "ChromaTransformer2DModel"])
def test_gradient_checkpointing_of_diffusers_changes_nothing_under_autocast(name, backend, norm_calls):
    plain, inputs = tiny.build(name)
    replace_qk_norms(plain.train())
    model = copy.deepcopy(plain)
    if backend:
        for each in (plain, model):
            for block in each.single_transformer_blocks:
                block.compile(fullgraph=True, backend=backend)

    def whole(module):
        return module, lambda **_: (module(**inputs).sample,), ()

    expected = step(whole(plain))
    assert len(norm_calls) == 6
    for chosen in (None, functools.partial(checkpoint, use_reentrant=True)):
        model.enable_gradient_checkpointing(chosen)
        for around in ("nothing", "disabled"):
            norm_calls.clear()
            ours = step(whole(model), around=around)
            assert len(norm_calls) == 12
            different = {each for each in ours if not torch.equal(ours[each], expected[each])}
            if chosen is None:
                assert not different
            # Every block reads temb. Reentrant checkpointing sums its gradients, which are bfloat16, block by block.
            assert all(each.startswith("time_text_embed.") for each in different)
