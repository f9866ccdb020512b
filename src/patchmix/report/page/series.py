"""Curves as the page's script reads them: a few hundred points each, on every axis that the runs know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from patchmix.report.curves import AXIS_LABELS, NOISY, PANELS, AxisKind, History, panels_of, title_of

MOST_POINTS = 600
_KINDS: tuple[AxisKind, ...] = ("epochs", "images", "hours", "flops")


def curves_data(histories: Sequence[History]) -> dict[str, Any] | None:
    """Panels with the series of all runs; None where there is nothing to draw."""
    panels = [_panel(key, histories) for key in panels_of(histories)]
    if not panels:
        return None
    known = [kind for kind in _KINDS if all(_knows(history, kind) for history in histories if history.rows)]
    for panel in panels:
        for series in panel["series"]:
            series["x"] = {kind: series["x"][kind] for kind in known}
    return {
        "runs": [history.name for history in histories],
        "axes": [[kind, AXIS_LABELS[kind]] for kind in known],
        "panels": panels,
    }


def _panel(key: str, histories: Sequence[History]) -> dict[str, Any]:
    factor = PANELS[key][1] if key in PANELS else 1.0
    series = []
    for run, history in enumerate(histories):
        rows = _thinned([row for row in history.rows if row.get(key) is not None])
        if not rows:
            continue
        bounds = {
            name: [_round(row[f"{key}/{name}"]) for row in rows]
            for name in ("chance", "floor")
            if all(row.get(f"{key}/{name}") is not None for row in rows)
        }
        places = {kind: history.axis(kind) for kind in _KINDS if _knows(history, kind)}
        series.append(
            {
                "run": run,
                "x": {kind: [_round(place(row)) for row in rows] for kind, place in places.items()},
                "y": [_round(factor * row[key]) for row in rows],
                "bounds": bounds,
            }
        )
    return {"key": key, "title": title_of(key), "noisy": key not in PANELS or key in NOISY, "series": series}


def _knows(history: History, kind: AxisKind) -> bool:
    try:
        history.axis(kind)
    except ValueError:
        return False
    return True


def _thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every so-many-th row, and the last."""
    step = -(-len(rows) // MOST_POINTS) if rows else 1
    return [row for i, row in enumerate(rows) if (len(rows) - 1 - i) % step == 0]


def _round(value: float) -> float:
    return float(f"{value:.7g}")
