"""The HTML report with what only a run's recipe tells: the command, the paper's numbers, the cost."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from patchmix.config import from_yaml
from patchmix.report.page import Facts, report
from patchmix.study.compare import paper_row
from patchmix.study.recipe_table import step_flops_per_image


def report_runs(
    runs: Sequence[str | Path],
    out: Path | None = None,
    *,
    data: str | None = None,
    images: int = 2000,
    device: str = "auto",
    workers: int = 0,
) -> Path:
    """Writes the report of `runs` to `out`, or to report.html in the first run's folder."""
    if not runs:
        raise ValueError("there is no run to report on; give at least one run's folder")
    if out is None:
        first = Path(runs[0])
        out = (first if first.is_dir() else Path()) / "report.html"
    facts = [facts_of(run) for run in runs]
    return report(runs, out, data=data, images=images, facts=facts, device=device, workers=workers)


def facts_of(run: str | Path) -> Facts:
    """What can be said of a run beyond its folder's numbers; nothing of an encoder without configuration."""
    path = Path(run) / "config.yaml"
    if not path.is_file():
        return Facts()
    config = from_yaml(path.read_text(encoding="utf-8"))
    command = ["patchmix", "pretrain", config.data.path, "--out", "runs/again", "--config", str(path)]
    row = paper_row(config, config.data.path)
    paper = {} if row is None else {"knn": row.knn / 100, "linear": row.linear / 100, "finetune": row.finetune / 100}
    return Facts(command=shlex.join(command), paper=paper, flops_per_image=step_flops_per_image(config))
