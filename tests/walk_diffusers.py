"""Every diffusers class with q/k norms: which dtypes reach attention, before and after ``replace_qk_norms``.

    python tests/walk_diffusers.py [NAME ...] [--csv PATH]

NAME is one of ``qknorm.tiny.names()``, or a class without its variants; none means all. Each is run in every
combination of weights (bfloat16, float32, bfloat16 with the q/k norms in float32), of CUDA's autocast policy (on, off)
and of fused projections (where the stock model's fusing works), as it is and swapped.

A call leaks where query or key has another dtype than value. Attention is watched where models call it: at the name
``dispatch_attention_fn`` in each module of diffusers, and at ``F.scaled_dot_product_attention``. This is on purpose not
the way of ``qknorm.audit``, so that the two can be held against each other.

Exit status 1: after the swap something leaks that is not in ``BEYOND_NORMS``, a q/k norm gives back another dtype than
it was given, or a forward fails that did not before. At the end stand the model classes of diffusers that seem to have
q/k norms and have no tiny model.
"""

import argparse
import ast
import contextlib
import csv
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from qknorm import emulate_cuda_autocast, replace_qk_norms, tiny
from qknorm.adapters import QK_NORM_NAMES

WEIGHTS = ("bf16", "fp32", "bf16, norms fp32")
# With float32 weights under autocast RoPE promotes after the norm here: cos and sin have the dtype of the hidden
# states, and the result is not cast back. No norm can undo that.
BEYOND_NORMS = ("AnimaTextConditioner", "Cosmos3OmniTransformer", "Ideogram4Transformer2DModel")
# What looks as if it had q/k norms of its own, and why it needs no tiny model.
NO_MODEL_NEEDED = {
    "DreamLiteTransformer2DModel": "a part of DreamLiteUNetModel",
    "SanaControlNetModel": "its blocks can have them, and are not asked to",
}

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]


@dataclass(frozen=True)
class Row:
    """One combination, stock and swapped: "ok", or "LEAK ..." or "no call", with or without "ERROR ..."."""

    model: str
    weights: str
    autocast: bool
    fused: bool
    stock: str
    swapped: str
    replaced: int
    norms_called: int = 0
    norms_promoting_when_swapped: int = 0

    @property
    def failed(self) -> str | None:
        if self.norms_promoting_when_swapped:
            return "a q/k norm changes the dtype after the swap"
        beyond = self.model.partition("#")[0] in BEYOND_NORMS and self.weights == "fp32" and self.autocast
        if "LEAK" in self.swapped and not beyond:
            return "leaks after the swap"
        if "ERROR" in self.swapped and "ERROR" not in self.stock:
            return "fails after the swap"
        return None


@contextlib.contextmanager
def attention_watched(seen: list[Dtypes]) -> Iterator[None]:
    """Append the dtypes of query, key and value of every attention call to ``seen``."""
    original = importlib.import_module("diffusers.models.attention_dispatch").dispatch_attention_fn

    def watching(call: Any) -> Any:
        def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append((query.dtype, key.dtype, value.dtype))
            return call(query, key, value, *args, **kwargs)

        return watched

    places = [m for m in [*sys.modules.values()] if getattr(m, "dispatch_attention_fn", None) is original]
    native = F.scaled_dot_product_attention
    try:
        for module in places:
            module.dispatch_attention_fn = watching(original)  # type: ignore[attr-defined]
        F.scaled_dot_product_attention = watching(native)
        yield
    finally:
        F.scaled_dot_product_attention = native
        for module in places:
            module.dispatch_attention_fn = original  # type: ignore[attr-defined]


def qk_norms(model: nn.Module) -> list[nn.Module]:
    return [module for fqn, module in model.named_modules() if fqn.rpartition(".")[2] in QK_NORM_NAMES]


def fuse(model: Any) -> str | None:
    """Why there is nothing to see with fused projections, if so."""
    if not hasattr(model, "fuse_qkv_projections"):
        return "no method"
    before = len([*model.modules()])
    try:
        model.fuse_qkv_projections()
    except Exception as error:
        return describe(error)
    return "fuses nothing" if len([*model.modules()]) == before else None


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def verdict(seen: Sequence[Dtypes], error: Exception | None) -> str:
    leaks = [call for call in seen if {*call[:2]} != {call[2]}]
    parts = []
    if leaks:
        dtypes = "/".join(str(dtype).removeprefix("torch.").replace("float", "f") for dtype in leaks[0])
        parts.append(f"LEAK {dtypes}, {len(leaks)} of {len(seen)} calls")
    elif not seen:
        parts.append("no call")
    if error is not None:
        parts.append(f"ERROR {describe(error)}")
    return "; ".join(parts) or "ok"


@dataclass
class Look:
    """One forward: its verdict, and of the q/k norms how many were replaced, called, and gave another dtype back."""

    verdict: str
    replaced: int
    called: int
    promoting: int


def look(name: str, weights: str, autocast: bool, *, fused: bool, swapped: bool) -> Look:
    model, inputs = tiny.build(name, dtype=torch.float32 if weights == "fp32" else torch.bfloat16)
    if weights == "bf16, norms fp32":
        for norm in qk_norms(model):
            norm.float()
    if fused:
        fuse(model)
    replaced = len(replace_qk_norms(model)) if swapped else 0
    called: set[nn.Module] = set()
    promoting: set[nn.Module] = set()

    def note(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        called.add(module)
        if output.dtype != args[0].dtype:
            promoting.add(module)

    for norm in qk_norms(model):
        norm.register_forward_hook(note)
    seen: list[Dtypes] = []
    error = None
    policy = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    with torch.no_grad(), emulate_cuda_autocast(), policy, attention_watched(seen):
        try:
            model(**inputs)
        except Exception as raised:
            error = raised
    return Look(verdict(seen, error), replaced, len(called), len(promoting))


def fusing_works(name: str) -> str | None:
    """Why it does not, if so: asked of the stock model in float32."""
    model, inputs = tiny.build(name)
    if (reason := fuse(model)) is None:
        try:
            with torch.no_grad():
                model(**inputs)
        except Exception as error:
            return describe(error)
    return reason


def walk(name: str) -> tuple[list[Row], str | None]:
    """All combinations of a model, and why it was not fused, if so."""
    not_fused = fusing_works(name)
    rows = []
    for weights in WEIGHTS:
        for autocast in (True, False):
            for fused in (False, True)[: 1 if not_fused else 2]:
                stock = look(name, weights, autocast, fused=fused, swapped=False)
                swapped = look(name, weights, autocast, fused=fused, swapped=True)
                row = Row(name, weights, autocast, fused, stock.verdict, swapped.verdict, swapped.replaced)
                rows.append(replace(row, norms_called=stock.called, norms_promoting_when_swapped=swapped.promoting))
    return rows, not_fused


def short(text: str) -> str:
    words = [word for word in ("LEAK", "ERROR", "no call") if word in text]
    return "+".join(words) or text


def cell(row: Row) -> str:
    before, after = short(row.stock), short(row.swapped)
    return before if before == after else f"{before} -> {after}"


def table(rows: list[Row]) -> str:
    cases = [(weights, autocast) for weights in WEIGHTS for autocast in (True, False)]
    head = ["model", *(f"{weights}{', autocast' if autocast else ''}" for weights, autocast in cases)]
    lines: dict[str, dict[tuple[str, bool], str]] = {}
    for row in rows:
        label = row.model + (" (fused)" if row.fused else "")
        if row.fused and not row.norms_called:
            label += " (norms not called)"
        lines.setdefault(label, {})[row.weights, row.autocast] = cell(row)
    grid = [head, *([label, *(cells.get(case, "") for case in cases)] for label, cells in lines.items())]
    widths = [max(len(line[column]) for line in grid) for column in range(len(head))]
    return "\n".join("  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip() for line in grid)


# --- what has no tiny model -------------------------------------------------------------------------------------------

NORM_NAME = re.compile(
    r"(.*_)?(q|k|query|key)(_.*)?_norm(_.*)?|(.*_)?norm(_.*)?_(q|k|query|key)(_.*)?|ln_[qk]|[qk]norm"
)


def norm_attributes(source: ast.AST) -> set[str]:
    """Attributes that a class body assigns a q/k norm to, going by their names."""
    targets = [target for node in ast.walk(source) if isinstance(node, ast.Assign) for target in node.targets]
    names = {target.attr for target in targets if isinstance(target, ast.Attribute)}
    return {name for name in names if name in QK_NORM_NAMES or NORM_NAME.fullmatch(name)}


def asks_for_qk_norms(call: ast.Call) -> bool:
    """``Attention(..., qk_norm=...)``: the general-purpose class has q/k norms only where it is told to."""
    return any(
        keyword.arg == "qk_norm" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None)
        for keyword in call.keywords
    )


class Reach:
    """Which q/k norms a class or function of ``diffusers.models`` can have or make, by what its source calls."""

    def __init__(self) -> None:
        self._found: dict[Any, dict[str, str]] = {}

    def __call__(self, maker: Any) -> dict[str, str]:
        """Attribute names, each with the class that assigns it."""
        ours = inspect.isfunction(maker) or (inspect.isclass(maker) and issubclass(maker, nn.Module))
        if not ours or not maker.__module__.startswith("diffusers.models."):
            return {}
        if maker not in self._found:
            self._found[maker] = {}  # where a cycle of calls ends
            self._found[maker] = self._look(maker)
        return self._found[maker]

    def _look(self, maker: Any) -> dict[str, str]:
        namespace = vars(sys.modules[maker.__module__])
        source = ast.parse(textwrap.dedent(inspect.getsource(maker)))
        found = dict.fromkeys(norm_attributes(source), maker.__name__)
        for node in ast.walk(source):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called = namespace.get(node.func.id)
                if node.func.id != "Attention" or asks_for_qk_norms(node):
                    found |= self(called)
        for base in getattr(maker, "__mro__", ())[1:]:
            found |= self(base)
        return found


def without_tiny_model() -> dict[str, dict[str, str]]:
    """Model classes of diffusers that seem to have q/k norms and that ``tiny`` does not know."""
    models = importlib.import_module("diffusers.models")
    mixin = importlib.import_module("diffusers").ModelMixin
    classes = set()
    for info in pkgutil.walk_packages(models.__path__, "diffusers.models."):
        with contextlib.suppress(ImportError):  # flax
            module = importlib.import_module(info.name)
            classes |= {c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == info.name}
    known = {name.partition("#")[0] for name in tiny.names()}
    reach = Reach()
    missing = {c for c in classes if issubclass(c, mixin) and c.__name__ not in known}
    found = {c.__name__: reach(c) for c in missing}
    return {name: attributes for name, attributes in sorted(found.items()) if attributes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--csv", metavar="PATH", help="write every combination there")
    options = parser.parse_args()
    names = [n for n in tiny.names() if not options.names or {n, n.partition("#")[0]} & {*options.names}]
    if unknown := [name for name in options.names if not any(n.partition("#")[0] == name or n == name for n in names)]:
        parser.error(f"not known: {', '.join(unknown)}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    rows: list[Row] = []
    not_fused: dict[str, list[str]] = {}
    for name in names:
        found, reason = walk(name)
        rows += found
        if reason is not None:
            not_fused.setdefault(reason, []).append(name)
    print(table(rows))
    for reason, models in not_fused.items():
        print(f"\nNot fused, {reason}: {', '.join(models)}")
    if not options.names:
        print("\nWith q/k norms, by their source, and no tiny model:")
        for name, attributes in without_tiny_model().items():
            where = ", ".join(f"{attribute} of {cls}" for attribute, cls in sorted(attributes.items()))
            print(f"  {name}: {NO_MODEL_NEEDED.get(name, where)}")
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)

    stock = sum("LEAK" in row.stock for row in rows)
    swapped = [row for row in rows if "LEAK" in row.swapped]
    failed = [row for row in rows if row.failed]
    print(f"\n{len(names)} models, {len(rows)} combinations: {stock} leak, {len(swapped)} of them after the swap")
    for row in swapped + [row for row in failed if row not in swapped]:
        how = f"{row.weights}{', autocast' if row.autocast else ''}{', fused' if row.fused else ''}"
        print(f"  {row.model}, {how}: {row.failed or 'RoPE promotes after the norm'}: {row.swapped}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
