"""``QKRMSNorm``, its kin and the twins: each has the bits of the class that it replaces, in the dtype of its input."""

import copy
import inspect
import io
import itertools
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from diffusers.models.transformers.transformer_stable_audio3 import StableAudio3RMSNorm
from norms import FLOATS, KNOWN, RMS_NORMS, TWINS, LigerRMSNorm, LlamaRMSNorm, assert_same_bits
from torch import nn

from qknorm import QKRMSNorm
from qknorm import module as qk_module
from qknorm.adapters import Adapter
from qknorm.autocast import emulate_cuda_autocast

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BOTH_DTYPES = list(itertools.product(FLOATS, FLOATS))
# What attention code hands to a norm, made of f(*shape).
LAYOUTS = {
    "(B, S, H, D)": lambda f, d: f(2, 5, 3, d),
    "(B, H, S, D) view": lambda f, d: f(2, 5, 3, d).transpose(1, 2),
    "chunk of a fused qkv": lambda f, d: f(2, 5, 9 * d + 5).split(3 * d, -1)[1].unflatten(-1, (3, d)),
    "(B, S, D) with an offset": lambda f, d: f(2, 6, d)[:, 1:],
    "(S, D) expanded": lambda f, d: f(1, d).expand(5, d),
    "(D,)": lambda f, d: f(d),
}


def made(layout, dim, dtype):
    """An input of the layout and dtype; its samples differ in size by orders of magnitude."""
    torch.manual_seed(dim)

    def base(*shape):
        size = torch.logspace(-1, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
        return (torch.randn(shape) * size).to(dtype)

    return LAYOUTS[layout](base, dim)


def each_autocast(dtypes):
    """For a ``for`` statement: go through the dtypes, each under CUDA's autocast to that dtype (None: outside it)."""
    with emulate_cuda_autocast(policy="2.12"):
        for dtype in dtypes:
            with torch.autocast("cpu", dtype=dtype or BF16, enabled=dtype is not None):
                yield dtype


# Signature and attributes


def test_the_positional_arguments_are_those_of_nn_rms_norm():
    ours = list(inspect.signature(QKRMSNorm).parameters.values())
    theirs = list(inspect.signature(nn.RMSNorm).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    extra = {p.name: (p.kind, p.default) for p in ours[len(theirs) :]}
    keyword = inspect.Parameter.KEYWORD_ONLY
    assert extra == {
        "unit_offset": (keyword, False),
        "rounding": (keyword, "once"),
        "backend": (keyword, "auto"),
    }


@pytest.mark.parametrize("shape", [8, np.int64(8), [8], (2, 4), torch.Size([3, 2, 2])], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_it_is_built_like_nn_rms_norm(shape, affine):
    ours = QKRMSNorm(shape, 1e-5, affine, device="meta", dtype=BF16)
    theirs = nn.RMSNorm(shape, 1e-5, affine, device="meta", dtype=BF16)
    assert isinstance(ours, nn.RMSNorm)
    for name in ("normalized_shape", "eps", "elementwise_affine", "training"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert [(n, p.shape, p.dtype, p.device) for n, p in ours.named_parameters()] == [
        (n, p.shape, p.dtype, p.device) for n, p in theirs.named_parameters()
    ]
    assert (ours.weight is None) == (theirs.weight is None)
    assert ours.to_empty(device="cpu").state_dict().keys() == theirs.state_dict().keys()


def test_a_weight_starts_at_the_value_that_multiplies_by_one():
    x = torch.randn(3, 8)
    zero_centred = QKRMSNorm(8, unit_offset=True)
    assert_same_bits(zero_centred.weight.detach(), torch.zeros(8))
    assert_same_bits(QKRMSNorm(8).weight.detach(), torch.ones(8))
    assert_same_bits(zero_centred(x), QKRMSNorm(8)(x))
    with torch.no_grad():
        zero_centred.weight.fill_(3.0)
    zero_centred.reset_parameters()
    assert_same_bits(zero_centred.weight.detach(), torch.zeros(8))


@pytest.mark.parametrize("option", ["rounding", "backend"])
def test_an_unknown_option_is_an_error_that_names_it(option):
    with pytest.raises(ValueError, match=f"{option} must be one of .* 'twice'"):
        QKRMSNorm(8, **{option: "twice"})


def test_repr_tells_what_is_normed_and_how():
    assert repr(QKRMSNorm((2, 4), 1e-6, unit_offset=True, rounding="weight", backend="torch")) == (
        "QKRMSNorm((2, 4), eps=1e-06, elementwise_affine=True, unit_offset=True, rounding='weight', backend='torch')"
    )
    assert "QKGammaRMSNorm((8,), eps=1e-06" in repr(QKRMSNorm.from_norm(StableAudio3RMSNorm(8)))


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("w_dtype", FLOATS)
def test_several_dimensions_are_normed_together_as_nn_rms_norm_does(x_dtype, w_dtype):
    old = nn.RMSNorm((3, 8), eps=1e-6)
    nn.init.normal_(old.weight)
    old.to(w_dtype)
    x = torch.randn(2, 5, 3, 8).to(x_dtype).transpose(0, 1)
    assert_same_bits(QKRMSNorm.from_norm(old)(x), old(x).to(x_dtype))
    with pytest.raises(ValueError, match=r"x must end in \[3, 8\], but is \[2, 8, 3\]"):
        QKRMSNorm.from_norm(old)(torch.randn(2, 8, 3))


# The numbers


@pytest.mark.parametrize("norm", KNOWN)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), BOTH_DTYPES)
def test_the_bits_are_those_of_the_class_in_the_dtype_of_the_input(norm, x_dtype, w_dtype):
    judged = 0
    for dim in (7, 64, 80, 128):
        old = KNOWN[norm](dim, w_dtype)
        new = QKRMSNorm.from_norm(old)
        inputs = [made(layout, dim, x_dtype) for layout in LAYOUTS]
        for autocast in each_autocast((None, BF16, FP16)):
            for x in inputs:
                try:
                    expected = old(x).to(x_dtype)
                except RuntimeError as error:  # torch's LayerNorm takes no mixed half dtypes, and says so
                    assert isinstance(old, nn.LayerNorm)
                    assert autocast is None
                    with pytest.raises(RuntimeError, match=re.escape(str(error))):
                        new(x)
                    continue
                assert_same_bits(new(x), expected)
                judged += 1
    assert judged >= 4 * len(LAYOUTS) * 2


@pytest.mark.parametrize("norm", KNOWN)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_dtype_of_the_input_comes_back_where_the_class_loses_it(norm, dtype):
    leaks = {"torch", "torch, no eps", "torch, no weight", "diffusers", "diffusers, bias", "BFL", "llama"}
    leaks |= {"LayerNorm", "LayerNorm, no weight", "LpNorm", "DynamicTanh"}
    old = KNOWN[norm](16, FP32)
    x = torch.randn(2, 3, 16, dtype=dtype)
    for _ in each_autocast([dtype]):
        assert old(x).dtype is (FP32 if norm in leaks else dtype)
        assert QKRMSNorm.from_norm(old)(x).dtype is dtype
        assert QKRMSNorm.from_norm(old)(x.float()).dtype is FP32


@pytest.mark.parametrize("norm", KNOWN)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32), (FP16, FP32)])
def test_gradients_are_those_of_the_formula_in_float64(norm, x_dtype, w_dtype):
    old = KNOWN[norm](64, w_dtype)
    new = QKRMSNorm.from_norm(old)
    x = made("(B, H, S, D) view", 64, x_dtype).requires_grad_()
    dy = torch.randn(x.shape).to(x_dtype)
    for _ in each_autocast([BF16]):
        y = new(x)
    y.backward(dy)

    exact = KNOWN[norm](64, w_dtype).double()
    exact.load_state_dict(old.state_dict())
    x64 = x.detach().double().requires_grad_()
    y64 = exact(x64) if norm not in FORMULAS else FORMULAS[norm](exact, x64)
    y64.backward(dy.double())
    assert_near(x.grad, x64.grad, x_dtype, x_dtype)
    gradients = {name: p.grad for name, p in new.named_parameters()}
    assert gradients.keys() == {name for name, _ in exact.named_parameters()}
    for name, parameter in exact.named_parameters():
        assert_near(gradients[name], parameter.grad, w_dtype, x_dtype)


def formula(weight="weight", eps="eps", offset=0.0):
    """A norm in float64 throughout, for classes that cast to float32 themselves."""

    def norm(module, x):
        e = getattr(module, eps) if isinstance(eps, str) else eps
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + (torch.finfo(FP32).eps if e is None else e))
        scale, bias = getattr(module, weight), getattr(module, "bias", None)
        y = y if scale is None else y * (scale + offset)
        return y if bias is None else y + bias

    return norm


FORMULAS = dict.fromkeys(RMS_NORMS, formula()) | {
    "Krea2": formula(offset=1.0),
    "StableAudio3": formula("gamma"),
    "BFL": formula("scale", 1e-6),
    "zero-centred scale": formula("scale", offset=1.0),
    "llama": formula(eps="variance_epsilon"),
}


def assert_near(actual, expected, dtype, coarsest):
    """In the dtype, and within its rounding and that of the coarsest value that went in, of the size of the whole."""
    assert actual.dtype is dtype
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= 2 * max(torch.finfo(dtype).eps, torch.finfo(coarsest).eps) + 1e-6


@pytest.mark.parametrize("norm", RMS_NORMS)
def test_float64_is_true_float64_whatever_the_class_does(norm):
    exact = KNOWN[norm](64).double()
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter += 1e-9 * torch.randn_like(parameter)  # what a float32 could not hold
    x = torch.randn(5, 64, dtype=FP64)
    expected = exact(x) if norm == "torch, no eps" else FORMULAS[norm](exact, x)
    new = QKRMSNorm.from_norm(exact)
    torch.testing.assert_close(new(x), expected, rtol=1e-13, atol=1e-13)
    if "bias" not in norm:
        torch.testing.assert_close(torch.jit.script(new)(x), expected, rtol=1e-13, atol=1e-13)


def test_a_frozen_weight_gets_no_gradient_and_an_input_may_need_none():
    norm = QKRMSNorm(8)
    norm.weight.requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    norm(x).sum().backward()
    assert norm.weight.grad is None
    assert x.grad is not None
    norm.weight.requires_grad_(True)
    norm(x.detach()).sum().backward()
    assert norm.weight.grad is not None


# from_norm


@pytest.mark.parametrize("norm", KNOWN)
def test_from_norm_takes_every_known_class_and_leaves_the_norm_alone(norm):
    old = KNOWN[norm](16, BF16).eval()
    attributes, cls = dict(old.__dict__), type(old)
    new = QKRMSNorm.from_norm(old)
    assert type(new).__name__ == KNOWN[norm].stand_in
    assert isinstance(new, QKRMSNorm if norm in RMS_NORMS else cls)
    assert not new.training
    assert type(old) is cls
    assert old.__dict__ == attributes
    assert dict(new.named_parameters()).keys() == dict(old.named_parameters()).keys()
    assert all(new.get_parameter(name) is p for name, p in old.named_parameters())
    for name, p in list(old.named_parameters()):
        setattr(new, name, nn.Parameter(torch.zeros_like(p)))
        assert old.get_parameter(name) is p


def test_from_norm_reads_shape_eps_offset_and_rounding():
    def seen(name):
        new = QKRMSNorm.from_norm(KNOWN[name](16))
        return new.normalized_shape, new.eps, new.elementwise_affine, new.unit_offset, new.rounding, new.backend

    assert seen("torch") == ((16,), 1e-6, True, False, "once", "auto")
    assert seen("torch, no eps") == ((16,), None, True, False, "once", "auto")
    assert seen("torch, no weight") == ((16,), 1e-5, False, False, "once", "auto")
    assert seen("diffusers") == ((16,), 1e-6, True, False, "weight", "auto")
    assert seen("diffusers, no weight") == ((16,), 1e-6, False, False, "weight", "auto")
    assert seen("Krea2") == ((16,), 1e-5, True, True, "once", "auto")
    assert seen("BFL") == ((16,), 1e-6, True, False, "input", "auto")
    assert seen("llama") == ((16,), 1e-6, True, False, "input", "auto")


def test_from_norm_of_an_unknown_class_is_a_type_error_that_shows_the_way_out():
    with pytest.raises(TypeError, match=r"norms\.LigerRMSNorm.*register_norm"):
        QKRMSNorm.from_norm(LigerRMSNorm(8))


@pytest.mark.parametrize("norm", [nn.Identity(), FP32LayerNorm(8)], ids=lambda norm: type(norm).__name__)
def test_from_norm_of_a_class_that_is_left_alone_is_a_value_error_with_the_reason(norm):
    with pytest.raises(ValueError, match=rf"{type(norm).__name__} is left alone: it "):
        QKRMSNorm.from_norm(norm)


class GGUFParameter(nn.Parameter):
    pass


class ManagedParameters(dict):
    """Like what DeepSpeed's ZeRO 3 keeps the parameters of a module in."""


def quantised(norm):
    norm.weight = nn.Parameter(torch.zeros(16, dtype=torch.uint8), requires_grad=False)


def quantised_bias(norm):
    norm.bias = nn.Parameter(torch.zeros(16, dtype=torch.uint8), requires_grad=False)


def wrapped_weight(norm):
    norm.weight = GGUFParameter(torch.zeros(16))


def gguf_weight(norm):
    norm.weight = GGUFParameter(torch.zeros(32, dtype=torch.uint8), requires_grad=False)


def managed(norm):
    norm._parameters = ManagedParameters(norm._parameters)


def hooked(norm):
    norm.forward = lambda x: x


def compiled(norm):
    norm.compile(backend="eager")


def bound_load_hook(norm):
    norm.register_load_state_dict_pre_hook(lambda *args: None)


def bias_without_weight(norm):
    norm.weight = None
    norm.bias = nn.Parameter(torch.zeros(16))


def own_parameter(norm):
    norm.extra = nn.Parameter(torch.zeros(1))


def own_buffer(norm):
    norm.register_buffer("running", torch.zeros(1))


def own_submodule(norm):
    norm.inner = nn.Identity()


def several_dimensions(norm):
    norm.weight = nn.Parameter(torch.ones(4, 16))


def scalar_weight(norm):
    norm.weight = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (quantised, "its weight is torch.uint8 (Parameter), quantised; dequantise it first"),
        (quantised_bias, "its bias is torch.uint8 (Parameter), quantised; dequantise it first"),
        (wrapped_weight, "its weight is a GGUFParameter of torch.float32; swap before sharding or wrapping"),
        (gguf_weight, "its weight is a GGUFParameter of torch.uint8; quantised; dequantise it first"),
        (managed, "its parameters are kept by a ManagedParameters; swap before"),
        (hooked, "a hook (accelerate, diffusers offloading) took over its forward; remove it"),
        (compiled, "it is compiled by itself; swap before"),
        (bound_load_hook, "a load_state_dict hook is bound to the module object; swap before"),
        (bias_without_weight, "it has a bias but no weight parameter"),
        (own_parameter, "it has parameters or buffers of its own (extra)"),
        (own_buffer, "it has parameters or buffers of its own (running)"),
        (own_submodule, "it has submodules (inner)"),
        (several_dimensions, "its shape is (4, 16); only torch.nn.RMSNorm is known to norm over several dimensions"),
        (scalar_weight, "its shape is (); only"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_from_norm_of_a_module_that_cannot_be_replaced_is_a_value_error_with_the_reason(change, reason):
    norm = DiffusersRMSNorm(16, eps=1e-6)
    change(norm)
    with pytest.raises(ValueError, match="this RMSNorm cannot be replaced: ") as error:
        QKRMSNorm.from_norm(norm)
    assert reason in str(error.value)


def test_from_norm_of_an_audio_norm_that_does_not_compute_in_float32_is_refused():
    with pytest.raises(ValueError, match="its force_fp32 is False; only True is known to be bit-equal"):
        QKRMSNorm.from_norm(StableAudio3RMSNorm(16, force_fp32=False))


def test_from_norm_of_a_registered_class_without_the_named_eps_is_refused(registered):
    class Misdescribed(LlamaRMSNorm):
        pass

    registered(Misdescribed, Adapter(eps="epsilon"))
    with pytest.raises(ValueError, match="it has no attribute 'epsilon', which its adapter names as eps"):
        QKRMSNorm.from_norm(Misdescribed(8))


@pytest.mark.parametrize("method", ["_save_to_state_dict", "_load_from_state_dict", "get_extra_state", "_apply"])
def test_from_norm_of_a_registered_class_that_keeps_its_state_in_its_own_form_is_refused(registered, method):
    cls = type("Own", (LlamaRMSNorm,), {method: lambda self, *args, **kwargs: None})
    registered(cls, Adapter(eps="variance_epsilon", rounding="input"))
    with pytest.raises(ValueError, match=f"its class has a {method} of its own, which would be lost"):
        QKRMSNorm.from_norm(cls(8))


# Kin


@pytest.mark.parametrize(
    ("norm", "parameter"), [("BFL", "scale"), ("zero-centred scale", "scale"), ("StableAudio3", "gamma")]
)
def test_kin_keep_the_name_of_the_parameter_and_read_it_as_weight_too(norm, parameter):
    old = KNOWN[norm](16)
    new = QKRMSNorm.from_norm(old)
    assert list(new.state_dict()) == list(old.state_dict()) == [parameter]
    assert new.weight is getattr(new, parameter) is getattr(old, parameter)
    assert [name for name, _ in new.named_parameters()] == [parameter]
    new.load_state_dict({parameter: torch.full((16,), 2.0)})
    assert_same_bits(new.weight.detach(), torch.full((16,), 2.0))


@pytest.mark.parametrize("cls", [qk_module.QKScaleRMSNorm, qk_module.QKGammaRMSNorm])
def test_kin_can_be_built_by_themselves(cls):
    x = torch.randn(3, 16)
    assert list(cls(16).state_dict()) == [cls.weight_name]
    assert_same_bits(cls(16)(x), QKRMSNorm(16)(x))
    assert cls(16, elementwise_affine=False).weight is None
    assert_same_bits(cls(16, elementwise_affine=False)(x), QKRMSNorm(16, elementwise_affine=False)(x))


@pytest.mark.parametrize("norm", ["torch", "BFL", "StableAudio3", "diffusers, bias"])
def test_the_weight_is_read_at_every_call_and_may_be_a_plain_tensor(norm):
    new = QKRMSNorm.from_norm(KNOWN[norm](16))
    x = torch.randn(3, 16, dtype=BF16)
    values = {name: torch.randn(16) for name, _ in new.named_parameters()}

    def expected(dtype):
        old = KNOWN[norm](16)
        old.load_state_dict(values)
        return old.to(dtype)(x).to(BF16)

    assert_same_bits(torch.func.functional_call(new, values, (x,)), expected(FP32))
    for name, value in values.items():
        new.get_parameter(name).data = value.to(FP16)
    assert_same_bits(new(x), expected(FP16))
    for name, value in values.items():  # as the replicas of nn.DataParallel and the old-style weight norm do
        del new._parameters[name]
        setattr(new, name, value)
    assert_same_bits(new(x), expected(FP32))


# Copies and files


@pytest.mark.parametrize("norm", KNOWN)
def test_a_module_can_be_copied_pickled_and_saved_whole(norm):
    new = QKRMSNorm.from_norm(KNOWN[norm](16, BF16))
    x = torch.randn(3, 16, dtype=BF16)
    file = io.BytesIO()
    torch.save(new, file)
    file.seek(0)
    for other in (copy.deepcopy(new), pickle.loads(pickle.dumps(new)), torch.load(file, weights_only=False)):
        assert type(other) is type(new)
        assert other.__dict__.keys() == new.__dict__.keys()
        assert repr(other) == repr(new)
        assert_same_bits(other(x), new(x))
        assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in new.parameters()}


def test_a_pickled_twin_can_be_read_by_a_process_that_has_made_none(tmp_path):
    twin = QKRMSNorm.from_norm(KNOWN["LayerNorm"](16))
    (tmp_path / "twin.pickle").write_bytes(pickle.dumps(twin))
    read = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')))"
    done = subprocess.run(
        [sys.executable, "-c", read, tmp_path / "twin.pickle"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == repr(twin)


@pytest.mark.parametrize("norm", TWINS)
def test_a_twin_is_a_top_level_subclass_of_the_very_class_and_no_rms_norm(norm):
    old = KNOWN[norm](16)
    twin = type(QKRMSNorm.from_norm(old))
    assert twin.__bases__ == (type(old),)
    assert not issubclass(twin, nn.RMSNorm)
    assert twin.__name__ == f"QK{type(old).__name__}"
    assert getattr(qk_module, twin.__qualname__) is twin
    assert twin.__module__ == qk_module.__name__


def test_the_module_has_no_other_made_up_attributes():
    with pytest.raises(AttributeError, match="QKBatchNorm"):
        qk_module.QKBatchNorm  # noqa: B018  # reading it is the test


@pytest.mark.parametrize("norm", KNOWN)
def test_to_half_and_meta_work(norm):
    new = QKRMSNorm.from_norm(KNOWN[norm](16))
    x = torch.randn(3, 16)
    assert {p.dtype for p in new.half().parameters()} <= {FP16}
    assert_same_bits(new(x.half()), KNOWN[norm](16).half()(x.half()).to(FP16))
    assert {p.dtype for p in new.to(FP64).parameters()} <= {FP64}
    assert new(x.double()).dtype is FP64
    values = {name: p.detach().clone() for name, p in new.named_parameters()}
    new = new.to("meta")
    assert new(x.to("meta", BF16)).dtype is BF16
    new.to_empty(device="cpu").load_state_dict(values)
    assert_same_bits(new(x.double()), QKRMSNorm.from_norm(KNOWN[norm](16).half().double())(x.double()))


# TorchScript


@pytest.mark.parametrize(
    "norm", ["torch", "torch, no eps", "torch, no weight", "diffusers", "Krea2", "StableAudio3", "BFL", "llama"]
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_scripted_module_has_the_bits_and_gradients_of_the_eager_one(norm, dtype):
    eager = QKRMSNorm.from_norm(KNOWN[norm](16))
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(eager), file)
    file.seek(0)
    scripted = torch.jit.load(file)
    assert list(scripted.state_dict()) == list(eager.state_dict())
    x, y = (torch.randn(2, 3, 16).to(dtype).requires_grad_() for _ in range(2))
    y.data = x.data
    for _ in range(3):  # TorchScript optimises after it has seen a call
        assert_same_bits(scripted(x).detach(), eager(y).detach())
    scripted(x).square().sum().backward()
    eager(y).square().sum().backward()
    assert_same_bits(x.grad, y.grad)
    for name, parameter in eager.named_parameters():
        assert_same_bits(getattr(scripted, name).grad, parameter.grad)


def test_a_scripted_module_norms_over_several_dimensions_and_float64_with_its_own_eps():
    x = 1e-5 * torch.randn(2, 3, 4, dtype=FP64)
    assert_same_bits(torch.jit.script(QKRMSNorm((3, 4)))(x).detach(), QKRMSNorm((3, 4))(x).detach())
    assert_same_bits(torch.jit.script(QKRMSNorm(4))(x).detach(), QKRMSNorm(4)(x).detach())
    assert_same_bits(torch.jit.script(QKRMSNorm(4))(x.float()).detach(), QKRMSNorm(4)(x.float()).detach())


@pytest.mark.parametrize("norm", KNOWN)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_traced_module_has_the_bits_of_the_eager_one(norm, dtype):
    eager = QKRMSNorm.from_norm(KNOWN[norm](16))
    traced = torch.jit.trace(eager, torch.randn(2, 3, 16).to(dtype))
    x = torch.randn(4, 5, 16).to(dtype)
    assert_same_bits(traced(x), eager(x))
