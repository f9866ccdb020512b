"""What an evaluation found, with everything needed to repeat it: a line of results.jsonl, and a printed table."""

import dataclasses
import functools
import json
import math
import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

FILE = "results.jsonl"
RAW_PIXELS = "raw pixels"  # encoder and weights of results that need none
_Z95 = 1.959963984540054  # the normal distribution's 97.5 % quantile
PROTOCOL_NAMES: dict[str, str] = {
    "knn": "kNN",
    "linear": "linear",
    "linear-fast": "linear (fast)",
    "attentive": "attentive probe",
    "finetune": "fine-tune",
    "detect": "box / mask AP",
    "segment": "mIoU",
    "segment-fast": "mIoU (fast)",
    "segment-finetune": "mIoU, fine-tuned",
}


@dataclass(frozen=True)
class Result:
    """One evaluation. `metrics` are accuracies in 0…1 over `images` test images; "top1" or "miou" is the headline.

    `settings` are those of the protocol, `details` all else that it found (the best epoch, what a sweep chose).
    """

    protocol: str  # knn, linear, linear-fast, attentive, finetune; with few labels knn@5-shot or knn@1%
    metrics: dict[str, float]
    images: int
    data: str
    fingerprint: str  # of the training and the test images
    encoder: str
    weights: str  # digest
    settings: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)  # 95 %, of metrics that are not proportions
    changed: dict[str, Any] | None = None  # options that are not the defaults; None: not recorded, by an older version
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    @property
    def top1(self) -> float:
        return self.metrics["top1"]

    @property
    def main(self) -> str:
        return "miou" if "miou" in self.metrics else "top1"

    @property
    def title(self) -> str:
        """The protocol, with the options that are not the defaults: kNN (k 3, pool mean)."""
        options = [f"{name.replace('_', ' ')} {_plain(value)}" for name, value in (self.changed or {}).items()]
        return protocol_name(self.protocol) + (f" ({', '.join(options)})" if options else "")

    @property
    def headline(self) -> str:
        """What a table shows: top-1 or mIoU in %, or box and mask AP of a detector."""
        if self.main in self.metrics:
            return f"{100 * self.metrics[self.main]:.2f}"
        return " / ".join(f"{100 * self.metrics[name]:.1f}" for name in ("box_ap", "mask_ap") if name in self.metrics)

    @property
    def headline_interval(self) -> str | None:
        """The 95 % interval of top-1 or mIoU in %; AP has none."""
        if self.main not in self.metrics:
            return None
        low, high = self.interval(self.main)
        return f"{100 * low:.1f} … {100 * high:.1f}"

    def interval(self, metric: str = "top1") -> tuple[float, float]:
        """The 95 % interval of an accuracy, for the chance of having drawn these test images."""
        low, high = self.intervals.get(metric) or wilson(self.metrics[metric], self.images)
        return low, high


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share of `count` trials; never leaves 0…1, right for small counts too."""
    z2 = _Z95 * _Z95 / count
    center = (share + z2 / 2) / (1 + z2)
    half = _Z95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count)) / (1 + z2)
    return max(0.0, center - half), min(1.0, center + half)


@functools.cache
def t_quantile(freedom: int) -> float:
    """t with P(|T| < t) = 0.95 for Student's distribution of ν degrees of freedom."""
    theta = np.linspace(0, np.pi / 2, 1_000_001)  # t = √ν tan θ, and θ has a density proportional to cos^(ν - 1)
    density = np.cos(theta) ** (freedom - 1)
    share = np.cumsum(density[1:] + density[:-1])  # trapezoids
    return math.sqrt(freedom) * math.tan(np.interp(0.95, share / share[-1], theta[1:]))


def mean_over_draws(values: Sequence[float], images: int) -> tuple[float, tuple[float, float]]:
    """The mean accuracy over draws of the labeled images, with its 95 % interval.

    Errors of two kinds are added as independent ones: of the drawn images (Student's t over the draws; not covered by
    a single draw), and of the test images, which are always the same (Wilson's).
    """
    mean, count = statistics.fmean(values), len(values)
    drawn = t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count) if count > 1 else 0.0
    low, high = wilson(mean, images)
    return mean, (max(0.0, mean - math.hypot(mean - low, drawn)), min(1.0, mean + math.hypot(high - mean, drawn)))


def protocol_name(protocol: str) -> str:
    """For people; `knn@5-shot` is kNN with 5 labeled images per class."""
    name, at, labels = protocol.partition("@")
    return PROTOCOL_NAMES.get(name, name) + (f", {labels}" if at else "")


def append_result(folder: Path, result: Result) -> Path:
    """Adds one line to `folder`/results.jsonl, in one write: a crash leaves all lines before it whole."""
    path = folder / FILE
    line = json.dumps(dataclasses.asdict(result), ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(max(0, file.tell() - 1))
            if file.read(1) not in (b"", b"\n"):
                line = b"\n" + line  # an earlier line was cut short: do not lose this one, too
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(f"can't write to {path} ({error.strerror}); choose another folder for the results") from error
    return path


def read_results(folder: Path) -> list[Result]:
    """The results of a folder, oldest first; [] where there are none. Lines that were cut short are left out."""
    path = folder / FILE
    if not path.is_file():
        return []
    known = {f.name for f in dataclasses.fields(Result)}
    results = []
    for line in path.read_bytes().splitlines():  # text would also be split at the rarer line ends of Unicode
        with suppress(ValueError, TypeError, AttributeError):
            results.append(Result(**{key: value for key, value in json.loads(line).items() if key in known}))
    return results


def known_result(
    results: Sequence[Result], protocol: str, fingerprint: str, weights: str, settings: dict[str, Any]
) -> Result | None:
    """The latest result of the same protocol, data, weights and settings; others of its settings may differ."""
    wanted = protocol, fingerprint, weights
    same = (each for each in reversed(results) if (each.protocol, each.fingerprint, each.weights) == wanted)
    return next((each for each in same if settings.items() <= each.settings.items()), None)


def print_result(result: Result | Sequence[Path], console: Console | None = None) -> None:
    """All metrics in % (accuracies with their 95 % intervals), and how they were obtained; or the files written."""
    console = console or Console(markup=False)  # brackets in a name are no style
    if not isinstance(result, Result):
        for path in result:
            print(f"wrote {path}")
        return
    title = f"{protocol_name(result.protocol)}: {result.encoder} on {result.data}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table("", Column("%", justify="right"), Column("95 % interval", justify="right"))
    for name, value in result.metrics.items():
        low, high = result.interval(name)
        interval = None if result.protocol == "detect" else f"{100 * low:.2f} … {100 * high:.2f}"  # AP has none
        table.add_row(name, f"{100 * value:.2f}", interval, style="bold" if name == result.main else None)
    for row in result.details.get("classes", []):  # IoU, or AP of boxes and masks
        if values := [row[key] for key in ("iou", "box_ap", "mask_ap") if row.get(key) is not None]:
            table.add_row(row["name"], " / ".join(f"{100 * value:.1f}" for value in values))
    console.print(table)
    how = [f"{result.images:,} test images", f"weights {result.weights[:12]}"]
    long = ("classes", "mean", "std")  # as many as there are classes or channels
    more = (result.settings | result.details).items()
    how += [f"{key} {_plain(value)}" for key, value in more if key not in long]
    console.print(Text("; ".join(how)), soft_wrap=True)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_plain, value))
    return str(value)
