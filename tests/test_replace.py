"""``replace_qk_norms``, ``restore_qk_norms`` and ``find_qk_norms``: a test for each promise of what replacing means."""

import copy
import io
import pickle
import warnings
from dataclasses import dataclass

import accelerate
import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry, apply_layerwise_casting
from diffusers.hooks import ModelHook as DiffusersHook
from diffusers.hooks.layerwise_casting import apply_layerwise_casting_hook
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from diffusers.models.transformers.transformer_stable_audio3 import StableAudio3RMSNorm
from norms import (
    FLOATS,
    KNOWN,
    RMS_NORMS,
    Attention,
    BFLQKNorm,
    Blocks,
    LigerRMSNorm,
    LlamaRMSNorm,
    assert_same_bits,
    attention_dtypes,
    flux,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import prune

from qknorm import QKRMSNorm, find_qk_norms, register_norm, replace_qk_norms, restore_qk_norms, tiny
from qknorm.adapters import QK_NORM_NAMES, Adapter
from qknorm.autocast import emulate_cuda_autocast
from qknorm.module import Origin

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# As the field spells them, two of a kind.
SPELLINGS = """
    norm_q norm_k | norm_added_q norm_added_k | query_norm key_norm | q_rms_norm k_rms_norm | q_rms_norm_t k_rms_norm_t
    img_attn_q_norm img_attn_k_norm | txt_attn_q_norm txt_attn_k_norm | q_norm k_norm | q_img_norm k_img_norm
    q_norm_cam k_norm_cam | norm_q_a norm_k_a | norm_q_b norm_k_b | qnorm knorm | ln_q ln_k
    norm_q norm_k_img
"""
SPELLINGS = [tuple(pair.split()) for line in SPELLINGS.strip().splitlines() for pair in line.split("|")]


def kinds(model):
    """The class of every module, by name."""
    return {name: type(module) for name, module in model.named_modules()}


def reasons(report):
    return {entry.fqn: entry.reason for entry in report.skipped}


def autocast(dtype=BF16):
    """CUDA's autocast, on the CPU."""
    return _Both(emulate_cuda_autocast(policy="2.12"), torch.autocast("cpu", dtype=dtype))


class _Both:
    def __init__(self, *contexts):
        self.contexts = contexts

    def __enter__(self):
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error):
        for context in reversed(self.contexts):
            context.__exit__(*error)


@pytest.fixture(scope="module")
def process_group():
    """A world of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# What is chosen


@pytest.mark.parametrize("norm", KNOWN)
def test_every_known_class_is_replaced(norm):
    model = Blocks(KNOWN[norm])
    stock = copy.deepcopy(model)
    x = torch.randn(2, 5, 32)
    report = replace_qk_norms(model)
    assert [entry.fqn for entry in report.replaced] == [
        f"blocks.{i}.{name}" for i in range(2) for name in ("norm_q", "norm_k")
    ]
    assert {entry.after for entry in report.replaced} == {KNOWN[norm].stand_in}
    assert {entry.before for entry in report.replaced} == {type(stock.blocks[0].norm_q).__name__}
    assert report.skipped == []
    with autocast(), attention_dtypes() as dtypes:
        model(x)
    assert dtypes == [(BF16,) * 3] * 2
    assert_same_bits(model(x), stock(x))


@pytest.mark.parametrize("names", SPELLINGS, ids=" ".join)
@pytest.mark.parametrize("norm", ["torch", "diffusers", "BFL", "LayerNorm"])
def test_every_spelling_of_the_field_is_found(names, norm):
    model = Blocks(KNOWN[norm], names)
    assert len(replace_qk_norms(model)) == 4
    assert all(type(n).__name__ == KNOWN[norm].stand_in for block in model.blocks for n in block.qk_norms)


def test_the_spellings_are_all_tested():
    assert {name for pair in SPELLINGS for name in pair} == QK_NORM_NAMES


def test_norms_in_a_container_of_their_own_are_found():
    model = nn.ModuleDict({"norm": BFLQKNorm(8), "qknorm": nn.ModuleDict({"qnorm": KNOWN["torch"](8)})})
    report = replace_qk_norms(model)
    assert [entry.fqn for entry in report.replaced] == ["norm.query_norm", "norm.key_norm", "qknorm.qnorm"]
    q, k, v = (torch.randn(2, 8, dtype=dtype) for dtype in (FP32, FP32, BF16))
    assert [t.dtype for t in model["norm"](q, k, v)] == [BF16, BF16]


def test_a_norm_under_another_name_is_left_alone():
    model = Attention(names=("norm_query", "norm"))
    before = dict(model.named_modules())
    with pytest.warns(UserWarning, match="found no q/k norm"):
        replace_qk_norms(model)
    assert dict(model.named_modules()) == before


def test_pre_norm_q_is_not_touched():
    model = Blocks(KNOWN["LayerNorm"])
    before = model.blocks[0].pre_norm_q
    replace_qk_norms(model)
    assert model.blocks[0].pre_norm_q is before


def test_a_filter_takes_the_place_of_the_test_by_name():
    model = Blocks(names=("norm_q", "mine"))
    asked = {}

    def mine(fqn, module):
        asked[fqn] = module
        return fqn == "blocks.1.mine"

    report = replace_qk_norms(model, filter=mine)
    assert [entry.fqn for entry in report.replaced] == ["blocks.1.mine"]
    assert type(model.blocks[1].mine) is QKRMSNorm
    assert type(model.blocks[1].norm_q) is nn.RMSNorm
    assert asked.pop("blocks.1.mine") is not model.blocks[1].mine
    assert asked.items() <= dict(model.named_modules()).items()


def test_a_filter_never_takes_the_place_of_the_test_by_class():
    model = Blocks(LigerRMSNorm)
    before = kinds(model)
    with pytest.warns(UserWarning, match="found no q/k norm"):
        report = replace_qk_norms(model, filter=lambda fqn, module: not isinstance(module, nn.LayerNorm))
    assert kinds(model) == before
    assert len(report.skipped) == len(before) - 3  # all but the two pre_norm_q and the model itself
    assert "nothing is known of norms.LigerRMSNorm" in reasons(report)["blocks.0.norm_q"]


def test_a_class_of_the_users_own_is_added_by_register_norm(registered):
    class Own(LlamaRMSNorm):
        pass

    class OwnSubclass(Own):
        pass

    with pytest.warns(UserWarning, match="found no q/k norm"):
        assert len(replace_qk_norms(Blocks(Own))) == 0
    registered(Own, Adapter(eps="variance_epsilon", rounding="once"))
    registered(Own, Adapter(eps="variance_epsilon", rounding="input"))  # the last one holds
    model = Blocks(Own)
    assert len(replace_qk_norms(model)) == 4
    assert model.blocks[0].norm_q.rounding == "input"
    with pytest.warns(UserWarning, match="found no q/k norm"):
        assert len(replace_qk_norms(Blocks(OwnSubclass))) == 0


@pytest.mark.parametrize(
    ("cls", "adapter", "error", "message"),
    [
        (nn.RMSNorm(4), Adapter(), TypeError, "cls must be a subclass of torch.nn.Module, but is RMSNorm"),
        (int, Adapter(), TypeError, "cls must be a subclass of torch.nn.Module, but is <class 'int'>"),
        (LigerRMSNorm, "weight", TypeError, "adapter must be a qknorm.adapters.Adapter, but is 'weight'"),
        (LigerRMSNorm, Adapter(rounding="twice"), ValueError, "adapter.rounding must be .* but is 'twice'"),
        (LigerRMSNorm, Adapter(weight="g"), ValueError, "adapter.weight must be .* but is 'g'"),
        (LigerRMSNorm, Adapter(twin="QKLayerNorm"), ValueError, "adapter.twin .* but is 'QKLayerNorm'"),
        (LigerRMSNorm, Adapter(eps=[1e-6]), TypeError, r"adapter.eps must be .* but is \[1e-06\]"),
    ],
)
def test_register_norm_refuses_what_is_no_class_or_no_adapter(registered, cls, adapter, error, message):
    with pytest.raises(error, match=message):
        register_norm(cls, adapter)
    assert len(find_qk_norms(Blocks(LigerRMSNorm))) == 4
    assert all(isinstance(verdict, str) for _, _, verdict in find_qk_norms(Blocks(LigerRMSNorm)))


# What is skipped


class SubclassedRMSNorm(nn.RMSNorm):
    """May compute anything."""


class MyRMSNorm(DiffusersRMSNorm):
    """May compute anything."""

    def __init__(self, dim):
        super().__init__(dim, eps=1e-6)


def parametrised(dim):
    return nn.utils.parametrizations.weight_norm(nn.RMSNorm(dim), dim=None)


def old_weight_norm(dim):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.RMSNorm(dim), dim=None)


def pruned(dim):
    norm = nn.RMSNorm(dim)
    prune.identity(norm, "weight")
    return norm


def quantised(dim):
    norm = nn.RMSNorm(dim)
    norm.weight = nn.Parameter(torch.zeros(2 * dim, dtype=torch.uint8), requires_grad=False)
    return norm


def compiled_in_place(dim):
    norm = nn.RMSNorm(dim)
    norm.compile(backend="eager")
    return norm


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda dim: None, "the model has no norm there"),
        (lambda dim: nn.Identity(), "it norms nothing"),
        (FP32LayerNorm, "it returns the dtype of its input already"),
        (SubclassedRMSNorm, "it is a test_replace.SubclassedRMSNorm, a subclass of RMSNorm that may compute something"),
        (MyRMSNorm, "something else; if it does not, qknorm.register_norm(cls, adapter) adds it"),
        (LigerRMSNorm, "nothing is known of norms.LigerRMSNorm; qknorm.register_norm(cls, adapter) adds it"),
        (nn.BatchNorm1d, "nothing is known of torch.nn.modules.batchnorm.BatchNorm1d; qknorm.register_norm"),
        (parametrised, "it is parametrised; remove the parametrisation, or swap before adding it"),
        (old_weight_norm, "it has parameters or buffers of its own (weight_g, weight_v)"),
        (pruned, "it has parameters or buffers of its own (weight_orig, weight_mask)"),
        (quantised, "its weight is torch.uint8 (Parameter), quantised; dequantise it first"),
        (lambda dim: StableAudio3RMSNorm(dim, force_fp32=False), "its force_fp32 is False; only True is known"),
        (lambda dim: DiffusersRMSNorm((2, dim), eps=1e-6), "only torch.nn.RMSNorm is known to norm over several"),
        (compiled_in_place, "it is compiled by itself; swap before norm.compile()"),
        (lambda dim: torch.compile(nn.RMSNorm(dim)), "it is a wrapper (OptimizedModule); the norms inside"),
    ],
)
def test_what_cannot_be_replaced_is_skipped_with_the_reason_and_the_way_out(build, reason):
    model = Attention(names=("norm_q", "norm_k"))
    model.norm_k = build(16)
    before = dict(model.named_modules())
    report = replace_qk_norms(model)
    assert [entry.fqn for entry in report.replaced] == ["norm_q"]
    assert reason in reasons(report)["norm_k"]
    assert model.norm_k is before.get("norm_k")
    assert find_qk_norms(model)[-1 - ("norm_k._orig_mod" in before)][2] == reasons(report)["norm_k"]
    restore_qk_norms(model)
    assert kinds(model) == {name: type(module) for name, module in before.items()}


def test_norms_that_the_model_was_built_without_are_reported():
    model = Attention(lambda dim: None)
    assert "norm_q" not in model._modules  # never a module: a plain attribute
    with pytest.warns(UserWarning, match="found no q/k norm"):
        report = replace_qk_norms(model)
    assert reasons(report) == dict.fromkeys(["norm_q", "norm_k"], "the model has no norm there")
    assert find_qk_norms(model) == [(name, None, "the model has no norm there") for name in ("norm_q", "norm_k")]


def test_a_norm_that_was_compiled_as_a_module_is_not_swapped_behind_the_compiler():
    model = Attention()
    model.norm_k = torch.compile(model.norm_k, backend="eager")
    report = replace_qk_norms(model)
    assert "it is compiled by itself; swap before torch.compile(norm)" in reasons(report)["norm_k._orig_mod"]
    assert type(model.norm_k._orig_mod) is nn.RMSNorm


def test_the_norms_of_a_model_in_ddp_are_skipped_until_it_is_taken_out(process_group):
    model = nn.parallel.DistributedDataParallel(Blocks())
    before = dict(model.named_modules())
    with pytest.warns(UserWarning, match="found no q/k norm.*wrapped in DistributedDataParallel; swap before wrapping"):
        report = replace_qk_norms(model)
    assert set(reasons(report).values()) == {"the model is wrapped in DistributedDataParallel; swap before wrapping"}
    assert dict(model.named_modules()) == before


def shard_blocks(model):
    for block in model.blocks:
        fully_shard(block, mesh=dist.init_device_mesh("cpu", (1,)))
    return fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))


def shard_norms(model):
    for block in model.blocks:
        for norm in block.qk_norms:
            fully_shard(norm, mesh=dist.init_device_mesh("cpu", (1,)))
    return model


def shard_flat(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.parametrize(
    ("shard", "reason"),
    [
        (shard_blocks, "the model is wrapped in FSDPModule; swap before wrapping"),
        (shard_norms, "it is wrapped by FSDP; swap before fully_shard"),
        (shard_flat, "the model is wrapped in FullyShardedDataParallel; swap before wrapping"),
    ],
)
@pytest.mark.parametrize("norm", ["torch", "LayerNorm"])
def test_norms_under_fsdp_are_skipped_by_replace_and_restore(process_group, shard, reason, norm):
    model = shard(Blocks(KNOWN[norm]))
    before = dict(model.named_modules())
    with pytest.warns(UserWarning, match="found no q/k norm"):
        report = replace_qk_norms(model)
    assert set(reasons(report).values()) == {reason}
    assert dict(model.named_modules()) == before

    model = Blocks(KNOWN[norm])
    replace_qk_norms(model)
    model = shard(model)
    before = dict(model.named_modules())
    assert set(reasons(replace_qk_norms(model)).values()) == {"it is replaced already"}
    restored = restore_qk_norms(model)
    assert len(restored) == 0
    assert set(reasons(restored).values()) == {reason}
    assert dict(model.named_modules()) == before


def test_a_part_of_a_sharded_model_is_skipped_by_the_type_of_its_weights(process_group):
    model = shard_blocks(Blocks())
    inner = nn.ModuleDict(dict(model.blocks[0].named_children()))
    with pytest.warns(UserWarning, match="its weight is a DTensor of torch.float32; swap before sharding"):
        assert len(replace_qk_norms(inner)) == 0


@pytest.mark.parametrize("shard", [shard_blocks, nn.parallel.DistributedDataParallel])
def test_a_replaced_model_trains_under_ddp_and_fsdp2(process_group, shard):
    model = Blocks(KNOWN["diffusers"])
    replace_qk_norms(model)
    sharded = shard(model)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    with autocast(), attention_dtypes() as dtypes:
        loss = sharded(torch.randn(2, 5, 32)).square().mean()
    loss.backward()
    before = [p.detach().clone() for p in model.blocks[0].norm_q.parameters()]
    optimizer.step()
    assert dtypes == [(BF16,) * 3] * 2
    for old, new in zip(before, model.blocks[0].norm_q.parameters(), strict=True):
        assert not torch.equal(torch.as_tensor(old == new), torch.ones_like(old, dtype=torch.bool))


def test_finding_nothing_warns_and_names_the_norm_like_modules_that_were_seen():
    model = Blocks(names=("query_rms", "key_rms"))
    with pytest.warns(UserWarning, match="found no q/k norm") as warned:
        assert len(replace_qk_norms(model)) == 0
    message = str(warned[0].message)
    assert "found no q/k norm to replace; norm-like modules seen: " in message
    assert "blocks.*.query_rms (torch.nn.modules.normalization.RMSNorm)" in message
    assert "blocks.*.pre_norm_q (torch.nn.modules.normalization.LayerNorm)" in message
    assert "Linear" not in message
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="norm-like modules seen: none"):
        replace_qk_norms(nn.Linear(2, 2))


# The report


def test_a_report_counts_what_was_replaced_and_prints_a_table_of_it():
    model = Blocks()
    model.blocks[1].norm_k = LigerRMSNorm(16)
    report = replace_qk_norms(model)
    assert len(report) == len(report.replaced) == 3
    assert len(report.skipped) == 1
    assert vars(report.replaced[0]) == {
        "fqn": "blocks.0.norm_q",
        "before": "RMSNorm",
        "after": "QKRMSNorm",
        "reason": None,
    }
    lines = str(report).splitlines()
    assert lines[0] == "replace_qk_norms: 3 replaced, 1 skipped"
    assert lines[1].split() == ["module", "count", "from", "to"]
    assert lines[2].split() == ["blocks.*.norm_q", "2", "RMSNorm", "QKRMSNorm"]
    assert lines[3].split() == ["blocks.*.norm_k", "1", "RMSNorm", "QKRMSNorm"]
    assert lines[4].split()[:4] == ["blocks.*.norm_k", "1", "LigerRMSNorm", "skipped:"]
    assert lines[4].endswith("nothing is known of norms.LigerRMSNorm; qknorm.register_norm(cls, adapter) adds it")
    assert len({line.index(word) for line, word in zip(lines[1:4], ["to", "QKRMSNorm", "QKRMSNorm"], strict=True)}) == 1


def test_an_empty_report_is_true_and_prints_as_one_line():
    with pytest.warns(UserWarning, match="found no"):
        report = replace_qk_norms(nn.Linear(2, 2))
    assert report
    assert str(report) == "replace_qk_norms: 0 replaced, 0 skipped"


def test_find_tells_what_replace_would_do_and_changes_nothing():
    model = Blocks()
    model.blocks[1].norm_q, model.blocks[1].norm_k = None, LigerRMSNorm(16)
    before, attributes = dict(model.named_modules()), {n: dict(m.__dict__) for n, m in model.named_modules()}
    found = find_qk_norms(model)
    assert dict(model.named_modules()) == before
    assert {n: m.__dict__ for n, m in model.named_modules()} == attributes
    assert [fqn for fqn, _, _ in found] == [f"blocks.{i}.norm_{x}" for i in range(2) for x in "qk"]
    assert [module for _, module, _ in found] == [
        model.blocks[0].norm_q,
        model.blocks[0].norm_k,
        None,
        model.blocks[1].norm_k,
    ]
    assert isinstance(found[0][2], Adapter)
    assert found[2][2] == "the model has no norm there"
    report = replace_qk_norms(model)
    assert [e.fqn for e in report.replaced] == [fqn for fqn, _, verdict in found if isinstance(verdict, Adapter)]
    assert reasons(report) == {fqn: verdict for fqn, _, verdict in found if isinstance(verdict, str)}


def test_calling_twice_is_a_no_op_that_says_so():
    model = Blocks()
    replace_qk_norms(model)
    before = dict(model.named_modules())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = replace_qk_norms(model)
    assert len(again) == 0
    assert reasons(again) == dict.fromkeys(
        ["blocks.0.norm_q", "blocks.0.norm_k", "blocks.1.norm_q", "blocks.1.norm_k"], "it is replaced already"
    )
    assert dict(model.named_modules()) == before
    assert len(restore_qk_norms(model)) == 4
    assert len(restore_qk_norms(model)) == 0


# Errors leave nothing changed


@pytest.mark.parametrize("function", [replace_qk_norms, restore_qk_norms, find_qk_norms])
def test_a_model_that_is_no_module_is_a_type_error(function):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, but is dict"):
        function({"norm_q": nn.RMSNorm(4)})


def explode(fqn, module):
    if fqn == "blocks.1.norm_k":
        raise ZeroDivisionError
    return True


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "cuda"}, ValueError, r"backend must be one of \('auto', 'triton', 'torch'\), but is 'cuda'"),
        ({"backend": "triton"}, RuntimeError, "backend='triton' cannot run: .* on cpu"),
        ({"filter": explode}, ZeroDivisionError, ""),
        ({"filter": "norm_q"}, TypeError, "not callable"),
    ],
)
def test_an_error_leaves_nothing_changed(options, error, message):
    model = Blocks()
    before = dict(model.named_modules())
    with pytest.raises(error, match=message):
        replace_qk_norms(model, **options)
    assert dict(model.named_modules()) == before


class Frozen(Attention):
    """A module that takes no new children once it is frozen."""

    frozen = False

    def __setattr__(self, name, value):
        if self.frozen and isinstance(value, nn.Module):
            raise RuntimeError("frozen")
        super().__setattr__(name, value)


def test_an_error_while_modules_are_put_in_place_leaves_nothing_changed():
    model = nn.ModuleList([Attention(), Frozen()])
    model[1].frozen = True
    before = dict(model.named_modules())
    with pytest.raises(RuntimeError, match="frozen"):
        replace_qk_norms(model)
    assert dict(model.named_modules()) == before
    model[1].frozen = False
    replace_qk_norms(model)
    model[1].frozen = True
    before = dict(model.named_modules())
    with pytest.raises(RuntimeError, match="frozen"):
        restore_qk_norms(model)
    assert dict(model.named_modules()) == before


def test_the_backend_goes_to_the_new_modules():
    model = Blocks()
    replace_qk_norms(model, backend="torch")
    assert model.blocks[0].norm_q.backend == "torch"


# The same parameters under the same names


@pytest.mark.parametrize("norm", KNOWN)
def test_state_dict_keys_and_order_and_parameters_stay(norm):
    model = Blocks(KNOWN[norm])
    keys, parameters = list(model.state_dict()), list(model.named_parameters())
    for change in (replace_qk_norms, restore_qk_norms):
        change(model)
        assert list(model.state_dict()) == keys
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in parameters]
        assert all(new is old for (_, new), (_, old) in zip(model.named_parameters(), parameters, strict=True))
        assert model.load_state_dict(Blocks(KNOWN[norm]).state_dict()).missing_keys == []


@pytest.mark.parametrize("norm", ["torch", "BFL", "StableAudio3", "diffusers, bias", "DynamicTanh"])
def test_an_optimizer_made_before_goes_on(norm):
    model = Blocks(KNOWN[norm])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    replace_qk_norms(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(2, 5, 32)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert optimizer.state.keys() == set(model.parameters())


def test_an_ema_copy_goes_on():
    model = Blocks()
    before = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda ema, new, count: new)
    replace_qk_norms(model)
    after = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda ema, new, count: new)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    x = torch.randn(2, 5, 32)
    for ema in (before, after):
        ema.update_parameters(model)
        ema.update_parameters(model)
        assert_same_bits(ema(x), model(x))
    assert type(after.module.blocks[0].norm_q) is QKRMSNorm
    assert after.module.blocks[0].norm_q.weight is not model.blocks[0].norm_q.weight


def test_a_norm_in_two_places_stays_one():
    model = Blocks()
    model.blocks[1].norm_q = model.blocks[0].norm_q
    model.blocks[0].norm_k = model.blocks[0].norm_q
    original = model.blocks[0].norm_q
    for change, count in ((replace_qk_norms, 4), (restore_qk_norms, 4)):
        assert len(change(model)) == count
        shared = model.blocks[0].norm_q
        assert shared is not original
        assert model.blocks[1].norm_q is shared
        assert model.blocks[0].norm_k is shared


def test_a_block_in_two_places_is_seen_once():
    model = Blocks()
    model.again = model.blocks[0]
    model.itself = nn.ModuleList([model.blocks])
    assert len(replace_qk_norms(model)) == 4


def test_a_parameter_in_two_norms_stays_one():
    model = Attention()
    model.norm_k.weight = model.norm_q.weight
    for change in (replace_qk_norms, restore_qk_norms):
        change(model)
        assert model.norm_k.weight is model.norm_q.weight
        assert len(list(model.norm_q.parameters())) == 1


def test_attributes_on_parameters_and_requires_grad_stay():
    model = Attention()
    model.norm_q.weight.optimizer_group = "slow"
    model.norm_k.weight.requires_grad_(False)
    for change in (replace_qk_norms, restore_qk_norms):
        change(model)
        assert model.norm_q.weight.optimizer_group == "slow"
        assert model.norm_q.weight.requires_grad
        assert not model.norm_k.weight.requires_grad


def test_the_weight_is_read_at_every_call():
    model = Attention()
    replace_qk_norms(model)
    x = torch.randn(2, 5, 16)

    def normed_by(factor):
        return F.rms_norm(x, (16,), torch.full((16,), factor), eps=1e-6)

    model.norm_q.weight.data = torch.full((16,), 2.0)  # as an offloader swaps it
    assert_same_bits(model.norm_q(x), normed_by(2.0))
    model.norm_q.weight = nn.Parameter(torch.full((16,), 3.0))
    assert_same_bits(model.norm_q(x), normed_by(3.0))
    with torch.nn.utils.stateless._reparametrize_module(model, {"norm_q.weight": torch.full((16,), 4.0)}):
        assert_same_bits(model.norm_q(x), normed_by(4.0))


# Nothing else is stored


@pytest.mark.parametrize("norm", KNOWN)
def test_nothing_is_stored_but_the_options_and_the_record_of_what_was(norm):
    model = Attention(KNOWN[norm])
    old = dict(model.norm_q.__dict__)
    replace_qk_norms(model)
    new = model.norm_q.__dict__
    options = {"normalized_shape", "eps", "elementwise_affine", "unit_offset", "float32_weight", "rounding", "backend"}
    added = {"_qknorm_origin"} | (options - old.keys() if norm in RMS_NORMS else set())
    assert new.keys() - old.keys() == added
    assert old.keys() <= new.keys()
    assert all(new[name] is value or new[name] == value for name, value in old.items())
    assert new["_buffers"] == {}
    assert new["_modules"] == {}
    record = new["_qknorm_origin"]
    assert isinstance(record, Origin)
    assert record == pickle.loads(pickle.dumps(record))
    assert not any(isinstance(value, torch.Tensor) for value in vars(record).values())
    model(torch.randn(2, 5, 32, requires_grad=True)).sum().backward()
    assert model.norm_q.__dict__.keys() == new.keys()
    assert model.norm_q._buffers == {}


# What the new module is


@pytest.mark.parametrize("norm", RMS_NORMS)
def test_what_trainers_choose_modules_by_is_right(norm):
    model = Attention(KNOWN[norm])
    old = model.norm_q
    replace_qk_norms(model)
    new = model.norm_q
    assert isinstance(new, nn.RMSNorm)
    assert type(new).__name__.lower().endswith("rmsnorm")
    assert getattr(__import__(type(new).__module__, fromlist=["*"]), type(new).__qualname__) is type(new)
    affine = next(old.parameters(), None) is not None
    assert new.normalized_shape == (16,)
    assert new.elementwise_affine is affine
    assert new.eps == getattr(old, "eps", 1e-6)
    assert (new.weight is None) is not affine


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_stays(training):
    model = Blocks().train(training)
    model.blocks[0].norm_k.train(not training)
    for change in (replace_qk_norms, restore_qk_norms):
        change(model)
        assert model.blocks[0].norm_q.training is training
        assert model.blocks[0].norm_k.training is not training


def test_attributes_of_the_users_own_stay():
    model = Attention()
    model.norm_q.name_for_logs = "query"
    for change in (replace_qk_norms, restore_qk_norms):
        change(model)
        assert model.norm_q.name_for_logs == "query"


def test_a_replaced_model_can_be_copied_pickled_and_saved_whole():
    for known in KNOWN.values():
        model = Blocks(known)
        replace_qk_norms(model)
        x = torch.randn(2, 5, 32)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
            assert kinds(other) == kinds(model)
            assert_same_bits(other(x), model(x))
            assert len(restore_qk_norms(other)) == 4
            assert_same_bits(other(x), model(x))
        assert known.stand_in in repr(model)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("norm", KNOWN)
def test_to_and_meta_work_on_a_replaced_model(norm, dtype):
    model, stock = Blocks(KNOWN[norm]), Blocks(KNOWN[norm])
    stock.load_state_dict(model.state_dict())
    with torch.device("meta"):
        empty = Blocks(KNOWN[norm].build)
    for m in (model, empty):
        replace_qk_norms(m)
    x = torch.randn(2, 5, 32).to(dtype)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    expected = stock.to(dtype)(x)
    assert_same_bits(model.to(dtype)(x), expected)
    assert_same_bits(empty.to(dtype)(x), expected)


def test_a_model_of_fake_tensors_is_replaced():
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        model = nn.ModuleDict({"norm_q": DiffusersRMSNorm(16, eps=1e-6)})
        x = torch.randn(2, 5, 16, dtype=BF16)
        assert model["norm_q"](x).dtype is FP32
        assert len(replace_qk_norms(model)) == 1
        assert model["norm_q"](x).dtype is BF16
        assert model["norm_q"](x).device.type == "cuda"


# Hooks


def recorder(calls, name):
    def hook(*args):
        calls.append(name)

    return hook


def register_all(norm, calls, name):
    """A hook of each kind, and the handles."""
    return [
        norm.register_forward_hook(recorder(calls, f"{name} forward")),
        norm.register_forward_hook(lambda *args: calls.append(f"{name} kwargs"), with_kwargs=True),
        norm.register_forward_hook(recorder(calls, f"{name} always"), always_call=True),
        norm.register_forward_pre_hook(recorder(calls, f"{name} pre")),
        norm.register_forward_pre_hook(lambda *args: calls.append(f"{name} pre kwargs"), with_kwargs=True),
        norm.register_full_backward_hook(recorder(calls, f"{name} backward")),
        norm.register_full_backward_pre_hook(recorder(calls, f"{name} backward pre")),
        norm.register_state_dict_pre_hook(recorder(calls, f"{name} state_dict pre")),
        norm.register_state_dict_post_hook(recorder(calls, f"{name} state_dict")),
        norm.register_load_state_dict_post_hook(recorder(calls, f"{name} load")),
    ]


KINDS = "forward,kwargs,always,pre,pre kwargs,backward,backward pre,state_dict pre,state_dict,load".split(",")


def run_all(norm, calls):
    """What hooks are called by a forward, a backward, a save and a load."""
    calls.clear()
    norm(torch.randn(3, 16, requires_grad=True)).sum().backward()
    norm.load_state_dict(norm.state_dict())
    return sorted(calls)


@pytest.mark.parametrize("norm", ["torch", "diffusers, bias", "StableAudio3", "LayerNorm", "DynamicTanh"])
def test_hooks_survive_and_their_handles_still_remove_them(norm):
    model, calls = Attention(KNOWN[norm]), []
    before = register_all(model.norm_q, calls, "before")
    replace_qk_norms(model)
    between = register_all(model.norm_q, calls, "between")
    everything = sorted(f"{name} {kind}" for name in ("before", "between") for kind in KINDS)
    assert run_all(model.norm_q, calls) == everything
    before.pop().remove()
    between.pop().remove()
    everything.remove("before load")
    everything.remove("between load")
    assert run_all(model.norm_q, calls) == everything
    restore_qk_norms(model)
    assert run_all(model.norm_q, calls) == everything
    for handle in before + between:
        handle.remove()
    assert run_all(model.norm_q, calls) == []


def test_a_forward_hook_sees_and_changes_the_result_of_the_new_module():
    model = Attention(KNOWN["diffusers"])
    seen = []
    model.norm_q.register_forward_hook(lambda module, args, output: seen.append(output.dtype) or output * 0)
    replace_qk_norms(model)
    x = torch.randn(3, 16, dtype=BF16)
    assert_same_bits(model.norm_q(x).detach(), torch.zeros_like(x))
    assert seen == [BF16]


class Counting(ModelHook):
    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


class DiffusersCounting(DiffusersHook):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


TAKEN = "a hook (accelerate, diffusers offloading) took over its forward; remove it, or swap before it is attached"


def test_a_norm_with_an_accelerate_hook_is_skipped_and_the_hook_goes_on():
    model, hook = Attention(), Counting()
    add_hook_to_module(model.norm_q, hook)
    report = replace_qk_norms(model)
    assert reasons(report) == {"norm_q": TAKEN}
    model(torch.randn(2, 5, 32))
    assert hook.calls == 1
    remove_hook_from_module(model, recurse=True)
    assert [e.fqn for e in replace_qk_norms(model).replaced] == ["norm_q"]
    assert "forward" not in model.norm_q.__dict__
    with autocast(), attention_dtypes() as dtypes:
        model(torch.randn(2, 5, 32))
    assert dtypes == [(BF16,) * 3]


def test_a_norm_that_was_replaced_takes_an_accelerate_hook_and_is_not_restored_under_it():
    model, hook = Attention(), Counting()
    replace_qk_norms(model)
    add_hook_to_module(model.norm_q, hook)
    report = restore_qk_norms(model)
    assert reasons(report) == {"norm_q": TAKEN}
    assert [e.fqn for e in report.replaced] == ["norm_k"]
    model(torch.randn(2, 5, 32))
    assert hook.calls == 1
    remove_hook_from_module(model, recurse=True)
    assert len(restore_qk_norms(model)) == 1
    assert type(model.norm_q) is nn.RMSNorm
    assert "forward" not in model.norm_q.__dict__


def test_a_norm_with_a_diffusers_hook_is_skipped_and_the_hook_goes_on():
    model, hook = Attention(), DiffusersCounting()
    HookRegistry.check_if_exists_or_initialize(model.norm_q).register_hook(hook, "counting")
    assert reasons(replace_qk_norms(model)) == {"norm_q": TAKEN}
    model(torch.randn(2, 5, 32))
    assert hook.calls == 1
    model.norm_q._diffusers_hook.remove_hook("counting")
    assert [e.fqn for e in replace_qk_norms(model).replaced] == ["norm_q"]
    # The registry that is left behind is bound to the module that was replaced: a new hook must find the new one.
    HookRegistry.check_if_exists_or_initialize(model.norm_q).register_hook(DiffusersCounting(), "again")
    model(torch.randn(2, 5, 32))
    assert model.norm_q._diffusers_hook.get_hook("again").calls == 1
    assert reasons(restore_qk_norms(model)) == {"norm_q": TAKEN}


def test_accelerate_cpu_offload_works_before_and_after():
    x = torch.randn(2, 5, 32)
    model = Blocks()
    expected = model(x)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.warns(UserWarning, match="found no q/k norm"):
        report = replace_qk_norms(model)
    assert set(reasons(report).values()) == {TAKEN}
    assert_same_bits(model(x), expected)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert len(replace_qk_norms(model)) == 4
    assert_same_bits(model(x), expected)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(model.blocks[0].norm_q.parameters()).is_meta
    assert_same_bits(model(x), expected)


def test_group_offload_by_leaf_skips_the_norms_that_it_hooks_and_works_after():
    model, inputs = flux()
    expected = model(**inputs).sample
    model.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    with pytest.warns(UserWarning, match="found no q/k norm"):
        report = replace_qk_norms(model)
    assert set(reasons(report).values()) == {TAKEN}
    assert_same_bits(model(**inputs).sample, expected)

    model, inputs = flux()
    assert len(replace_qk_norms(model)) == 6
    model.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    assert_same_bits(model(**inputs).sample, expected)
    assert set(reasons(restore_qk_norms(model)).values()) == {TAKEN}


@pytest.mark.parametrize("order", ["before", "after"])
def test_group_offload_by_block_works_before_and_after(order):
    model, inputs = flux()
    expected = model(**inputs).sample
    if order == "after":
        model.enable_group_offload(torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1)
    assert len(replace_qk_norms(model)) == 6
    if order == "before":
        model.enable_group_offload(torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1)
    assert_same_bits(model(**inputs).sample, expected)
    with autocast(), attention_dtypes() as dtypes:
        model(**inputs)
    assert dtypes == [(BF16,) * 3] * 2


# Restore


@pytest.mark.parametrize("norm", KNOWN)
def test_restore_gives_back_class_attributes_state_and_parameters(norm):
    model = Blocks(KNOWN[norm]).to(BF16)
    modules = {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules() if not m._modules}
    x = torch.randn(2, 5, 32)
    expected = copy.deepcopy(model).float()(x)
    assert len(replace_qk_norms(model)) == len(restore_qk_norms(model)) == 4
    for name, (cls, attributes) in modules.items():
        module = model.get_submodule(name)
        assert type(module) is cls
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[k] is v or module.__dict__[k] == v for k, v in attributes.items())
        assert all(module._parameters[k] is p for k, p in attributes["_parameters"].items())
    assert_same_bits(model.float()(x), expected)


def test_restore_gives_back_attributes_that_the_new_module_needed_for_itself(registered):
    class Own(LlamaRMSNorm):
        def __init__(self, dim):
            super().__init__(dim)
            self.normalized_shape, self.eps, self.rounding, self.elementwise_affine = dim, 0.5, "up", None

    registered(Own, Adapter(eps="variance_epsilon", rounding="input"))
    model = Attention(Own)
    attributes = dict(model.norm_q.__dict__)
    replace_qk_norms(model)
    assert (model.norm_q.normalized_shape, model.norm_q.eps, model.norm_q.rounding) == ((16,), 1e-6, "input")
    copied = copy.deepcopy(model)
    restore_qk_norms(model)
    restore_qk_norms(copied)
    assert model.norm_q.__dict__ == attributes
    assert copied.norm_q.normalized_shape == 16
    assert copied.norm_q.rounding == "up"


def test_restore_keeps_what_training_changed():
    model = Attention()
    replace_qk_norms(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.randn(2, 5, 32)).square().sum().backward()
    optimizer.step()
    model.norm_q.weight.requires_grad_(False)
    model.eval().half()
    model.norm_k.weight = nn.Parameter(torch.full((16,), 2.0, dtype=FP16))
    model.norm_k.eps = 0.25
    trained = dict(model.named_parameters())
    assert not torch.equal(model.norm_q.weight, torch.ones_like(model.norm_q.weight))
    restore_qk_norms(model)
    assert all(p is trained[name] for name, p in model.named_parameters())
    assert not model.norm_q.weight.requires_grad
    assert not model.norm_q.training
    assert model.norm_k.eps == 0.25


def test_restore_leaves_alone_what_replaced_nothing():
    model = Attention(QKRMSNorm)
    before = dict(model.named_modules())
    report = restore_qk_norms(model)
    assert len(report) == 0
    assert set(reasons(report).values()) == {"it replaced nothing: it was built as what it is"}
    assert dict(model.named_modules()) == before


def test_restore_reports_what_it_did():
    model = Blocks(KNOWN["BFL"])
    replace_qk_norms(model)
    report = restore_qk_norms(model)
    assert str(report).splitlines()[0] == "restore_qk_norms: 4 replaced, 0 skipped"
    assert {(e.before, e.after) for e in report.replaced} == {("QKScaleRMSNorm", "BFLRMSNorm")}


def test_restore_undoes_a_replacement_by_filter():
    model = Blocks(names=("mine", "norm_k"))
    before = kinds(model)
    replace_qk_norms(model, filter=lambda fqn, module: fqn.endswith("mine"))
    replace_qk_norms(model)
    assert len(restore_qk_norms(model)) == 4
    assert kinds(model) == before


def test_a_norm_that_was_parametrised_or_compiled_since_is_not_restored():
    model = Attention()
    replace_qk_norms(model)
    nn.utils.parametrizations.weight_norm(model.norm_q, dim=None)
    model.norm_k.compile(backend="eager")
    before = dict(model.named_modules())
    report = restore_qk_norms(model)
    assert "it is parametrised; remove the parametrisation" in reasons(report)["norm_q"]
    assert "it is compiled by itself" in reasons(report)["norm_k"]
    assert dict(model.named_modules()) == before
    model(torch.randn(2, 5, 32))
    nn.utils.parametrize.remove_parametrizations(model.norm_q, "weight")
    assert len(restore_qk_norms(model)) == 1


def test_replace_and_restore_can_be_repeated():
    model = Blocks(KNOWN["StableAudio3"])
    attributes = dict(model.blocks[0].norm_q.__dict__)
    for _ in range(3):
        assert len(replace_qk_norms(model)) == 4
        assert len(restore_qk_norms(model)) == 4
    assert model.blocks[0].norm_q.__dict__ == attributes


# Others are not affected


@pytest.mark.parametrize("norm", KNOWN)
def test_global_classes_and_other_models_are_not_touched(norm):
    model, other = Blocks(KNOWN[norm]), Blocks(KNOWN[norm])
    classes = {cls for m in model.modules() for cls in type(m).__mro__}
    before = {cls: dict(vars(cls)) for cls in classes}
    modules = {name: (m, dict(m.__dict__)) for name, m in other.named_modules()}
    functions = F.rms_norm, F.layer_norm, torch.rms_norm
    replace_qk_norms(model)
    model(torch.randn(2, 5, 32))
    assert {cls: dict(vars(cls)) for cls in classes} == before
    assert functions == (F.rms_norm, F.layer_norm, torch.rms_norm)
    assert {name: (m, m.__dict__) for name, m in other.named_modules()} == modules


# Before and after everything else


def test_compiled_blocks_work_before_and_after():
    x = torch.randn(2, 5, 32, dtype=BF16)
    for wrap in ("torch.compile", "in place"):
        for order in ("before", "after"):
            torch._dynamo.reset()
            model = Blocks(KNOWN["diffusers"]).to(BF16)
            for block in model.blocks:
                for norm in block.qk_norms:
                    norm.float()
            expected = copy.deepcopy(model)
            replace_qk_norms(expected)
            if order == "before":
                assert len(replace_qk_norms(model)) == 4
            if wrap == "in place":
                for block in model.blocks:
                    block.compile(backend="eager", fullgraph=True)
            else:
                model.blocks = nn.ModuleList(torch.compile(b, backend="eager", fullgraph=True) for b in model.blocks)
            if order == "after":
                with pytest.raises(RuntimeError, match="same dtype"):
                    model(x)  # the code that was compiled for the old norms must not be run again
                assert len(replace_qk_norms(model)) == 4
            assert_same_bits(model(x), expected(x))
            assert len(restore_qk_norms(model)) == 4
            with pytest.raises(RuntimeError, match="same dtype"):
                model(x)


def test_a_compiled_model_is_replaced_through_its_wrapper():
    model = torch.compile(Blocks(KNOWN["diffusers"]), backend="eager", fullgraph=True)
    x = torch.randn(2, 5, 32)
    expected = model(x)
    report = replace_qk_norms(model)
    assert report.replaced[0].fqn == "_orig_mod.blocks.0.norm_q"
    assert_same_bits(model(x), expected)
    model.bfloat16()
    for block in model.blocks:
        block.norm_q.float()  # a norm that hands back float32 makes attention raise
    assert model(x.bfloat16()).dtype is BF16


def test_peft_lora_works_before_and_after():
    x = torch.randn(2, 5, 32)
    config = peft.LoraConfig(target_modules=["to_q", "to_k"], init_lora_weights=False)
    stock = Blocks(KNOWN["diffusers"])
    for order in ("before", "after"):
        model = copy.deepcopy(stock)
        if order == "before":
            replace_qk_norms(model)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config)
        if order == "after":
            assert len(replace_qk_norms(model)) == 4
        torch.manual_seed(0)
        expected = peft.get_peft_model(copy.deepcopy(stock), config)
        assert_same_bits(model(x), expected(x))
        assert list(model.state_dict()) == list(expected.state_dict())
        with autocast(), attention_dtypes() as dtypes:
            model(x)
        assert dtypes == [(BF16,) * 3] * 2
        assert_same_bits(model.merge_and_unload()(x), expected.merge_and_unload()(x))


def test_peft_modules_to_save_works_before_and_after():
    x = torch.randn(2, 5, 32)
    config = peft.LoraConfig(target_modules=["to_q"], modules_to_save=["norm_q"])
    for order in ("before", "after"):
        model = Blocks(KNOWN["diffusers"])
        if order == "before":
            replace_qk_norms(model)
        model = peft.get_peft_model(model, config)
        expected = list(model.state_dict())
        if order == "after":
            report = replace_qk_norms(model)
            assert len(report) == 6  # two norm_k, and two norm_q with a trainable copy each
            assert "it is a wrapper (ModulesToSaveWrapper)" in reasons(report)["base_model.model.blocks.0.norm_q"]
        assert list(model.state_dict()) == expected
        wrapper = model.base_model.model.blocks[0].norm_q
        assert type(wrapper.original_module) is type(wrapper.modules_to_save["default"]) is QKRMSNorm
        assert wrapper.modules_to_save["default"].weight.requires_grad
        with autocast(), attention_dtypes() as dtypes:
            model(x).sum().backward()
        assert dtypes == [(BF16,) * 3] * 2
        assert wrapper.modules_to_save["default"].weight.grad is not None
        assert wrapper.original_module.weight.grad is None
        assert len(restore_qk_norms(model)) == 6
        assert list(model.state_dict()) == expected


@pytest.mark.parametrize("order", ["before", "after"])
def test_fused_qkv_projections_work_before_and_after(order):
    model, inputs = flux()
    expected = copy.deepcopy(model)
    expected.fuse_qkv_projections()
    if order == "after":
        model.fuse_qkv_projections()
    assert len(replace_qk_norms(model)) == 6
    if order == "before":
        model.fuse_qkv_projections()
    assert_same_bits(model(**inputs).sample, expected(**inputs).sample)
    with autocast(), attention_dtypes() as dtypes:
        model(**inputs)
    assert dtypes == [(BF16,) * 3] * 2
    model.unfuse_qkv_projections()
    assert_same_bits(model(**inputs).sample, flux()[0](**inputs).sample)


@pytest.mark.parametrize("order", ["before", "after"])
def test_gradient_checkpointing_works_before_and_after(order):
    def gradients(model):
        for p in model.parameters():
            p.grad = None
        model(**inputs).sample.square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model, inputs = flux()
    model.train()
    expected = copy.deepcopy(model)
    replace_qk_norms(expected)
    if order == "after":
        model.enable_gradient_checkpointing()
    replace_qk_norms(model)
    if order == "before":
        model.enable_gradient_checkpointing()
    ours, plain = gradients(model), gradients(expected)
    assert ours.keys() == plain.keys()
    assert any("norm_q" in name for name in ours)
    for name, grad in ours.items():
        assert_same_bits(grad, plain[name])


@pytest.mark.parametrize("what", ["block", "norm"])
def test_checkpoint_wrappers_work_before_and_after(what):
    x = torch.randn(2, 5, 32)
    for order in ("before", "after"):
        model = Blocks(KNOWN["diffusers"])
        expected = copy.deepcopy(model)
        replace_qk_norms(expected)
        if order == "before":
            replace_qk_norms(model)
        if what == "block":
            model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
        else:
            for block in model.blocks:
                block.norm_q = checkpoint_wrapper(block.norm_q)
        if order == "after":
            assert len(replace_qk_norms(model)) == 4
        with autocast(), attention_dtypes() as dtypes:
            loss = model(x).square().mean()
            loss.backward()
            expected(x).square().mean().backward()
        assert set(dtypes) == {(BF16,) * 3}
        for ours, plain in zip(model.parameters(), expected.parameters(), strict=True):
            assert_same_bits(ours.grad, plain.grad)


@pytest.mark.parametrize("order", ["before", "after"])
def test_layerwise_casting_works_before_and_after(order):
    def cast(model):
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=BF16)

    model, inputs = flux(BF16)
    expected = copy.deepcopy(model)
    cast(expected)
    if order == "after":
        cast(model)
    assert len(replace_qk_norms(model)) == 6
    if order == "before":
        cast(model)
    assert_same_bits(model(**inputs).sample, expected(**inputs).sample)
    assert model.transformer_blocks[0].attn.norm_q.weight.dtype is BF16


def test_a_norm_that_layerwise_casting_hooks_is_skipped_and_goes_on():
    model = Attention().to(BF16)
    x = torch.randn(2, 5, 32, dtype=BF16)
    expected = model(x)
    apply_layerwise_casting_hook(model.norm_q, torch.float8_e5m2, BF16, non_blocking=False)
    assert reasons(replace_qk_norms(model)) == {"norm_q": TAKEN}
    assert model.norm_q.weight.dtype is torch.float8_e5m2
    assert model(x).shape == expected.shape


def test_layerwise_casting_by_class_does_not_mistake_the_new_norms_for_layers():
    model = Attention().to(BF16)
    replace_qk_norms(model)
    apply_layerwise_casting(model, torch.float8_e5m2, BF16, skip_modules_pattern=("pre_norm",))
    assert model.norm_q.weight.dtype is BF16
    assert model.to_q.weight.dtype is torch.float8_e5m2


@pytest.mark.parametrize("dtype", [BF16, FP16, None])
def test_from_pretrained_and_save_pretrained_work_in_any_dtype(tmp_path, dtype):
    model, inputs = flux(dtype or FP32)
    replace_qk_norms(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, torch_dtype=dtype)
    assert type(loaded.transformer_blocks[0].attn.norm_q) is nn.RMSNorm
    assert list(loaded.state_dict()) == list(model.state_dict())
    for ours, saved in zip(loaded.parameters(), model.parameters(), strict=True):
        assert_same_bits(ours, saved)
    expected = loaded(**inputs).sample
    assert len(replace_qk_norms(loaded)) == 6
    assert_same_bits(loaded(**inputs).sample, expected)


# Whole models: one for each norm class and layout


@dataclass(frozen=True)
class Family:
    """What is known of a model under CUDA's autocast: whether q and k leak with bf16 and with float32 weights."""

    layout: str
    leaks_with: tuple[torch.dtype, ...]
    count: int  # of norms that can be replaced
    rope_leaks_with: tuple[torch.dtype, ...] = ()  # still, since RoPE promotes after the norm


FAMILIES = {
    # torch.nn.RMSNorm
    "FluxTransformer2DModel": Family("(B, S, H, D)", (BF16, FP32), 6),
    "Flux2Transformer2DModel": Family("(B, S, H, D), strided in single blocks", (BF16, FP32), 6),
    "Flux3Transformer2DModel": Family("(B, S, H, D), float32 on purpose", (), 8),
    "ChromaTransformer2DModel": Family("(B, S, H, D)", (BF16, FP32), 6),
    "BriaFiboTransformer2DModel": Family("(B, S, H, D), two norm classes", (BF16, FP32), 6),
    "WanTransformer3DModel": Family("(B, S, H*D)", (BF16, FP32), 8),
    "WanAnimateTransformer3DModel": Family("(B, S, H*D), 5-D keys", (BF16, FP32), 12),
    "LTXVideoTransformer3DModel": Family("(B, S, H*D)", (BF16, FP32), 4),
    "HiDreamImageTransformer2DModel": Family("(B, S, H*D), cast by the processor", (), 6),
    "Kandinsky5Transformer3DModel": Family("(B, S, H, D), eps None, float32 on purpose", (), 6),
    "Kandinsky6Transformer3DModel": Family("(B, S, H, D), eps None", (BF16, FP32), 16),
    "JoyImageEditTransformer3DModel": Family("(B, S, H, D), strided", (BF16, FP32), 8),
    "AnimaTextConditioner": Family("(B, S, H, D)", (BF16, FP32), 4, (FP32,)),
    "AutoencoderKLMiniMaxH3": Family("(B, S, H, D), no weight", (), 4),
    # diffusers' RMSNorm
    "QwenImageTransformer2DModel": Family("(B, S, H, D)", (FP32,), 8),
    "SD3Transformer2DModel#SD35Transformer": Family("(B, H, S, D), strided", (FP32,), 10),
    "HunyuanVideoTransformer3DModel": Family("(B, S, H, D)", (FP32,), 6),
    "LongCatAudioDiTTransformer": Family("(B, S, H*D)", (FP32,), 8),
    "Lumina2Transformer2DModel": Family("(B, S, H, D), cast by the processor", (), 6),
    "Ideogram4Transformer2DModel": Family("(B, S, H, D)", (FP32,), 4, (FP32,)),
    # classes of one model's own
    "Krea2Transformer2DModel": Family("(B, S, H, D), zero-centred", (), 6),
    "MochiTransformer3DModel": Family("(B, S, H, D)", (), 8),
    "Cosmos3OmniTransformer": Family("(S, H, D)", (FP32,), 4, (FP32,)),
    "StableAudio3DiTModel": Family("(B, S, H, D), strided", (), 4),
    # norms that are no RMSNorms
    "CogVideoXTransformer3DModel": Family("(B, H, S, D), LayerNorm", (BF16, FP32), 4),
    "CogView3PlusTransformer2DModel": Family("(B, H, S, D), LayerNorm without weight", (BF16, FP32), 4),
    "AutoencoderKLMochi": Family("(B, H, S, D), LpNorm", (BF16, FP32), 8),
    "AutoencoderSAME": Family("(B, S, H, D), DynamicTanh", (FP32,), 8),
}


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", FAMILIES)
def test_q_k_and_v_of_a_whole_model_reach_attention_in_one_dtype(name, dtype):
    family = FAMILIES[name]
    model, inputs = tiny.build(name, dtype=dtype)
    normed = []

    def leaks():
        with torch.no_grad(), autocast(), attention_dtypes() as dtypes:
            model(**inputs)
        assert dtypes
        return any(len(set(qkv)) > 1 for qkv in dtypes)

    assert leaks() is (dtype in family.leaks_with)
    report = replace_qk_norms(model)
    assert len(report) == family.count
    for entry in report.replaced:
        norm = model.get_submodule(entry.fqn)
        norm.register_forward_hook(lambda module, args, output: normed.append((args[0].dtype, output.dtype)))
    assert leaks() is (dtype in family.rope_leaks_with)
    assert normed
    assert all(before is after for before, after in normed)


def test_a_model_whose_norms_are_fit_already_warns_and_is_left_alone():
    model, _ = tiny.build("AuraFlowTransformer2DModel", dtype=BF16)
    before = dict(model.named_modules())
    with pytest.warns(UserWarning, match="skipped: .*norm_q: it returns the dtype of its input already"):
        replace_qk_norms(model)
    assert dict(model.named_modules()) == before
