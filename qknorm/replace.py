"""Find, replace and restore the q/k norms of a model, in place, and report on each of them."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from . import functional
from .adapters import QK_NORM_NAMES, Adapter, adapter_for, class_path
from .module import from_adapter, is_ours, obstacle_to, obstacle_to_rebuilding, original_of

Filter = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Entry:
    """One module of a report: its name in the model, what it was, what it is now, and why where it was skipped."""

    fqn: str
    before: str
    after: str | None = None
    reason: str | None = None


@dataclass
class Report:
    """What a call changed. ``len()`` counts ``replaced``; printing gives a table, alike modules in one row."""

    title: str
    replaced: list[Entry] = field(default_factory=list)
    skipped: list[Entry] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.replaced)

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        groups: dict[tuple[str, ...], int] = {}
        for entry in self.replaced + self.skipped:
            outcome = entry.after if entry.reason is None else f"skipped: {entry.reason}"
            key = (_pattern(entry.fqn), entry.before, outcome or "")
            groups[key] = groups.get(key, 0) + 1
        summary = f"{self.title}: {len(self.replaced)} replaced, {len(self.skipped)} skipped"
        return "\n".join([summary, *table_of(("module", "count", "from", "to"), groups)])


def find_qk_norms(model: nn.Module) -> list[tuple[str, nn.Module | None, Adapter | str]]:
    """Every q/k norm of ``model``: its name, the module (None where the model has none there), and its adapter, or, as
    a string, why it would be skipped. Nothing is changed.
    """
    check_model(model)
    return [(slot.fqn, slot.module, slot.verdict) for slot in _slots(model, None)]


def replace_qk_norms(model: nn.Module, *, filter: Filter | None = None, backend: str = "auto") -> Report:
    """Swap the q/k norms of ``model`` for dtype-preserving ones, in place.

    The new modules hold the same Parameters under the same names: optimizers, ``state_dict`` keys, tied weights, hooks
    and mode stay as they are. What cannot be replaced is left untouched and reported with the reason.

    Args:
        model: any module that contains attention layers.
        filter: ``filter(fqn, module) -> bool`` in place of the test by attribute name; the class must be known anyway.
        backend: the backend of the new modules, see ``qknorm.rms_norm``.

    Returns:
        A ``Report``; calling again replaces nothing and says so. A call that finds nothing warns.

    Raises:
        TypeError, ValueError, RuntimeError: ``model`` is no module, ``backend`` is unknown or cannot run.
    """
    check_model(model)
    functional.check_options("once", backend)
    if backend == "triton":
        functional.backend_for(next(model.parameters(), torch.empty(0)), backend)
    report = Report("replace_qk_norms")
    made: dict[int, nn.Module] = {}
    places: list[_Place] = []
    for slot in _slots(model, filter):
        if slot.module is None or isinstance(slot.verdict, str):
            report.skipped.append(Entry(slot.fqn, slot.class_name, reason=str(slot.verdict)))
            continue
        new = made.get(id(slot.module)) or from_adapter(slot.module, slot.verdict, backend)
        made[id(slot.module)] = new
        places.append((slot.parent, slot.name, new))
        report.replaced.append(Entry(slot.fqn, slot.class_name, type(new).__name__))
    _put(places)
    if not report.replaced and not any(entry.reason == _REPLACED for entry in report.skipped):
        warnings.warn(_nothing_found(model, report), stacklevel=2)
    return report


def restore_qk_norms(model: nn.Module) -> Report:
    """The inverse of ``replace_qk_norms``: each module's old class again, around its current parameters and hooks.

    Class, attributes, ``state_dict`` and Parameter identity are guaranteed; the identity of the module object is not.
    """
    check_model(model)
    report = Report("restore_qk_norms")
    made: dict[int, nn.Module] = {}
    places: list[_Place] = []
    for parent, name, fqn, module, wrapper in _children(model, "", None):
        if module is None or not is_ours(module):
            continue
        before = type(module).__name__
        reason = _wrapped(parent, module, wrapper) or obstacle_to_rebuilding(module)
        old = None if reason else made.get(id(module)) or original_of(module)
        if old is None:
            reason = reason or "it replaced nothing: it was built as what it is"
            report.skipped.append(Entry(fqn, before, reason=reason))
            continue
        made[id(module)] = old
        places.append((parent, name, old))
        report.replaced.append(Entry(fqn, before, type(old).__name__))
    _put(places)
    return report


_REPLACED = "it is replaced already"
_Place = tuple[nn.Module, str, nn.Module]


def _put(places: list[_Place]) -> None:
    """Set every module in its place, or none of them."""
    before = [(parent, name, getattr(parent, name)) for parent, name, _ in places]
    try:
        for parent, name, module in places:
            setattr(parent, name, module)
    except BaseException:
        for parent, name, module in before:
            parent._modules[name] = module
        raise


def _nothing_found(model: nn.Module, report: Report) -> str:
    seen = {f"{_pattern(n)} ({class_path(type(m))})" for n, m in model.named_modules() if _is_norm_like(m)}
    skipped = sorted({f"{_pattern(entry.fqn)}: {entry.reason}" for entry in report.skipped})
    parts = ["replace_qk_norms found no q/k norm to replace"]
    if skipped:
        parts.append("skipped: " + ", ".join(skipped))
    return "; ".join([*parts, "norm-like modules seen: " + (", ".join(sorted(seen)) or "none")])


def _is_norm_like(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def table_of(header: tuple[str, ...], counts: Mapping[tuple[str, ...], int]) -> list[str]:
    """Lines of a plain-text table: the rows of ``counts``, each with its count as second cell; no rows, no lines."""
    rows = [header, *((row[0], str(count), *row[1:]) for row, count in counts.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines if counts else []


def _pattern(fqn: str) -> str:
    """``fqn`` with a star for each number, so that the blocks of a model are one."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


@dataclass(frozen=True)
class _Slot:
    """A place in the model that may hold a q/k norm."""

    parent: nn.Module
    name: str
    fqn: str
    module: nn.Module | None
    verdict: Adapter | str

    @property
    def class_name(self) -> str:
        return "None" if self.module is None else type(self.module).__name__


def _slots(model: nn.Module, filter: Filter | None) -> Iterator[_Slot]:
    for parent, name, fqn, module, wrapper in _children(model, "", None):
        if filter is None:
            wanted = _base_name(fqn) in QK_NORM_NAMES
        else:
            wanted = module is not None and filter(fqn, module)
        if wanted:
            yield _Slot(parent, name, fqn, module, _verdict(parent, module, wrapper))


# The attributes by which wrappers (PEFT, activation checkpointing, torch.compile) hold the module that they wrap.
_WRAPPED_ATTRIBUTES = frozenset({"original_module", "_checkpoint_wrapped_module", "_orig_mod"})


def _base_name(fqn: str) -> str:
    """The attribute name that counts: wrappers put the norm a level below it, PEFT's ``modules_to_save`` two."""
    parts = fqn.split(".")
    while len(parts) > 1:
        if parts[-1] in _WRAPPED_ATTRIBUTES:
            parts = parts[:-1]
        elif parts[-2] == "modules_to_save" and len(parts) > 2:
            parts = parts[:-2]
        else:
            break
    return parts[-1]


def _wrapped(parent: nn.Module, module: nn.Module, wrapper: str | None) -> str | None:
    """Why the wrappers around a norm forbid to swap it."""
    if wrapper:
        return f"the model is wrapped in {wrapper}; swap before wrapping"
    if _wrapper_name(module):
        return "it is wrapped by FSDP; swap before fully_shard"
    if parent._modules.get("_orig_mod") is module:  # torch.compile's OptimizedModule calls the module that it was given
        return "it is compiled by itself; swap before torch.compile(norm), or compile the block around it"
    return None


def _verdict(parent: nn.Module, module: nn.Module | None, wrapper: str | None) -> Adapter | str:
    if module is None:
        return "the model has no norm there"
    if is_ours(module):
        return _REPLACED
    reason = _wrapped(parent, module, wrapper)
    if reason:
        return reason
    cls = type(module)
    adapter = adapter_for(cls)
    if isinstance(adapter, Adapter):
        return obstacle_to(module, adapter) or adapter
    if adapter is not None:
        return adapter
    if nn.utils.parametrize.is_parametrized(module):
        return "it is parametrised; remove the parametrisation, or swap before adding it"
    if _WRAPPED_ATTRIBUTES & module._modules.keys():
        return f"it is a wrapper ({cls.__name__}); the norms inside it are looked at one by one"
    known = [base for base in cls.__mro__[1:] if isinstance(adapter_for(base), Adapter)]
    if known:
        return (
            f"it is a {class_path(cls)}, a subclass of {known[0].__name__} that may compute something else; "
            "if it does not, qknorm.register_norm(cls, adapter) adds it"
        )
    return f"nothing is known of {class_path(cls)}; qknorm.register_norm(cls, adapter) adds it"


def _children(
    parent: nn.Module, prefix: str, wrapper: str | None, visited: set[int] | None = None
) -> Iterator[tuple[nn.Module, str, str, nn.Module | None, str | None]]:
    """Every (parent, attribute, fqn, child or None, name of the distributed wrapper around it), each parent once."""
    visited = set() if visited is None else visited
    if id(parent) in visited:
        return
    visited.add(id(parent))
    wrapper = wrapper or _wrapper_name(parent)
    absent = [name for name, value in parent.__dict__.items() if value is None]
    for name in [*parent._modules, *absent]:
        child = parent._modules.get(name)
        fqn = f"{prefix}.{name}" if prefix else name
        yield parent, name, fqn, child, wrapper
        if child is not None:
            yield from _children(child, fqn, wrapper, visited)


def _wrapper_name(module: nn.Module) -> str | None:
    """DistributedDataParallel or FSDP, where ``module`` is one; looked up only where they are loaded already."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "DistributedDataParallel"
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name in ("FullyShardedDataParallel", "FSDPModule"):
        cls = getattr(fsdp, name, None)
        if cls is not None and isinstance(module, cls):
            return name
    return None


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but is {type(model).__name__}")
