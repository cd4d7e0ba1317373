"""Real flash-attention compiles its Hopper kernel for our q and k, and refuses what the stock norms hand it.

In an environment of its own, for its wheels are large: `pip install -e ".[diffusers,flash-attn-4]" pytest`, then
`pytest tests/acceptance`. No GPU is needed: the tensors are fake, and what is compiled is never launched.
"""

import pytest
import torch
from diffusers.utils import import_utils
from flash_attn.cute import flash_attn_func
from flash_attn.cute.interface import _flash_attn_fwd
from torch._subclasses.fake_tensor import FakeTensorMode

import qknorm
from qknorm import tiny
from qknorm.audit import AttentionCall, capture_attention

pytestmark = [
    # flash-attn-4 says both of its own code whenever it compiles for a fake tensor.
    pytest.mark.filterwarnings("ignore:Argument aux_data"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]


def attention_calls(model: torch.nn.Module, inputs: dict[str, object]) -> list[AttentionCall]:
    """The attention calls of a forward under CUDA's autocast policy."""
    policy = qknorm.emulate_cuda_autocast()
    with torch.no_grad(), policy, torch.autocast("cpu", dtype=torch.bfloat16), capture_attention(model) as calls:
        model(**inputs)
    assert {call.entry for call in calls} == {"dispatch_attention_fn"}
    return calls


def flash_attention(call: AttentionCall) -> tuple[torch.Tensor, int]:
    """flash-attn-4's own function on fake CUDA tensors like the captured ones, and how many kernels it compiled."""
    before = len(_flash_attn_fwd.compile_cache.cache)
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (
            torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="cuda")
            for x in (call.query, call.key, call.value)
        )
        out = flash_attn_func(q, k, v)[0]
    return out, len(_flash_attn_fwd.compile_cache.cache) - before


@pytest.mark.parametrize(("name", "head_dim"), [("ChromaTransformer2DModel", 64), ("Flux2Transformer2DModel", 128)])
def test_flash_attention_refuses_the_stock_q_and_k_and_compiles_for_ours(name, head_dim):
    model, inputs = tiny.build(name, dtype=torch.bfloat16)
    _flash_attn_fwd.compile_cache.clear()

    stock = attention_calls(model, inputs)
    assert len(stock) >= 2  # a double-stream and a single-stream block
    for call in stock:
        assert call.query.shape[-1] == head_dim
        with pytest.raises(AssertionError, match="must have the same dtype"):
            flash_attention(call)

    assert len(qknorm.replace_qk_norms(model)) == 6
    replaced = attention_calls(model, inputs)
    assert len(replaced) == len(stock)
    results = [flash_attention(call) for call in replaced]
    for call, (out, _) in zip(replaced, results, strict=True):
        assert out.shape == call.query.shape
        assert out.dtype == torch.bfloat16
    assert results[0][1] == 1


def test_diffusers_still_says_that_flash_attn_2_is_absent():
    assert not import_utils.is_flash_attn_available()
