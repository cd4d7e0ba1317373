"""SimpleTuner's case: Flux 2 attention in mixed precision, where q and k left the norm in float32 and v did not.

Its pull request 3002 casts q and k to ``value.dtype`` after the norm. Swapping the norms gives the same bits, and stays
right beside such a cast.
"""

import copy
from contextlib import ExitStack

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux2 import Flux2Attention, Flux2ParallelSelfAttention
from norms import assert_same_bits, attention_inputs
from torch import nn

from qknorm import QKRMSNorm, replace_qk_norms
from qknorm.autocast import emulate_cuda_autocast

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = [torch.bfloat16, torch.float16]
WEIGHTS = [torch.float32, torch.bfloat16]


class CastingProcessor:
    """Double-stream attention with the cast to ``value.dtype`` after the norms that the trainer added."""

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask=None, image_rotary_emb=None):
        text, image = encoder_hidden_states, hidden_states
        q, k, v = heads(attn, attn.to_q(image), attn.to_k(image), attn.to_v(image))
        text_q, text_k, text_v = heads(attn, attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text))
        q, k = attn.norm_q(q).to(v.dtype), attn.norm_k(k).to(v.dtype)
        text_q, text_k = attn.norm_added_q(text_q).to(v.dtype), attn.norm_added_k(text_k).to(v.dtype)
        joint = (torch.cat(pair, dim=1) for pair in ((text_q, q), (text_k, k), (text_v, v)))
        text_out, out = attend(*joint, image_rotary_emb).split([text.shape[1], image.shape[1]], dim=1)
        return attn.to_out[0](out), attn.to_add_out(text_out)


class ParallelCastingProcessor:
    """The same for single-stream attention, whose q, k and v are chunks of one projection."""

    def __call__(self, attn, hidden_states, attention_mask=None, image_rotary_emb=None):
        projected = attn.to_qkv_mlp_proj(hidden_states)
        qkv, mlp = projected.split([3 * attn.inner_dim, projected.shape[-1] - 3 * attn.inner_dim], dim=-1)
        q, k, v = heads(attn, *qkv.chunk(3, dim=-1))
        q, k = attn.norm_q(q).to(v.dtype), attn.norm_k(k).to(v.dtype)
        return attn.to_out(torch.cat([attend(q, k, v, image_rotary_emb), attn.mlp_act_fn(mlp)], dim=-1))


def heads(attn, *projected):
    return (t.unflatten(-1, (attn.heads, attn.head_dim)) for t in projected)


def attend(q, k, v, rope):
    if rope is not None:
        q, k = (apply_rotary_emb(t, rope, sequence_dim=1) for t in (q, k))
    return dispatch_attention_fn(q, k, v).flatten(2, 3).to(q.dtype)


def double(weights):
    """The double-stream attention, its inputs and the shapes of its outputs."""
    torch.manual_seed(0)
    attention = Flux2Attention(query_dim=256, heads=4, dim_head=64, added_kv_proj_dim=256)
    hidden, encoder = torch.randn(1, 256, 256), torch.randn(1, 64, 256)
    return varied(attention, weights), (hidden, encoder), [(1, 256, 256), (1, 64, 256)]


def parallel(weights):
    """The single-stream attention, parallel to its feed-forward, its input and the shape of its output."""
    torch.manual_seed(0)
    attention = Flux2ParallelSelfAttention(query_dim=256, heads=4, dim_head=64)
    return varied(attention, weights), (torch.randn(1, 256, 256),), [(1, 256, 256)]


def varied(attention, weights):
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            if "norm" in name:
                parameter += 0.2 * torch.randn_like(parameter)
    return attention.to(weights)


def rotary(inputs):
    """cos and sin for the joint sequence."""
    angle = torch.rand(sum(t.shape[1] for t in inputs), 32).repeat_interleave(2, dim=1) * 6
    return angle.cos(), angle.sin()


def run(attention, inputs, dtype, rope=None):
    """The outputs, and what reached the attention backend, under CUDA's autocast to dtype (None: full precision)."""
    inputs = tuple(t.to(attention.norm_q.weight.dtype) for t in inputs)
    with ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(emulate_cuda_autocast(policy="2.12"))
            stack.enter_context(torch.autocast("cpu", dtype=dtype))
        calls = stack.enter_context(attention_inputs())
        outputs = attention(*inputs, image_rotary_emb=rope)
    assert len(calls) == 1
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs), calls[0]


def casts_to_value_dtype(attention, dtype):
    """The same attention whose norms are followed by a cast to the dtype of the value."""
    attention = copy.deepcopy(attention)
    for module in attention.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_hook(lambda module, args, normed: normed.to(dtype))
    return attention


@pytest.mark.parametrize("build", [double, parallel])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", HALF)
def test_q_k_and_v_reach_the_backend_in_one_half_dtype(build, weights, dtype):
    attention, inputs, shapes = build(weights)
    outputs, (q, k, v) = run(attention, inputs, dtype)
    assert [q.dtype, k.dtype, v.dtype] == [torch.float32, torch.float32, dtype]  # the fault, torch 2.12's

    assert len(replace_qk_norms(attention)) == (4 if build is double else 2)
    outputs, (q, k, v) = run(attention, inputs, dtype)
    assert [q.dtype, k.dtype, v.dtype] == [dtype] * 3
    assert [tuple(t.shape) for t in outputs] == shapes
    assert {t.dtype for t in outputs} == {dtype}


@pytest.mark.parametrize("build", [double, parallel])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rope", [False, True], ids=["", "rope"])
def test_it_equals_the_cast_to_value_dtype_bit_for_bit(build, weights, dtype, rope):
    attention, inputs, _ = build(weights)
    rope = rotary(inputs) if rope else None
    expected, expected_qkv = run(casts_to_value_dtype(attention, dtype), inputs, dtype, rope)
    replace_qk_norms(attention)
    outputs, qkv = run(attention, inputs, dtype, rope)
    for ours, theirs in zip([*qkv, *outputs], [*expected_qkv, *expected], strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("build", [double, parallel])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("rope", [False, True], ids=["", "rope"])
def test_it_changes_nothing_without_autocast(build, weights, rope):
    attention, inputs, shapes = build(weights)
    rope = rotary(inputs) if rope else None
    expected, expected_qkv = run(attention, inputs, None, rope)
    replace_qk_norms(attention)
    outputs, qkv = run(attention, inputs, None, rope)
    assert [tuple(t.shape) for t in outputs] == shapes
    for ours, theirs in zip([*qkv, *outputs], [*expected_qkv, *expected], strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("build", [double, parallel])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [*HALF, None])
def test_it_changes_nothing_where_the_model_casts_already(build, weights, dtype):
    attention, inputs, shapes = build(weights)
    rope = rotary(inputs)
    attention.processor = CastingProcessor() if build is double else ParallelCastingProcessor()
    expected, expected_qkv = run(attention, inputs, dtype, rope)
    assert {t.dtype for t in expected_qkv} == {dtype or weights}

    replace_qk_norms(attention)
    assert type(attention.norm_q) is QKRMSNorm
    outputs, qkv = run(attention, inputs, dtype, rope)
    assert [tuple(t.shape) for t in outputs] == shapes
    for ours, theirs in zip([*qkv, *outputs], [*expected_qkv, *expected], strict=True):
        assert_same_bits(ours, theirs)

    stock = build(weights)[0]
    replace_qk_norms(stock)
    for ours, theirs in zip(outputs, run(stock, inputs, dtype, rope)[0], strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("build", [double, parallel])
@pytest.mark.parametrize("dtype", HALF)
def test_gradients_reach_every_parameter_as_with_the_cast(build, dtype):
    attention, inputs, _ = build(torch.float32)
    casting = casts_to_value_dtype(attention, dtype)
    replace_qk_norms(attention)
    for model in (attention, casting):
        outputs, _ = run(model, inputs, dtype)
        sum(t.float().square().mean() for t in outputs).backward()
    for (name, ours), theirs in zip(attention.named_parameters(), casting.parameters(), strict=True):
        assert ours.grad.dtype is torch.float32, name
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error <= 2 * torch.finfo(dtype).eps, name
