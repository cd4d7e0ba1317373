"""Train a LoRA on a small Chroma: bf16 autocast, gradient checkpointing, compiled blocks, half-precision attention.

    python tests/example_training.py --stock      # what every such trainer does: fails in its first step
    python tests/example_training.py --replace    # the same and one line more: trains
    python tests/example_training.py --steps 60 --plot losses.png

With flash-attn installed (and a GPU) that is the attention. Elsewhere it is torch's own, held to the conditions on q, k
and v that diffusers states for flash-attn, and without a GPU CUDA's autocast is emulated.
"""

import argparse
import contextlib
import csv
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from peft import LoraConfig

import qknorm
from qknorm import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def attention(model: torch.nn.Module, backend: str) -> Iterator[None]:
    """Attention by ``native``, which takes any dtypes, or ``strict``, which wants q, k and v in one half dtype."""
    registry = _AttentionBackendRegistry
    flash, native = AttentionBackendName.FLASH, AttentionBackendName.NATIVE
    backends, conditions = registry._backends, registry._constraints[flash]

    def checked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        for check in conditions:
            check(query, key, value)
        return backends[native](query, key, value, **options)

    if backend == "strict" and DEVICE == "cuda" and importlib.util.find_spec("flash_attn") is not None:
        model.set_attention_backend("flash")
    elif backend == "strict":
        registry._backends = {**backends, native: checked}
    try:
        yield
    finally:
        registry._backends = backends


def train(steps: int, *, replace: bool, backend: str, compiler: str) -> tuple[torch.nn.Module, list[float]]:
    """The trained model and the loss of each step: flow matching from noise to one batch of random latents."""
    model, inputs = tiny.build("ChromaTransformer2DModel", device=DEVICE)
    model.requires_grad_(False).train()
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    model.enable_gradient_checkpointing()
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        if compiler != "none":
            block.compile(fullgraph=True, backend=compiler)
    if replace:
        print(qknorm.replace_qk_norms(model))  # the one line; before or after those above
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

    latents = inputs["hidden_states"]
    noise = torch.randn(latents.shape).to(DEVICE)
    time = torch.rand(len(latents)).to(DEVICE)
    inputs |= {"hidden_states": torch.lerp(latents, noise, time[:, None, None]), "timestep": time}
    losses = []
    with attention(model, backend), contextlib.nullcontext() if DEVICE == "cuda" else qknorm.emulate_cuda_autocast():
        for _ in range(steps):
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                velocity = model(**inputs).sample
                loss = torch.nn.functional.mse_loss(velocity.float(), noise - latents)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


def plot(path: Path, curves: dict[str, list[float]]) -> None:
    """The losses as a picture, and beside it as a .csv of the same name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss", ylim=0)
    axes.legend()
    figure.savefig(path, dpi=100)
    with path.with_suffix(".csv").open("w", newline="") as file:
        rows = zip(itertools.count(), *([f"{loss:.6g}" for loss in losses] for losses in curves.values()))
        csv.writer(file, lineterminator="\n").writerows([("step", *curves), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a LoRA on a small Chroma.")
    parser.add_argument("--steps", type=int, default=20)
    norms = parser.add_mutually_exclusive_group()
    norms.add_argument("--replace", action="store_true", help="replace the q/k norms (the default)")
    norms.add_argument("--stock", action="store_true", help="leave them as they are")
    parser.add_argument("--backend", choices=["strict", "native"], default="strict", help="of attention")
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile, or none")
    parser.add_argument("--plot", metavar="PATH", type=Path, help="train stock and replaced, and draw the losses")
    args = parser.parse_args()
    if args.plot:
        stock = train(args.steps, replace=False, backend="native", compiler=args.compiler)[1]
        ours = train(args.steps, replace=True, backend="strict", compiler=args.compiler)[1]
        plot(args.plot, {"stock norms, native attention": stock, "replaced norms, strict attention": ours})
    else:
        _, losses = train(args.steps, replace=not args.stock, backend=args.backend, compiler=args.compiler)
        print("\n".join(f"step {i}: loss {loss:.4f}" for i, loss in enumerate(losses)))


if __name__ == "__main__":
    main()
