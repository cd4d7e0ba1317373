"""The training example: it fails as it comes, and trains once the q/k norms are replaced."""

import csv
import subprocess
import sys

import example_training
import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from qknorm import QKRMSNorm

pytestmark = pytest.mark.usefixtures("one_thread")

REFUSAL = "Query, key, and value must have the same dtype."


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("flag", ["--stock", "--replace"])
def test_the_command_fails_with_diffusers_own_message_as_it_comes_and_trains_with_one_line_more(flag):
    command = [sys.executable, example_training.__file__, flag, "--steps", "2", "--compiler", "none"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if flag == "--stock":
        assert run.returncode == 1
        assert run.stderr.splitlines()[-1] == f"ValueError: {REFUSAL}"
        assert "step 0" not in run.stdout
    else:
        assert run.returncode == 0, run.stderr
        assert run.stdout.startswith("replace_qk_norms: 6 replaced, 0 skipped\n")
        assert "\nstep 1: loss " in run.stdout


def test_compiled_stock_blocks_fail_in_the_first_step_for_the_same_reason():
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REFUSAL):
        example_training.train(1, replace=False, backend="strict", compiler="aot_eager")


def test_compiled_replaced_blocks_train_with_strict_attention_as_stock_ones_with_native():
    model, losses = example_training.train(12, replace=True, backend="strict", compiler="aot_eager")
    assert losses[-1] < 0.5 * losses[0]
    assert sum(isinstance(module, QKRMSNorm) for module in model.modules()) == 6
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * (4 + 3)  # A and B; of the single block to_out is no projection of the attention
    assert all(p.any() for name, p in trained.items() if "lora_B" in name)  # they start at zero

    _, stock = example_training.train(1, replace=False, backend="native", compiler="aot_eager")
    assert losses[0] == pytest.approx(stock[0], rel=torch.finfo(torch.bfloat16).eps / 2)


def test_the_plot_comes_with_its_numbers_and_the_registry_of_diffusers_is_left_as_it_was(tmp_path, monkeypatch):
    before = dict(vars(_AttentionBackendRegistry))
    path = tmp_path / "losses.png"
    argv = ["example_training.py", "--steps", "2", "--compiler", "none", "--plot", str(path)]
    monkeypatch.setattr(sys, "argv", argv)
    example_training.main()
    assert path.read_bytes().startswith(b"\x89PNG")
    header, *rows = csv.reader(path.with_suffix(".csv").open())
    assert header == ["step", "stock norms, native attention", "replaced norms, strict attention"]
    assert [row[0] for row in rows] == ["0", "1"]
    assert all(float(loss) > 0 for row in rows for loss in row[1:])
    assert dict(vars(_AttentionBackendRegistry)) == before
