"""What a run's folder says about it, and the verdict in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchmix.evaluate.monitor import collapse_warning
from patchmix.evaluate.results import Result, read_results
from patchmix.interop.backbone import Backbone
from patchmix.interop.loading import load_backbone
from patchmix.report.curves import History, read_config
from patchmix.train.log import read_metrics


@dataclass(frozen=True)
class Facts:
    """What the folder does not tell and the caller may know.

    command: reproduces the run. paper: accuracies in 0…1 that the paper reports for this training, by protocol
    (knn, linear, finetune). flops_per_image: of training, forward and backward over all views.
    """

    command: str | None = None
    paper: Mapping[str, float] = field(default_factory=dict)
    flops_per_image: float | None = None


@dataclass(frozen=True)
class Record:
    """One run as the report sees it; `backbone` is None while there is no checkpoint yet."""

    history: History
    results: Sequence[Result]
    backbone: Backbone | None
    complete: bool
    config_text: str
    facts: Facts

    @property
    def name(self) -> str:
        return self.history.name

    @property
    def config(self) -> dict[str, Any]:
        return self.history.config

    def setting(self, *path: str) -> Any:
        """A value of config.yaml, or None: setting("train", "epochs")."""
        value: Any = self.config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def last(self, key: str) -> float | None:
        """The newest logged value."""
        values = self.history.points(key)[1]
        return values[-1] if values else None


def read_record(run: str | Path, facts: Facts) -> Record:
    """A run's folder, or anything that `load_backbone` knows, which then has neither curves nor configuration."""
    folder = Path(run)
    is_run = (folder / "config.yaml").is_file() or (folder / "metrics.jsonl").is_file()
    backbone = _backbone(run, is_run)
    if not is_run:
        assert backbone is not None
        results = read_results(folder) if folder.is_dir() else []
        return Record(History(backbone.name, []), results, backbone, True, "", facts)
    metrics, config_path = folder / "metrics.jsonl", folder / "config.yaml"
    config = read_config(folder)
    batch_size = config.get("train", {}).get("batch_size")
    name = folder.name or folder.resolve().name
    rows = read_metrics(metrics) if metrics.is_file() else []
    text = config_path.read_text(encoding="utf-8") if config_path.is_file() else ""
    history = History(name, rows, batch_size, facts.flops_per_image, config)
    complete = (folder / "encoder.safetensors").is_file()
    return Record(history, read_results(folder), backbone, complete, text, facts)


def verdict(record: Record) -> tuple[str, bool]:
    """Such as "trained 40 epochs, kNN 61.2 % [60.2, 62.1], no collapse", and whether nothing is wrong."""
    parts, fine = [], True
    epoch, planned = record.last("epoch"), record.setting("train", "epochs")
    if epoch is None:
        parts.append("no training log")
    elif record.complete:
        parts.append(f"trained {_count(epoch)}")
    else:
        fine = False
        parts.append(f"unfinished, at epoch {epoch:.3g}" + (f" of {planned:g}" if planned else ""))
    judged = next((result for result in reversed(record.results) if result.protocol == "knn"), None)
    if judged is not None:
        parts.append(f"kNN {percent(judged.top1)} % {interval(judged)}")
    elif (knn := record.last("knn")) is not None:
        parts.append(f"kNN {percent(knn)} % in the training monitor")
    else:
        parts.append("kNN not measured")
    health = {key: value for key in ("rank", "mean_cosine") if (value := record.last(key)) is not None}
    warning = collapse_warning(health)
    if warning is not None:
        fine = False
        parts.append(warning)
    else:
        parts.append("no collapse" if health else "collapse not checked")
    return ", ".join(parts), fine


def interval(result: Result, metric: str = "top1") -> str:
    low, high = result.interval(metric)
    return f"[{percent(low)}, {percent(high)}]"


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def learnt(record: Record) -> list[tuple[str, float]]:
    """For each loss how far it has come on its way from chance (0) to its floor (1)."""
    out = []
    for term in record.history.terms:
        value, chance, floor = (record.last(f"{term}{end}") for end in ("", "/chance", "/floor"))
        if value is not None and chance is not None and floor is not None and chance > floor:
            out.append((term, (chance - value) / (chance - floor)))
    return out


def _count(epochs: float) -> str:
    rounded = f"{epochs:.1f}".removesuffix(".0")
    return f"{rounded} epoch{'' if rounded == '1' else 's'}"


def _backbone(run: str | Path, is_run: bool) -> Backbone | None:
    try:
        return load_backbone(run)
    except ValueError:
        if is_run:
            return None  # it has no checkpoint yet: curves can be shown all the same
        raise
