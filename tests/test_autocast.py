"""``emulate_cuda_autocast`` against CUDA's own policy, which fake CUDA tensors show with no GPU."""

import contextlib
import itertools
import re
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from norms import attention_dtypes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import qknorm.autocast
from qknorm import tiny
from qknorm.autocast import emulate_cuda_autocast

# Without rms_norm on its own list, a torch below 2.12 shows what a float32 operator does by layer_norm.
CUDA_LISTS_RMS_NORM = "aten::rms_norm" in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# The dtype of the first tensor argument, and of the rest.
DTYPES = [(BF16, BF16), (FP16, FP16), (FP32, FP32), (FP64, FP64), (BF16, FP32), (FP32, BF16), (FP16, BF16)]


def _rnn_cell(gates):
    return lambda f, i: (f(2, 4), f(2, 3), f(gates * 3, 4), f(gates * 3, 3), f(gates * 3), f(gates * 3))


def _conv(dims):
    return lambda f, i: (f(1, 2, *[8] * dims), f(3, 2, *[3] * dims), f(3))


def _conv_transpose(dims):
    return lambda f, i: (f(1, 2, *[8] * dims), f(2, 3, *[3] * dims), f(3))


def _upsample(dims, *rest):
    return lambda f, i: (f(1, 2, *[4] * dims), [8] * dims, *rest)


def _same_shape(count, *rest):
    return lambda f, i: (*(f(2, 3) for _ in range(count)), *rest)


# Arguments for every operator on CUDA's lists: f makes a float tensor of a shape, i an integer one.
ARGUMENTS = {
    # lower precision
    "_convolution": lambda f, i: (*_conv(1)(f, i), [1], [0], [1], False, [0], 1, False, False, True, True),
    "_convolution.deprecated": lambda f, i: (*_conv(1)(f, i), [1], [0], [1], False, [0], 1, False, False, True),
    "conv1d": _conv(1),
    "conv2d": _conv(2),
    "conv3d": _conv(3),
    "conv_tbc": lambda f, i: (f(5, 1, 2), f(3, 2, 4), f(4)),
    "conv_transpose1d": _conv_transpose(1),
    "conv_transpose2d.input": _conv_transpose(2),
    "conv_transpose3d.input": _conv_transpose(3),
    "convolution": lambda f, i: (*_conv(1)(f, i), [1], [0], [1], False, [0], 1),
    "cudnn_convolution": lambda f, i: (*_conv(2)(f, i)[:2], [0, 0], [1, 1], [1, 1], 1, False, False, True),
    "cudnn_convolution_transpose": lambda f, i: (
        *_conv_transpose(2)(f, i)[:2],
        [0, 0],
        [0, 0],
        [1, 1],
        [1, 1],
        1,
        False,
        False,
        True,
    ),
    "prelu": lambda f, i: (f(2, 3), f(3)),
    "addmm": lambda f, i: (f(2, 4), f(2, 3), f(3, 4)),
    "addmv": lambda f, i: (f(2), f(2, 3), f(3)),
    "addr": lambda f, i: (f(2, 3), f(2), f(3)),
    "matmul": lambda f, i: (f(2, 3), f(3, 4)),
    "einsum": lambda f, i: ("ij,jk->ik", [f(2, 3), f(3, 4)]),
    "mm": lambda f, i: (f(2, 3), f(3, 4)),
    "mv": lambda f, i: (f(2, 3), f(3)),
    "linalg_vecdot": _same_shape(2),
    "linear": lambda f, i: (f(2, 3), f(4, 3), f(4)),
    "addbmm": lambda f, i: (f(2, 4), f(5, 2, 3), f(5, 3, 4)),
    "baddbmm": lambda f, i: (f(5, 2, 4), f(5, 2, 3), f(5, 3, 4)),
    "bmm": lambda f, i: (f(5, 2, 3), f(5, 3, 4)),
    "chain_matmul": lambda f, i: ([f(2, 3), f(3, 4), f(4, 2)],),
    "linalg_multi_dot": lambda f, i: ([f(2, 3), f(3, 4), f(4, 2)],),
    "_thnn_fused_lstm_cell": lambda f, i: (f(2, 12), f(2, 12), f(2, 3), f(12), f(12)),
    "_thnn_fused_gru_cell": lambda f, i: (f(2, 9), f(2, 9), f(2, 3), f(9), f(9)),
    "lstm_cell": lambda f, i: (f(2, 4), [f(2, 3), f(2, 3)], f(12, 4), f(12, 3), f(12), f(12)),
    "gru_cell": _rnn_cell(3),
    "rnn_tanh_cell": _rnn_cell(1),
    "rnn_relu_cell": _rnn_cell(1),
    "_scaled_dot_product_flash_attention": lambda f, i: (f(1, 2, 8, 16), f(1, 2, 8, 16), f(1, 2, 8, 16)),
    "scaled_dot_product_attention": lambda f, i: (f(1, 2, 8, 16), f(1, 2, 8, 16), f(1, 2, 8, 16)),
    # float32
    **dict.fromkeys("acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal".split(), _same_shape(1)),
    **dict.fromkeys("rsqrt sinh tan softplus nuclear_norm".split(), _same_shape(1)),
    **dict.fromkeys("cosine_similarity kl_div l1_loss smooth_l1_loss huber_loss mse_loss".split(), _same_shape(2)),
    **dict.fromkeys("soft_margin_loss binary_cross_entropy_with_logits hinge_embedding_loss".split(), _same_shape(2)),
    "dist": _same_shape(2),
    "pow.Tensor_Scalar": _same_shape(1, 2),
    "pow.Tensor_Tensor": _same_shape(2),
    "pow.Scalar": lambda f, i: (2, f(2, 3)),
    "layer_norm": lambda f, i: (f(2, 8), [8], f(8), f(8)),
    "native_layer_norm": lambda f, i: (f(2, 8), [8], f(8), f(8), 1e-5),
    "rms_norm": lambda f, i: (f(2, 8), [8], f(8)),
    "group_norm": lambda f, i: (f(2, 4, 3), 2, f(4), f(4)),
    "frobenius_norm.dim": _same_shape(1, [1]),
    "nuclear_norm.dim": _same_shape(1, [0, 1]),
    "poisson_nll_loss": _same_shape(2, True, False, 1e-8, 1),
    "cosine_embedding_loss": lambda f, i: (f(2, 3), f(2, 3), f(2)),
    "nll_loss": lambda f, i: (f(2, 3), i(2)),
    "nll_loss2d": lambda f, i: (f(2, 3, 4, 4), i(2, 4, 4)),
    "margin_ranking_loss": lambda f, i: (f(2), f(2), f(2)),
    "multilabel_margin_loss": lambda f, i: (f(2, 3), i(2, 3)),
    "triplet_margin_loss": _same_shape(3),
    "multi_margin_loss": lambda f, i: (f(2, 3), i(2)),
    "pdist": lambda f, i: (f(4, 3),),
    "cdist": lambda f, i: (f(4, 3), f(5, 3)),
    "renorm": _same_shape(1, 2, 0, 1.0),
    "logsumexp": _same_shape(1, [1]),
    "linalg_matrix_sqrth": lambda f, i: (f(3, 3),),
    **{f"{name}1d": _upsample(1) for name in ("upsample_nearest", "_upsample_nearest_exact")},
    **{f"{name}2d": _upsample(2) for name in ("upsample_nearest", "_upsample_nearest_exact")},
    **{f"{name}3d": _upsample(3) for name in ("upsample_nearest", "_upsample_nearest_exact")},
    "upsample_linear1d": _upsample(1, False),
    "upsample_bilinear2d": _upsample(2, False),
    "_upsample_bilinear2d_aa": _upsample(2, False),
    "upsample_trilinear3d": _upsample(3, False),
    "upsample_bicubic2d": _upsample(2, False),
    "_upsample_bicubic2d_aa": _upsample(2, False),
    # float32 result
    "prod": _same_shape(1),
    "prod.dim_int": _same_shape(1, 1),
    "softmax.int": _same_shape(1, 1),
    "log_softmax.int": _same_shape(1, 1),
    "cumprod": _same_shape(1, 1),
    "cumsum": _same_shape(1, 1),
    "linalg_vector_norm": _same_shape(1),
    "linalg_matrix_norm": _same_shape(1, 1),
    "linalg_matrix_norm.str_ord": _same_shape(1),
    "sum": _same_shape(1),
    "sum.dim_IntList": _same_shape(1, [1]),
    "norm.Scalar": _same_shape(1),
    "norm.ScalarOpt_dim": _same_shape(1, 2, [1]),
    # the widest of the arguments
    "addcdiv": _same_shape(3),
    "addcmul": _same_shape(3),
    "atan2": _same_shape(2),
    "bilinear": lambda f, i: (f(2, 3), f(2, 4), f(5, 3, 4), f(5)),
    "cross": _same_shape(2, 1),
    "dot": lambda f, i: (f(3), f(3)),
    "vdot": lambda f, i: (f(3), f(3)),
    "grid_sampler": lambda f, i: (f(1, 2, 4, 4), f(1, 3, 3, 2), 0, 0, False),
    "index_put": lambda f, i: (f(4, 3), [i(2)], f(2, 3)),
    "tensordot": lambda f, i: (f(2, 3), f(3, 2), [1], [0]),
    "scatter_add": lambda f, i: (f(4, 3), 0, i(2, 3), f(2, 3)),
    # refused
    "binary_cross_entropy": _same_shape(2),
}

if not hasattr(torch.ops.aten, "linalg_matrix_sqrth"):  # new in torch 2.14
    del ARGUMENTS["linalg_matrix_sqrth"]

# On CPU's lists and not on CUDA's.
CPU_ONLY_ARGUMENTS = {
    "cat": lambda f, i: ([f(2, 3), f(2, 3)],),
    "stack": lambda f, i: ([f(2, 3), f(2, 3)],),
    "avg_pool3d": lambda f, i: (f(1, 2, 4, 4, 4), [2]),
    "max_pool3d": lambda f, i: (f(1, 2, 4, 4, 4), [2]),
    "adaptive_avg_pool3d": lambda f, i: (f(1, 2, 4, 4, 4), [2, 2, 2]),
    "reflection_pad1d": _same_shape(1, [1, 1]),
    "replication_pad2d": lambda f, i: (f(1, 2, 4, 4), [1, 1, 1, 1]),
    "cross_entropy_loss": lambda f, i: (f(2, 3), i(2)),
    "conv2d.padding": lambda f, i: (*_conv(2)(f, i), [1, 1], "same"),
    "trace": lambda f, i: (f(3, 3),),
}

# These ask for a CUDA device or driver even on fake tensors, so that only the casts before them can be compared.
NEEDS_CUDA_DEVICE = {
    "_convolution",
    "_convolution.deprecated",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_thnn_fused_gru_cell",
    "gru_cell",
    "grid_sampler",
}
# Below autocast these cast by themselves, by rules that differ between devices: only their results can be compared.
CASTS_BY_ITSELF = {"scaled_dot_product_attention", "softmax.int", "log_softmax.int"}
NO_CPU_KERNEL = {
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "_scaled_dot_product_flash_attention",
}


def _overload(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _arguments(build, dtypes, device, *, fake):
    remaining = itertools.chain(dtypes[:1], itertools.repeat(dtypes[1]))

    def floating(*shape):
        dtype = next(remaining)
        return torch.empty(shape, dtype=dtype, device=device) if fake else torch.full(shape, 0.25, dtype=dtype)

    def integer(*shape):
        return torch.empty(shape, dtype=torch.int64, device=device) if fake else torch.zeros(shape, dtype=torch.int64)

    return build(floating, integer)


@contextlib.contextmanager
def _autocast(device, dtype):
    """``torch.autocast`` on a device that need not be there, in any dtype."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


class _Casts(TorchDispatchMode):
    """The dtypes that tensors are cast to before the first operator that is no cast."""

    def __init__(self):
        super().__init__()
        self.dtypes = []
        self._over = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_cast = func is torch.ops.aten._to_copy.default
        self._over |= not is_cast and func.namespace == "aten"
        if is_cast and not self._over:
            self.dtypes.append(kwargs["dtype"])
        return func(*args, **(kwargs or {}))


def _dtypes(result):
    results = result if isinstance(result, (tuple, list)) else [result]
    return [tensor.dtype for tensor in results if isinstance(tensor, torch.Tensor)]


def _observe(name, build, dtypes, autocast_dtype, device, *, fake=True):
    """Casts before the operator runs, and the dtypes of its results, or the error that it raised."""
    with FakeTensorMode() if fake else contextlib.nullcontext(), torch.no_grad():
        args = _arguments(build, dtypes, device, fake=fake)
        with _autocast(device, autocast_dtype), _Casts() as casts:
            try:
                return casts.dtypes, _dtypes(_overload(name)(*args))
            except (RuntimeError, AssertionError) as error:
                return casts.dtypes, error


def _on_cuda(name, build, dtypes, autocast_dtype):
    if name == "rms_norm" and not CUDA_LISTS_RMS_NORM:
        casts, results = _observe("layer_norm", build, dtypes, autocast_dtype, "cuda")
    else:
        casts, results = _observe(name, build, dtypes, autocast_dtype, "cuda")
    if isinstance(results, Exception) and name not in NEEDS_CUDA_DEVICE:
        # A sample that fails for a reason of its own would compare nothing.
        assert "autocast" in str(results), f"{name}{dtypes}: {results}"
    return casts, results


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """Every test ends with the kernels and the compile state that it began with."""
    before = _state()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(deprecated|Mismatch dtype).*")
        yield
    assert _state() == before


def _state():
    casting = {dtype: _probe(dtype) for dtype in (BF16, FP16)}
    switches = [torch.is_autocast_enabled(device) for device in torch._C._autocast_supported_devices()]
    return casting, _autocast_cpu_kernels(), switches, torch.compiler.config.cache_key_tag


def _autocast_cpu_kernels():
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    fallthrough = torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough
    return {name: fallthrough(name, "AutocastCPU") for name in names if name.startswith("aten::")}


def _probe(dtype=BF16):
    """Operators that tell CPU's lists, those of torch 2.11's CUDA and those of 2.12's apart, by their result."""
    x = torch.ones(2, 4, dtype=dtype)
    with torch.autocast("cpu", dtype=dtype):
        return F.rms_norm(x, [4]).dtype, x.sum().dtype, F.linear(x.float(), x).dtype


CPU_LISTS = (BF16, BF16, BF16)
CUDA_2_12_LISTS = (FP32, FP32, BF16)
CUDA_INSTALLED_LISTS = CUDA_2_12_LISTS if CUDA_LISTS_RMS_NORM else (BF16, FP32, BF16)


# --- op by op ---


def test_every_operator_on_cudas_lists_is_compared():
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    on_cuda = {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
    # No CPU tensor reaches cuDNN's RNN, and none with names reaches a kernel written in Python.
    not_emulated = {name for name in on_cuda if re.fullmatch(r"_cudnn_rnn|.*\.(.*[Dd]imname.*|names_.*)", name)}
    assert ARGUMENTS.keys() == (on_cuda - not_emulated) | {"rms_norm"}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_operator_casts_as_on_cuda(name):
    with emulate_cuda_autocast():
        for dtypes, autocast_dtype in itertools.product(DTYPES, (BF16, FP16, FP32)):
            case = (name, ARGUMENTS[name], dtypes, autocast_dtype)
            casts, results = _on_cuda(*case)
            runs = [_observe(*case, "cpu"), _observe(*case, "cpu", fake=False)]
            if name not in CASTS_BY_ITSELF:
                assert [run[0] for run in runs] == [casts, casts], f"{name}, {dtypes}, autocast to {autocast_dtype}"
            for _, emulated in runs[: 1 if name in NO_CPU_KERNEL else 2]:
                if name in NEEDS_CUDA_DEVICE:
                    continue
                if isinstance(results, Exception):
                    assert isinstance(emulated, RuntimeError)
                    assert "CUDA autocast" in str(emulated)
                else:
                    assert emulated == results, f"{name}, {dtypes}, autocast to {autocast_dtype}"


@pytest.mark.parametrize("name", CPU_ONLY_ARGUMENTS)
def test_operator_that_only_cpu_lists_is_left_alone_as_on_cuda(name):
    assert _autocast_cpu_kernels()[f"aten::{name}"] is False
    with emulate_cuda_autocast():
        assert _autocast_cpu_kernels()[f"aten::{name}"] is True
        for dtypes, autocast_dtype in itertools.product(DTYPES, (BF16, FP16)):
            case = (name, CPU_ONLY_ARGUMENTS[name], dtypes, autocast_dtype)
            casts, results = _observe(*case, "cuda")
            assert _observe(*case, "cpu") == (casts, results)


def test_every_operator_that_only_cpu_lists_is_left_alone():
    cpu_only = {name for name in _autocast_cpu_kernels() if name.removeprefix("aten::") not in ARGUMENTS}
    with emulate_cuda_autocast():
        kernels = _autocast_cpu_kernels()
    assert cpu_only
    assert {name for name, is_fallthrough in kernels.items() if is_fallthrough} == cpu_only


def test_arguments_that_ask_for_a_dtype_are_respected_as_on_cuda():
    def results(device):
        x = torch.empty(2, 4, dtype=BF16, device=device)
        with _autocast(device, BF16):
            return [
                x.sum(dtype=BF16).dtype,
                x.sum(dim=1, dtype=FP64).dtype,
                x.softmax(-1, dtype=FP16).dtype,
                F.softmax(x, -1, dtype=BF16).dtype,
                x.cumsum(0, dtype=FP64).dtype,
                x.norm(dtype=BF16).dtype,
                x.norm(3, dim=1).dtype,
                x.norm(2, dim=1, keepdim=True).dtype,
                torch.norm(x, dim=-1).dtype,
                torch.linalg.vector_norm(x, dim=-1, dtype=FP64).dtype,
            ]

    with emulate_cuda_autocast(), FakeTensorMode(), torch.no_grad():
        on_cuda = results("cuda")
        assert results("cpu") == on_cuda
    assert set(on_cuda) == {BF16, FP16, FP32, FP64}


def test_integer_tensors_are_left_alone():
    with emulate_cuda_autocast(), _autocast("cpu", BF16):
        x = torch.ones(2, 3, dtype=torch.int64)
        assert x.sum().dtype == torch.int64
        assert torch.mm(x, x.T).dtype == torch.int64
        assert torch.addcmul(x, x, x).dtype == torch.int64


# --- the context manager ---


def test_policy_2_12_runs_rms_norm_in_float32_whatever_torch_is_installed():
    assert _probe() == CPU_LISTS
    with emulate_cuda_autocast():
        assert _probe() == CUDA_2_12_LISTS
    assert _probe() == CPU_LISTS


def test_policy_installed_follows_the_installed_torch():
    _, fake_cuda = _observe("rms_norm", ARGUMENTS["rms_norm"], (BF16, BF16), BF16, "cuda")
    with emulate_cuda_autocast("installed"):
        assert _probe() == CUDA_INSTALLED_LISTS
        assert _observe("rms_norm", ARGUMENTS["rms_norm"], (BF16, BF16), BF16, "cpu")[1] == fake_cuda


def test_policy_installed_names_operators_that_it_has_no_rule_for(monkeypatch):
    registered = qknorm.autocast._registered

    def _with_new_operator(key):
        return registered(key) | ({"a_norm_of_tomorrow"} if key == "AutocastCUDA" else set())

    monkeypatch.setattr(qknorm.autocast, "_registered", _with_new_operator)
    with pytest.warns(UserWarning, match="no rule for.*: a_norm_of_tomorrow"), emulate_cuda_autocast("installed"):
        assert _probe() == CUDA_INSTALLED_LISTS


def test_outside_autocast_nothing_changes():
    x = torch.ones(2, 4, dtype=BF16)
    with emulate_cuda_autocast():
        assert F.rms_norm(x, [4]).dtype == BF16
        with torch.autocast("cpu", dtype=BF16), torch.autocast("cpu", enabled=False):
            assert F.rms_norm(x, [4]).dtype == BF16
            assert F.linear(x.float(), x.float()).dtype == FP32


def test_nested_contexts_restore_one_by_one():
    with emulate_cuda_autocast():
        with emulate_cuda_autocast("installed"):
            assert _probe() == CUDA_INSTALLED_LISTS
            with emulate_cuda_autocast():
                assert _probe() == CUDA_2_12_LISTS
            assert _probe() == CUDA_INSTALLED_LISTS
        assert _probe() == CUDA_2_12_LISTS
        with emulate_cuda_autocast():
            pass
        assert _probe() == CUDA_2_12_LISTS
    assert _probe() == CPU_LISTS


def test_one_context_can_be_entered_again_while_it_is_open():
    context = emulate_cuda_autocast()
    with context:
        with context:
            assert _probe() == CUDA_2_12_LISTS
        assert _probe() == CUDA_2_12_LISTS
    assert _probe() == CPU_LISTS
    with context:
        assert _probe() == CUDA_2_12_LISTS


def test_exception_inside_restores():
    with pytest.raises(ZeroDivisionError), emulate_cuda_autocast(), emulate_cuda_autocast("installed"):
        raise ZeroDivisionError
    assert _probe() == CPU_LISTS


def test_decorator_holds_for_each_call():
    probe = emulate_cuda_autocast()(_probe)
    for _ in range(2):
        assert probe() == CUDA_2_12_LISTS
        assert _probe() == CPU_LISTS


def test_threads_may_leave_in_any_order():
    in_thread, leave = threading.Event(), threading.Event()

    def other():
        with emulate_cuda_autocast():
            in_thread.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with emulate_cuda_autocast("installed"):
        thread.start()
        in_thread.wait(60)
        assert _probe() == CUDA_2_12_LISTS
    assert _probe() == CUDA_2_12_LISTS
    leave.set()
    thread.join()
    assert _probe() == CPU_LISTS


@pytest.mark.parametrize("policy", ["2.11", "cuda", None, 2.12])
def test_unknown_policy_is_refused_before_anything_changes(policy):
    with pytest.raises(ValueError, match=rf"policy must be '2.12' or 'installed', got {policy!r}"):
        emulate_cuda_autocast(policy)


def test_enters_without_a_warning_in_a_fresh_process():
    # torch warns of replaced kernels once in a process, so this one may have had its warning.
    code = "import qknorm.autocast as a\nwith a.emulate_cuda_autocast(): pass"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- whole modules: forward, backward, compiled ---


def _composite_rms_norm(x, weight, upcast):
    """A norm made of pow, mean and rsqrt, as diffusers' own (which casts up first) and many others are."""
    squares = (x.to(torch.float32) if upcast else x).pow(2)
    normed = x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)
    return normed, (normed.to(weight.dtype) if weight.dtype in (FP16, BF16) else normed) * weight


class _MLP(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(8, 16), norm, torch.nn.Linear(16, 4)

    def forward(self, x):
        up = self.up(x)
        normed = self.norm(up)
        with torch.autocast("cpu", enabled=False):
            plain = F.linear(x.float(), self.up.weight.float())
        return up, normed, plain, self.down(normed), normed.softmax(-1), up.pow(2), up.sum()


MLP_DTYPES = {BF16: [BF16, FP32, FP32, BF16, FP32, FP32, FP32], FP16: [FP16, FP32, FP32, FP16, FP32, FP32, FP32]}


@pytest.mark.parametrize("autocast_dtype", MLP_DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("norm", [torch.nn.RMSNorm, torch.nn.LayerNorm])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_mlp_has_cudas_dtypes_forward_and_backward(norm, weight_dtype, autocast_dtype, backend):
    torch._dynamo.reset()
    model = _MLP(norm(16)).to(weight_dtype)
    run = torch.compile(model, fullgraph=True, backend=backend) if backend else model
    _check_mlp(model, run, weight_dtype, autocast_dtype)


@pytest.mark.parametrize("weight_dtype", [FP32, BF16], ids=str)
def test_mlp_has_cudas_dtypes_in_compiled_code(weight_dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    model = _MLP(torch.nn.RMSNorm(16)).to(weight_dtype)
    _check_mlp(model, torch.compile(model, fullgraph=True), weight_dtype, BF16)


def _check_mlp(model, run, weight_dtype, autocast_dtype):
    x = torch.randn(3, 8, dtype=weight_dtype, requires_grad=True)
    with emulate_cuda_autocast():
        with torch.autocast("cpu", dtype=autocast_dtype):
            outputs = run(x)
        assert [output.dtype for output in outputs] == MLP_DTYPES[autocast_dtype]
        sum(output.float().sum() for output in outputs).backward()
    assert x.grad.dtype == weight_dtype
    assert {parameter.grad.dtype for parameter in model.parameters()} == {weight_dtype}
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_composite_norm_has_the_dtypes_of_fake_cuda(backend):
    torch._dynamo.reset()
    norm = torch.compile(_composite_rms_norm, fullgraph=True, backend=backend) if backend else _composite_rms_norm
    for input_dtype, weight_dtype, upcast in itertools.product((FP32, BF16), (FP32, BF16), (False, True)):
        with FakeTensorMode(), torch.no_grad(), _autocast("cuda", BF16):
            x = torch.empty(2, 8, dtype=input_dtype, device="cuda")
            on_cuda = _dtypes(_composite_rms_norm(x, torch.empty(8, dtype=weight_dtype, device="cuda"), upcast))
        assert on_cuda == [FP32, weight_dtype]
        with emulate_cuda_autocast(), torch.autocast("cpu", dtype=BF16):
            result = norm(torch.ones(2, 8, dtype=input_dtype), torch.ones(8, dtype=weight_dtype), upcast)
        assert _dtypes(result) == on_cuda


def test_gradients_are_those_of_the_casts_written_out():
    x, weight = torch.randn(3, 8), torch.randn(8, 8)
    gradients = []
    for written_out in (False, True):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        if written_out:
            F.rms_norm(F.linear(leaves[0].bfloat16(), leaves[1].bfloat16()).float(), [8]).pow(3).sum().backward()
        else:
            with emulate_cuda_autocast(), torch.autocast("cpu", dtype=BF16):
                loss = F.rms_norm(F.linear(*leaves), [8]).pow(3).sum()
            loss.backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))


def test_checkpointed_region_is_recomputed_in_the_same_dtypes():
    norm, x = torch.nn.RMSNorm(8), torch.randn(2, 8, dtype=BF16, requires_grad=True)
    seen = []

    def region(x):
        seen.append(norm(x).dtype)
        return norm(x)

    with emulate_cuda_autocast():
        with torch.autocast("cpu", dtype=BF16):
            y = torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)
        y.sum().backward()
    assert seen == [FP32, FP32]
    assert x.grad.dtype == BF16


def test_function_transforms_see_the_same_dtypes():
    weight = torch.randn(8)

    def loss(x):
        return F.rms_norm(x, [8], weight).pow(2).sum()

    x = torch.randn(3, 8, dtype=BF16)
    with emulate_cuda_autocast(), torch.autocast("cpu", dtype=BF16):
        assert torch.func.vmap(loss)(x).dtype == FP32
        assert torch.func.grad(loss)(x).dtype == BF16
        assert torch.func.jvp(loss, (x,), (x,))[1].dtype == FP32


@pytest.mark.parametrize("cached_on_disk", [False, True])
@pytest.mark.parametrize("emulated_first", [False, True])
def test_code_compiled_on_one_side_does_not_run_on_the_other(emulated_first, cached_on_disk, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    weight = torch.ones(8, dtype=BF16)
    run = torch.compile(lambda x: F.rms_norm(x, [8], weight), fullgraph=True)
    x = torch.randn(2, 8, dtype=BF16)
    for emulated in (emulated_first, not emulated_first, emulated_first):
        with emulate_cuda_autocast() if emulated else contextlib.nullcontext(), torch.autocast("cpu", dtype=BF16):
            assert run(x).dtype == (FP32 if emulated else BF16)
        if cached_on_disk:
            torch._dynamo.reset()


def _model_and_inputs(name, weight_dtype):
    model, inputs = tiny.build(name, dtype=weight_dtype)
    return model, inputs | {"return_dict": False}


@pytest.mark.parametrize("weight_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "ChromaTransformer2DModel"])
def test_diffusers_query_and_key_reach_attention_in_float32_beside_bfloat16_value(name, weight_dtype):
    model, inputs = _model_and_inputs(name, weight_dtype)
    with torch.autocast("cpu", dtype=BF16), attention_dtypes() as attention, torch.no_grad():
        model(**inputs)
    assert set(attention) == {(BF16, BF16, BF16)}

    with emulate_cuda_autocast():
        with torch.autocast("cpu", dtype=BF16), attention_dtypes() as attention:
            (output,) = model(**inputs)
        assert set(attention) == {(FP32, FP32, BF16)}
        output.float().square().mean().backward()
    assert output.dtype == BF16
    assert all(parameter.grad.dtype == weight_dtype for parameter in model.parameters() if parameter.grad is not None)
    assert all(block.attn.norm_q.weight.grad.abs().sum() > 0 for block in model.transformer_blocks)


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "ChromaTransformer2DModel"])
def test_diffusers_model_compiles_to_one_graph_with_the_same_result(name):
    torch._dynamo.reset()
    model, inputs = _model_and_inputs(name, BF16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with emulate_cuda_autocast(), torch.autocast("cpu", dtype=BF16):
        gradients = []
        for run in (model, compiled):
            model.zero_grad()
            (output,) = run(**inputs)
            output.float().square().mean().backward()
            gradients.append(model.transformer_blocks[0].attn.norm_q.weight.grad)
        (eager,), (traced,) = model(**inputs), compiled(**inputs)
    assert traced.dtype == eager.dtype == BF16
    torch.testing.assert_close(traced, eager)
    torch.testing.assert_close(*gradients)
