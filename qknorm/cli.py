"""The command line: ``qknorm demo``, ``qknorm audit`` and ``qknorm env``. rich draws the demo's tables."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from . import audit, demo, functional, tiny

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACKAGES = ("qknorm", "torch", "triton", "diffusers", "transformers", "accelerate", "flash-attn", "flash-attn-4")


class Refused(Exception):
    """What the user can put right: printed in one line, exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 where something that should hold did not, 2 for bad use."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (Refused, ImportError) as error:
        print(f"qknorm {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qknorm", description="Dtype-preserving q/k norms for diffusion transformers."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    show = commands.add_parser("demo", help="the problem and the repair on a real, tiny diffusers model")
    show.add_argument("--model", choices=sorted(demo.MODELS), default="chroma", help="default: chroma")
    show.add_argument("--json", action="store_true", help="print the findings as JSON")
    show.set_defaults(run=_demo)

    look = commands.add_parser(
        "audit",
        help="which dtypes reach attention in a model, and why",
        description="Exit status 1 where a leak is left that replace_qk_norms cannot fix, or any with --strict.",
    )
    look.add_argument("model", metavar="CLASS", help="a diffusers class, or module:function returning (model, inputs)")
    look.add_argument("--weights", choices=DTYPES, default="bf16", help="dtype of a CLASS's weights (default: bf16)")
    look.add_argument("--autocast", choices=[*DTYPES, "none"], default="bf16", help="default: bf16")
    look.add_argument("--depth", type=int, help="run only so many blocks of each list of blocks")
    look.add_argument("--meta", action="store_true", help="run with no data and no weights, for models of any size")
    look.add_argument("--strict", action="store_true", help="exit status 1 for every leak")
    look.add_argument("--json", action="store_true", help="print the findings as JSON")
    look.set_defaults(run=_audit)

    env = commands.add_parser("env", help="versions, devices, and which path each device takes")
    env.add_argument("--json", action="store_true", help="print it as JSON")
    env.set_defaults(run=_env)
    return parser


def _demo(args: argparse.Namespace) -> int:
    if not args.json and importlib.util.find_spec("rich") is None:
        raise Refused('the tables need rich: pip install "qknorm[demo]", or use --json')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' own, of names that it uses itself
        result = demo.run(args.model)
    if args.json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        _show(result)
    return 1 if result.failed else 0


def _show(result: demo.Demo) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)

    def calls(title: str, rows: list[dict[str, Any]]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold")
        for column in ("attention call", "query", "key", "value"):
            table.add_column(column)
        for row in rows:
            value = row["value"]["dtype"]
            cells = [row[name]["dtype"] for name in ("query", "key")]
            cells = [cell if cell == value else f"[red]{cell}[/red]" for cell in cells]
            table.add_row(row["fqn"], *cells, value)
        console.print(table)

    console.print(
        f"[bold]{result.model}[/bold] of diffusers, tiny and random, bf16 weights, on {escape(result.device)}"
    )
    console.print(f"Under torch.autocast, with CUDA's policy: {result.policy}.\n")
    calls("1. What reaches attention in the stock model", result.before)
    console.print(f"   cause: {result.cause}\n")
    console.print("[bold]2. What diffusers' constraints for its flash backend say to that[/bold]")
    errors: dict[tuple[str, str], list[str]] = {}
    for refusal in result.refusals:
        errors.setdefault((refusal["check"], refusal["error"]), []).append(refusal["module"])
    for (check, error), modules in errors.items():
        console.print(f"   [red]{escape(error)}[/red]\n   from {check}, at {len(modules)} attention calls")
    console.print("" if errors else "   nothing: they accept it\n")
    console.print("[bold]3. qknorm.replace_qk_norms(model)[/bold]")
    console.print(escape(result.report) + "\n", soft_wrap=True)
    calls("4. What reaches attention now", result.after)
    console.print("\n[bold]5. What should hold[/bold]")
    steps = Table(show_header=False, box=None)
    for step in result.steps:
        mark = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: "-"}[step.ok]
        steps.add_row(mark, step.name, escape(step.detail))
    console.print(steps)
    if result.failed:
        console.print(f"\n[red]Failed: {', '.join(step.name for step in result.failed)}[/red]")
    else:
        console.print("\n[green]All that ran holds.[/green] In your code: qknorm.replace_qk_norms(transformer)")


def _audit(args: argparse.Namespace) -> int:
    autocast_dtype = None if args.autocast == "none" else DTYPES[args.autocast]
    model, inputs = _model_and_inputs(args.model, DTYPES[args.weights])
    named, given = (inputs, ()) if isinstance(inputs, dict) else ({}, tuple(inputs))
    try:
        report = audit.audit(
            model, given, named, autocast_dtype=autocast_dtype, depth=args.depth, on_meta=args.meta or None
        )
    except Exception as error:  # whatever the model's forward raises; 1 would mean a leak
        raise Refused(f"the forward of {args.model} raised {type(error).__name__}: {error}") from error
    print(json.dumps(report.as_dict(), indent=2) if args.json else report)
    return 1 if report.left_after_replacing or (args.strict and report.leaks) else 0


def _model_and_inputs(target: str, dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
    if ":" not in target:
        try:
            return tiny.build(target, dtype=dtype)
        except (KeyError, ValueError) as error:
            raise Refused(error.args[0]) from None
    module_name, _, function_name = target.partition(":")
    sys.path.insert(0, "")  # the user's own file in the folder where the command runs
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise Refused(f"{target}: {error}") from None
    finally:
        sys.path.remove("")
    try:
        made = function()
    except Exception as error:
        raise Refused(f"{target} raised {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise Refused(
            f"{target} must return (model, inputs), inputs a dict or a tuple, but returned {type(made).__name__}"
        )
    if not isinstance(made[1], dict | tuple | list):
        raise Refused(f"{target} must return its inputs as a dict or a tuple, but returned {type(made[1]).__name__}")
    return made


def _env(args: argparse.Namespace) -> int:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    devices = {"cpu": platform.processor() or platform.machine()}
    for i in range(torch.cuda.device_count()):
        capability = "sm_{}{}".format(*torch.cuda.get_device_capability(i))
        if torch.version.hip:
            capability = torch.cuda.get_device_properties(i).gcnArchName
        devices[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)} ({capability})"
    # The path depends on the device alone, so a tensor without memory does.
    paths = {name: functional.backend_for(torch.empty(0, device=name)) for name in devices}
    if args.json:
        print(json.dumps({"versions": versions, "devices": devices, "paths": paths}, indent=2))
        return 0
    width = max(map(len, [*versions, *devices]))
    for name, version in versions.items():
        print(f"{name:{width}}  {version}")
    for name, description in devices.items():
        print(f"{name:{width}}  {description}: takes the {paths[name]} path")
    return 0
