"""Real flash-attention compiles its Hopper kernel for our q and k, and refuses what the stock norms hand it.

In an environment of its own, for its wheels are large: `pip install -e ".[diffusers,flash-attn-4]" pytest`, then
`pytest tests/acceptance`. No GPU is needed: the tensors are fake, and what is compiled is never launched.
"""

import importlib.util

import pytest
import torch
from diffusers.utils import import_utils
from flash_attn.cute import flash_attn_func
from flash_attn.cute.interface import _flash_attn_fwd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import qknorm
from qknorm import tiny
from qknorm.audit import AttentionCall, capture_attention

pytestmark = pytest.mark.flash_attn_4


def attention_calls(model: torch.nn.Module, inputs: dict[str, object]) -> list[AttentionCall]:
    """The attention calls of a forward under CUDA's autocast policy."""
    policy = qknorm.emulate_cuda_autocast()
    with torch.no_grad(), policy, torch.autocast("cpu", dtype=torch.bfloat16), capture_attention(model) as calls:
        model(**inputs)
    assert {call.entry for call in calls} == {"dispatch_attention_fn"}
    return calls


def flash_attention(call: AttentionCall) -> torch.Tensor:
    """flash-attn-4's own function on fake CUDA tensors like the captured ones, with no kernel compiled before."""
    _flash_attn_fwd.compile_cache.clear()
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (
            torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="cuda")
            for x in (call.query, call.key, call.value)
        )
        return flash_attn_func(q, k, v)[0]


def compiled_kernels() -> int:
    """How many kernels the last call compiled."""
    return len(_flash_attn_fwd.compile_cache.cache)


@pytest.mark.parametrize(("name", "head_dim"), [("ChromaTransformer2DModel", 64), ("Flux2Transformer2DModel", 128)])
def test_flash_attention_refuses_the_stock_q_and_k_and_compiles_for_ours(name, head_dim):
    model, inputs = tiny.build(name, dtype=torch.bfloat16)

    stock = attention_calls(model, inputs)
    assert len(stock) >= 2  # a double-stream and a single-stream block
    for call in stock:
        assert call.query.shape[-1] == head_dim
        assert call.dtypes == (torch.float32, torch.float32, torch.bfloat16)
        with pytest.raises(AssertionError, match="must have the same dtype"):
            flash_attention(call)
        assert compiled_kernels() == 0

    assert len(qknorm.replace_qk_norms(model)) == 6

    replaced = attention_calls(model, inputs)
    assert [call.fqn for call in replaced] == [call.fqn for call in stock]
    for call in replaced:
        out = flash_attention(call)
        assert isinstance(out, FakeTensor)
        assert out.device.type == "cuda"
        assert out.shape == call.query.shape
        assert out.dtype == torch.bfloat16
        assert compiled_kernels() == 1


def test_diffusers_still_says_that_flash_attn_2_is_absent():
    assert importlib.util.find_spec("flash_attn") is not None  # flash-attn-4's, and flash-attn 2 has the same name
    assert not import_utils.is_flash_attn_available()
    model, _ = tiny.build("ChromaTransformer2DModel", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="Please install `flash-attn"):
        model.set_attention_backend("flash")
