"""Adapters from the verbs' settings to functions that still take their arguments one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

from patchmix import settings as s


def _rest(settings: Any, *without: str) -> dict[str, Any]:
    return {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings) if f.name not in without}


def compare(settings: s.Compare) -> None:
    from patchmix.study.compare import compare, print_comparison

    print_comparison(compare(settings.runs))


def _queries(query: tuple[str, ...]) -> list[int | str] | None:
    return [int(one) if one.isdecimal() else one for one in query] or None


def show_mix(settings: s.ShowMix) -> None:
    from patchmix.mixing import create_mix
    from patchmix.report.pictures import show_mix

    other = None if settings.mix == "patchmix" else create_mix(settings.mix, patch_size=settings.patch_size)
    show_mix(settings.data, settings.out, mix=other, **_rest(settings, "data", "out", "mix"))


def show_curves(settings: s.ShowCurves) -> None:
    from patchmix.report.pictures import show_curves
    from patchmix.study.reporting import facts_of

    costs = [facts_of(r).flops_per_image or 0.0 for r in settings.runs] if settings.axis == "flops" else None
    show_curves(settings.runs, settings.out, axis=settings.axis, smoothing=settings.smoothing, flops_per_image=costs)


def show_similarity(settings: s.ShowSimilarity) -> None:
    from patchmix.report.pictures import show_similarity

    rest = _rest(settings, "runs", "data", "out", "query", "key")
    show_similarity(
        settings.runs,
        settings.data,
        settings.out,
        query=_queries(settings.query),
        keys=settings.key or None,
        **rest,
    )


def show_attention(settings: s.ShowAttention) -> None:
    from patchmix.report.pictures import show_attention

    if (settings.data is None) == (not settings.image):
        raise ValueError("give either --data DATA or --image FILE …")
    images = len(settings.image) or settings.images
    rest = {name: getattr(settings, name) for name in ("block", "size", "device")}
    positions = settings.position or None
    source = settings.data or settings.image
    show_attention(settings.runs, source, settings.out, images=images, positions=positions, **rest)


def show_neighbors(settings: s.ShowNeighbors) -> None:
    from patchmix.report.pictures import show_neighbours

    rest = _rest(settings, "runs", "data", "out", "query")
    show_neighbours(settings.runs, settings.data, settings.out, query=_queries(settings.query), **rest)


def show_map(settings: s.ShowMap) -> None:
    from patchmix.report.pictures import show_map

    show_map(settings.runs, settings.data, settings.out, images=settings.images, device=settings.device)


def report(settings: s.Report) -> None:
    from patchmix.study.reporting import report_runs

    report_runs(settings.runs, settings.out, **_rest(settings, "runs", "out"))


def recipes(settings: s.Recipes) -> None:
    from patchmix.study.recipe_table import print_recipes

    print_recipes()


def flops(settings: s.Flops) -> None:
    from patchmix.study.flops import FlopsRow, print_flops

    def weightless(row: FlopsRow) -> Any:
        from patchmix.build import build_weightless

        crops = {"local_crops": row.local_crops, "local_size": row.local_size}
        return build_weightless(row.method, row.model, batch=settings.batch, image_size=settings.image_size, **crops)

    rest = _rest(settings, "method", "model", "count")
    print_flops(settings.method, settings.model, build=weightless if settings.count else None, **rest)
