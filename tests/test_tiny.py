"""Tiny models: what the tests that use them take for granted."""

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from qknorm import emulate_cuda_autocast, tiny
from qknorm.adapters import QK_NORM_NAMES

# Norms that the class builds, and its forward has no use for.
NEVER_CALLED = {
    "NucleusMoEImageTransformer2DModel": ("attn.norm_added_q",),
    "RFD4ProteinaAutoencoder": ("encoder.",),
    "SanaWMLTX2RefinerTransformer3DModel": ("audio_attn", "audio_to_video_attn", "video_to_audio_attn"),
}
# What diffusers itself cannot run, and how that ends.
UPSTREAM_ERRORS = {
    ("Kandinsky5Transformer3DModel", "bfloat16"): "mat1 and mat2 must have the same dtype",
    ("ZImageControlNetModel", "float32, autocast"): "Index put requires the source and destination dtypes match",
}
# Draws noise in its own dtype: up to torch 2.11 another one in bfloat16 than in float32.
DRAWS_NOISE = ("LTX2VideoDiffusionDecoderModel",)


pytestmark = pytest.mark.usefixtures("one_thread")


def tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        return [tensor for item in output.values() for tensor in tensors(item)]
    if isinstance(output, (list, tuple)):
        return [tensor for item in output for tensor in tensors(item)]
    return []


@torch.no_grad()
def run(model: nn.Module, inputs: tiny.Inputs) -> torch.Tensor:
    """The floating-point outputs of a forward, as one vector."""
    found = [tensor for tensor in tensors(model(**inputs)) if tensor.is_floating_point()]
    return torch.cat([tensor.flatten().float() for tensor in found])


@functools.cache
def reference(name: str) -> torch.Tensor:
    return run(*tiny.build(name))


def qk_norms(model: nn.Module) -> dict[str, nn.Module]:
    return {fqn: module for fqn, module in model.named_modules() if fqn.rpartition(".")[2] in QK_NORM_NAMES}


@pytest.mark.parametrize("name", tiny.names())
def test_every_class_builds_and_its_output_is_finite_and_the_same_again(name: str) -> None:
    model, inputs = tiny.build(name)
    first = run(model, inputs)
    assert not model.training
    assert first.isfinite().all()
    assert first.std() > 0.01
    torch.testing.assert_close(run(model, inputs), first, rtol=0, atol=0, msg="a second forward of the same inputs")


@pytest.mark.parametrize("name", tiny.names())
def test_output_depends_on_the_seed_alone_and_the_global_random_state_is_left_alone(name: str) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = run(*tiny.build(name, seed=3))
    torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)
    torch.rand(5)
    torch.testing.assert_close(run(*tiny.build(name, seed=3)), first, rtol=0, atol=0)
    assert not torch.equal(run(*tiny.build(name, seed=4)), first)


@pytest.mark.parametrize("name", tiny.names())
def test_every_qk_norm_is_called_on_tokens(name: str) -> None:
    model, inputs = tiny.build(name)
    elements = dict.fromkeys(qk_norms(model), 0)
    for fqn, module in qk_norms(model).items():
        module.register_forward_hook(
            lambda module, args, output, fqn=fqn: elements.update({fqn: elements[fqn] + output.numel()})
        )
    run(model, inputs)
    idle = {fqn for fqn, count in elements.items() if not count}
    assert len(elements) >= 2
    assert idle == {fqn for fqn in elements if any(part in fqn for part in NEVER_CALLED.get(name, ()))}


@pytest.mark.parametrize("name", tiny.names())
def test_output_depends_on_what_the_qk_norms_return(name: str) -> None:
    model, inputs = tiny.build(name)
    for fqn, module in qk_norms(model).items():
        if "k" in fqn.rpartition(".")[2].replace("key", "k").split("_"):
            module.register_forward_hook(lambda module, args, output: -output)
    assert (run(model, inputs) - reference(name)).norm() > 5e-3 * reference(name).norm()


@pytest.mark.parametrize("name", tiny.names())
def test_no_parameter_is_left_uninitialised_or_constant(name: str) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty then fills with NaN
    try:
        model, _ = tiny.build(name)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    for fqn, parameter in model.named_parameters():
        assert parameter.isfinite().all(), fqn
        assert parameter.numel() < 2 or parameter.std() > 0, fqn


@pytest.mark.parametrize("case", ["bfloat16", "float32, autocast", "bfloat16, autocast"])
@pytest.mark.parametrize("name", tiny.names())
def test_half_precision_runs_wherever_the_stock_model_can(name: str, case: str) -> None:
    model, inputs = tiny.build(name, dtype=torch.float32 if "float32" in case else torch.bfloat16)
    with emulate_cuda_autocast(), torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in case):
        if (name, case) in UPSTREAM_ERRORS:
            with pytest.raises(RuntimeError, match=UPSTREAM_ERRORS[name, case]):
                run(model, inputs)
            return
        output = run(model, inputs)
    assert output.isfinite().all()
    if name not in DRAWS_NOISE:
        assert (output - reference(name)).norm() < 0.05 * reference(name).norm()


def test_dtype_is_that_of_every_parameter_and_float_input_but_rotary_tables() -> None:
    model, inputs = tiny.build("CogVideoXTransformer3DModel", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert {key: {tensor.dtype for tensor in tensors(value)} for key, value in inputs.items()} == {
        "hidden_states": {torch.bfloat16},
        "encoder_hidden_states": {torch.bfloat16},
        "timestep": {torch.int64},
        "image_rotary_emb": {torch.float32},
    }
    _, inputs = tiny.build("ZImageTransformer2DModel", dtype=torch.float16)
    assert {tensor.dtype for tensor in tensors(inputs)} == {torch.float16}


def test_inputs_have_the_same_values_in_every_dtype() -> None:
    for name in ("FluxTransformer2DModel", "ZImageTransformer2DModel"):
        _, inputs = tiny.build(name)
        _, half = tiny.build(name, dtype=torch.bfloat16)
        for tensor, rounded in zip(tensors(inputs), tensors(half), strict=True):
            torch.testing.assert_close(rounded.float(), tensor, rtol=0, atol=0)


def test_model_and_inputs_go_to_the_device() -> None:
    model, inputs = tiny.build("FluxTransformer2DModel", device="meta")
    assert {tensor.device.type for tensor in [*model.parameters(), *tensors(inputs)]} == {"meta"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FluxTransformer2DModle", "Close to it: FluxTransformer2DModel"),
        ("SD3Transformer2DModel", "is as: SD3Transformer2DModel#SD35Transformer, "),
        ("WanTransformer3DModel#nothing", "is as: WanTransformer3DModel$"),
        ("UNet2DModel", "no tiny configuration of it here.*module:function"),
    ],
)
def test_an_unknown_name_is_answered_with_what_would_do(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.build(name)


def test_without_diffusers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r'pip install "qknorm\[diffusers\]"'):
        tiny.build("FluxTransformer2DModel")


def test_importing_it_imports_no_diffusers() -> None:
    code = "import sys, qknorm.tiny; qknorm.tiny.names(); sys.exit('diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
