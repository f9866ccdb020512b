"""What the protocols share: opening encoder and data, training on labels through the one loop, writing the result."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.contract import Source
from patchmix.data.loader import Batch, Loader, one_pass
from patchmix.data.views import SMALL_IMAGES, to_float
from patchmix.device import autocast_dtype, resolve_device
from patchmix.evaluate.features import FeatureExtractor, Features
from patchmix.evaluate.labeled import Labeled, few_labels, open_labeled
from patchmix.evaluate.masks import open_masks
from patchmix.evaluate.results import RAW_PIXELS, Result, append_result, mean_over_draws
from patchmix.files import run_lock, write_text
from patchmix.interop.backbone import Backbone
from patchmix.interop.loading import load_backbone
from patchmix.methods.method import Method
from patchmix.progress import progress_bar
from patchmix.schedules import WarmupCosine
from patchmix.settings import Detect, FewLabels, Finetune, Knn, Linear, Segment
from patchmix.train.checkpoint import Checkpoints, load_checkpoint
from patchmix.train.log import BadSamples, RunLog
from patchmix.train.loop import Evaluator, Plan, train

Values = dict[str, Any]
Metrics = dict[str, float]
TaskSettings = Knn | Linear | Finetune | Segment
_NOT_RECORDED = {  # where things come from and go to, and what is recorded under another name or in another unit
    *("weights", "encoder", "model", "start", "data", "train", "val", "test", "out", "device", "workers", "pictures"),
    *("eval_only", "predict", "threshold", "protocol", "base_lr", "shots", "fraction", "draws", "class_names"),
}
# Options that do not change a result, or show in its protocol, weights or fingerprint.
_ELSEWHERE = _NOT_RECORDED - {"base_lr", "train", "val", "test", "draws"}
_ELSEWHERE |= {"cache", "layers", "ignore_index", "accumulate", "recompute", "evaluate_every"}


@dataclass(frozen=True)
class Task:
    """An encoder and labeled data to evaluate it on. Results go to the folder `out`, if any."""

    settings: TaskSettings
    backbone: Backbone
    digest: str  # of the weights
    data: Labeled
    device: torch.device
    out: Path | None
    memory: dict[Path, Features] | None = None  # features that several tasks share

    def extractor(self) -> FeatureExtractor:
        """For protocols on frozen features."""
        given = vars(self.settings)
        options = {name: given[name] for name in ("pool", "resize", "workers", "cache") if name in given}
        if options.get("pool", "attentive") == "attentive":  # so does segmentation
            options["pool"] = "patches"
        return FeatureExtractor(self.backbone, self.device, memory=self.memory, **options)

    def fit(
        self, protocol: str, method: "SupervisedMethod", transform: Any, settings: Values, **options: Any
    ) -> tuple[dict[str, float], Path | None]:
        """`fit` on the training part. With the same settings, weights and data, it continues where it was stopped."""
        whose: Values = {"weights": self.digest, "architecture": repr(self.backbone.architecture)}
        whose |= {"mean": self.backbone.mean, "std": self.backbone.std}
        identity = {"settings": settings, **whose, "data": self.data.fingerprint()}
        usual: Values = {"prepare": self.prepare, "identity": identity}
        usual |= {"out": self.out, "device": self.device, "workers": self.settings.workers}
        return fit(protocol, method, self.data.train, transform, **usual | options)

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Normalized images (N, 3, H, W), and labels (N,), or the masks (N, H, W) that a transform adds."""
        images, *masks = batch.views
        labels = masks[0].long() if masks else batch.labels
        assert labels is not None
        return to_float(images, self.backbone.mean, self.backbone.std), labels

    def draws(self) -> list[npt.NDArray[np.int64]]:
        """Positions of the training images to use: all of them, or several draws of few."""
        few = self.settings
        assert isinstance(few, FewLabels)
        if not wants_few_labels(few):
            return [np.arange(len(self.data.train))]
        how: Values = {"shots": few.shots, "fraction": few.fraction, "seed": few.seed}
        return [few_labels(self.data.train, **how, draw=draw) for draw in range(few.draws)]

    def result(
        self, protocol: str, found: Sequence[Metrics], images: int, settings: Values, details: Values, **more: Any
    ) -> Result:
        """The result, also written to results.jsonl; every process gets it.

        found: the metrics, or those of each draw of few labels: their means, under a name of its own. more: intervals.
        """
        few, metrics, whose = self.settings, found[0], (encoder_name(self.backbone), self.digest)
        if isinstance(few, FewLabels) and wants_few_labels(few):
            protocol += f"@{few.shots}-shot" if few.fraction is None else f"@{100 * few.fraction:g}%"
            settings |= {"shots": few.shots, "fraction": few.fraction, "draws": few.draws, "seed": few.seed}
            details |= {"top1_of_draws": [each["top1"] for each in found]}
            means = {name: mean_over_draws([each[name] for each in found], images) for name in metrics}
            metrics = {name: mean for name, (mean, _) in means.items()}
            more["intervals"] = {name: interval for name, (_, interval) in means.items()}
        if getattr(few, "pool", None) == "pixels":
            whose = RAW_PIXELS, RAW_PIXELS
        origin = str(few.data), self.data.fingerprint(), *whose
        result = Result(protocol, metrics, images, *origin, settings, details, **more, changed=changed(few))
        if self.out is not None and distributed.is_main():
            append_result(self.out, result)
        return result


@contextmanager
def open_task(
    settings: TaskSettings, backbone: Backbone | None, *, needs_test: bool = False, many_passes: bool = False
) -> Iterator[Task]:
    """Loads the encoder, unless it is given, and opens the data, in the process group if there is one.

    needs_test: a fifth of the images is held out where there is no test split.
    """
    device = resolve_device(settings.device)
    with distributed.process_group(device):
        out = settings.out
        if backbone is None:
            backbone = load_backbone(settings.weights, encoder=settings.encoder)
            out = results_folder(settings.weights, settings.out)
        in_chans = backbone.architecture.in_chans
        if isinstance(settings, Segment):
            how: Values = {"ignored": settings.ignore_index, "names": settings.class_names, "test": settings.test}
            data = open_masks(settings.data, **how, in_chans=in_chans)
        else:
            data = open_labeled(settings.data, many_passes=many_passes, in_chans=in_chans)
        data = data.with_test() if needs_test else data
        yield Task(settings, backbone, backbone.digest(), data, device, out)


def recorded(settings: Finetune | Segment | Detect) -> Values:
    """The settings that decide what is learned, for results and checkpoints."""
    return {name: value for name, value in asdict(settings).items() if name not in _NOT_RECORDED}


def changed(settings: TaskSettings | Detect) -> Values:
    """The options that decide a result and are not the defaults, as JSON gives them back."""
    found = {each.name: (getattr(settings, each.name), each.default) for each in fields(settings)}
    different = {name: value for name, (value, default) in found.items() if value != default and name not in _ELSEWHERE}
    if different.get("pool") in ("attentive", "pixels"):  # the protocol or the weights say so
        del different["pool"]
    if isinstance(settings, FewLabels) and not wants_few_labels(settings):
        different.pop("draws", None)  # there are none
    return {name: list(value) if isinstance(value, tuple) else value for name, value in different.items()}


def wants_few_labels(settings: FewLabels) -> bool:
    if settings.shots is not None and settings.fraction is not None:
        raise ValueError("--shots and --fraction both say how many labels to use; give one of them")
    return settings.shots is not None or settings.fraction is not None


def results_folder(weights: str | Path, out: Path | None) -> Path | None:
    """`out`, or a run's own folder; a single file or a timm model has none."""
    return out or (Path(weights) if Path(weights).is_dir() else None)


def encoder_name(backbone: Backbone) -> str:
    """The architecture and, where the weights' origin says so, which of a pair of encoders."""
    shape = backbone.architecture
    which = backbone.origin.get("encoder") or ("base" if "recipe" in backbone.origin else None)
    return f"{shape.name} ({which} encoder)" if which else shape.name


class SupervisedMethod(Method):
    """An encoder that learns with labels."""

    tracked: tuple[str, ...]  # the metrics whose best values are kept

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.steps = 0  # done so far

    def after_step(self, progress: float) -> None:
        self.steps += 1


def fit(
    protocol: str,
    method: SupervisedMethod,
    source: Source,
    transform: Any,
    *,
    identity: Values,
    prepare: Callable[[Batch], Any],
    evaluator: Evaluator,
    optimizer: torch.optim.Optimizer,
    out: Path | None,
    device: torch.device,
    workers: int,
    warmup: Callable[[int], float] = lambda steps: 0.0,
    evaluate_every: float = 1.0,
) -> tuple[dict[str, float], Path | None]:
    """Trains to the end and returns the evaluator's last values, with the best of each score and its epoch.

    The hyperparameters are in `identity["settings"]`: lr, batch_size, epochs, seed, and others that have defaults.
    warmup: of the number of steps, the share of the training in which the learning rate rises.
    With `out`, checkpoints are kept in a folder below it, which is returned, too: one for each `identity`. A call with
    the same identity continues where one was stopped; two at a time are refused.
    """
    settings: Values = {"accumulate": 1, "min_lr": 0.0, "lr_per_epoch": False, "weight_decay": 0.0, "clip_grad": 0.0}
    settings |= identity["settings"]
    order = {name: settings[name] for name in ("batch_size", "accumulate", "seed")}
    shared: Values = {"rank": distributed.rank(), "world_size": distributed.world_size(), "workers": workers}
    loader, epochs = Loader(source, transform, **order, **shared, pin_memory=device.type == "cuda"), settings["epochs"]
    steps = max(1, round(epochs * loader.steps_per_epoch))
    rate = WarmupCosine(settings["lr"], settings["min_lr"], warmup=warmup(steps), step=1.0 / steps)
    plan = Plan(
        **order,
        epochs=epochs,
        lr=(lambda progress: rate(int(progress * epochs + 1e-9) / epochs)) if settings["lr_per_epoch"] else rate,
        weight_decay=lambda progress: settings["weight_decay"],
        clip_grad=settings["clip_grad"],
        autocast=autocast_dtype(device),
        monitor_every=evaluate_every,
    )

    def evaluate(encoder: nn.Module) -> Iterator[tuple[str, float]]:
        if method.steps == 0:
            return  # a pass over the test images takes minutes, and what has not learned is no epoch's result
        values, epoch = dict(evaluator(encoder)), method.steps / loader.steps_per_epoch
        for name in method.tracked:
            best[name] = max(best.get(name, [-1.0, 0.0]), [values[name], epoch], key=lambda pair: pair[0])
            values |= {f"best_{name}": best[name][0], f"best_{name}_epoch": best[name][1]}
        yield from values.items()

    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    folder = out and out / f"{protocol}-{digest[:10]}"
    own = folder if distributed.is_main() else None  # the main process writes
    with run_lock(own) if own else nullcontext():
        checkpoints = folder and Checkpoints(folder / "checkpoints")
        state = load_checkpoint(checkpoints.last) if checkpoints and checkpoints.last else None
        distributed.barrier()  # nobody writes before everybody has read
        best: dict[str, list[float]] = {}  # value and epoch of each score
        if state:
            method.steps, best = int(state["step"]), state.get("best", {})
            for name in [name for name in state["method"] if name.startswith("scores.")]:  # of version 0.1
                del state["method"][name]
        if own:
            write_text(own / "settings.json", json.dumps(identity, indent=2) + "\n")
        with closing(RunLog(own, step=method.steps)) as log:
            saved: Values = {"checkpoints": checkpoints, "resume_from": state, "log": log}
            saved |= {"extra_state": {"identity": identity, "best": best}, "on_bad_sample": BadSamples(log)}
            how: Values = {"optimizer": optimizer, "device": device, "prepare": prepare, "evaluators": [evaluate]}
            return train(method, loader, plan, **how, **saved), folder


def map_images(
    source: Source, transform: Any, function: Callable[..., Any], title: str, *, device: torch.device, workers: int
) -> list[Any]:
    """function(views) of each image, in the source's order, on every process; it is sent as JSON.

    An image that can't be read is an error, not a gap: it would change what the numbers mean.
    """
    found, errors = list[Any](), list[str]()
    rank, world_size = distributed.rank(), distributed.world_size()
    share = {"batch_size": 1, "workers": workers, "rank": rank, "world_size": world_size}
    try:
        with progress_bar(title, -(-len(source) // world_size)) as advance:
            for batch in one_pass(source, transform, **share):
                errors += batch.bad
                if len(batch.indices):
                    found.append(function(batch.views))
                advance(1)
    except ValueError as error:  # raised on all processes below: the others would wait for this one
        errors.append(str(error))
    parts = distributed.gather_json([found, errors], device)
    if failed := [error for _, errors in parts for error in errors]:
        raise ValueError(f"{min(failed)}; evaluation needs every image of {source.name}")
    return [one for found, _ in parts for one in found]


def usual_batch(image_size: int, images: int, *, multiple: int) -> int:
    """256 for small images (CIFAR), 1024 for larger ones, and less where there are fewer images."""
    wanted = min(256 if image_size <= SMALL_IMAGES else 1024, images)
    return max(1, wanted // multiple) * multiple


def top_accuracies(logits: Tensor, labels: Tensor, prefix: str = "") -> dict[str, float]:
    """(N, K) and (N,) → top-1, and top-5 where there are more than five classes."""
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
    tops = (1, 5) if logits.shape[1] > 5 else (1,)
    return {f"{prefix}top{top}": accuracy(ranked, labels.to(ranked.device), top) for top in tops}


def accuracy(predictions: Tensor, labels: Tensor, top: int = 1) -> float:
    """The share of rows whose label is among the first `top` predictions. predictions: (Q, ≥ top), labels: (Q,)."""
    hits = (predictions[:, :top] == labels.unsqueeze(1)).any(dim=1)
    return float(hits.double().mean())
