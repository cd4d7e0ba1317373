"""Cases out of factors: every pair of levels, or the full product."""

import itertools
import random
from typing import Any

Case = dict[str, Any]


def product(factors: dict[str, tuple[Any, ...]]) -> list[Case]:
    return [dict(zip(factors, levels, strict=True)) for levels in itertools.product(*factors.values())]


def pairwise(factors: dict[str, tuple[Any, ...]], seed: int = 0) -> list[Case]:
    """Cases in which every two levels of two factors meet, the same ones each time."""
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    cases = []
    while missing:
        best: tuple[int, dict[str, int]] = (0, {})
        for _ in range(12):
            chosen = dict(rng.choice(sorted(missing)))
            for name in rng.sample(names, len(names)):
                if name not in chosen:
                    levels = list(range(len(factors[name])))
                    rng.shuffle(levels)
                    chosen[name] = max(levels, key=lambda level: _gain({**chosen, name: level}, name, names, missing))
            gain = sum(pair in missing for pair in _pairs(chosen, names))
            best = max(best, (gain, chosen), key=lambda each: each[0])
        missing -= set(_pairs(best[1], names))
        cases.append({name: factors[name][best[1][name]] for name in names})
    return cases


def _pairs(chosen: dict[str, int], names: list[str]) -> list[Any]:
    return [((a, chosen[a]), (b, chosen[b])) for a, b in itertools.combinations(names, 2)]


def _gain(chosen: dict[str, int], name: str, names: list[str], missing: set[Any]) -> int:
    ordered = [other for other in names if other in chosen]
    pairs = (((a, chosen[a]), (b, chosen[b])) for a, b in itertools.combinations(ordered, 2) if name in (a, b))
    return sum(pair in missing for pair in pairs)
