"""The configuration of a training run: every setting once, with its type, default and help.

Flags, `--help`, config.yaml and Python keywords all follow from these dataclasses. Settings go by flat names
(`base_lr`, `num_mix`); the `name` of a section goes by the section's own name (`model`, `method`).
No torch here: `recipes.py` fills a Config in, `build.py` turns it into objects.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import operator
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated, Any, Generic, Literal

import yaml
from annotated_types import Ge, Gt, Interval, Lt
from typing_extensions import TypeVar
from tyro.conf import Positional, Suppress, arg

from patchmix.data import IMAGENET_MEAN, IMAGENET_STD
from patchmix.methods.options import (
    DISTILLATION,
    METHOD_OPTIONS,
    RENAMED,
    Count,
    Fraction,
    NonNegative,
    PatchMixOptions,
)

Options = TypeVar("Options", default=Any)
S = TypeVar("S")

Share = Annotated[float, Interval(ge=0, lt=1)]  # not all of it
Above0 = Annotated[float, Gt(0), Lt(inf)]


@dataclass(frozen=True)
class DataConfig:
    path: Annotated[Positional[str], arg(name="data", metavar="DATA")] = "shapes"
    """A name (shapes, cifar10, cifar100, imagenet), a folder of images, parquet, or .tar shards."""
    cache_gb: NonNegative = 2.0  # Decode data once and keep it in memory if it takes less than this many GB.


@dataclass(frozen=True)
class ViewsConfig:
    """Augmentation, with torchvision's parameters; pairs of probabilities are for the first and the second view."""

    area: tuple[float, float] = (0.05, 1.0)  # Smallest and largest share of the image that a crop covers.
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # Lowest and highest width ÷ height of a crop.
    flip: Fraction = 0.5  # Probability of a horizontal flip.
    jitter: Fraction = 0.8  # Probability of color jitter.
    brightness: Fraction = 0.4  # Brightness changes by a factor in 1 ± this.
    contrast: Fraction = 0.4  # Contrast changes by a factor in 1 ± this.
    saturation: Fraction = 0.2  # Saturation changes by a factor in 1 ± this.
    hue: Annotated[float, Interval(ge=0, le=0.5)] = 0.1  # Largest turn of hue, as a share of the color circle.
    gray: Fraction = 0.2  # Probability of grayscale.
    blur: tuple[Fraction, Fraction] = (1.0, 0.1)  # Probability of Gaussian blur.
    sigma: tuple[float, float] = (0.1, 2.0)  # Range of the blur's standard deviation in pixels.
    solarize: tuple[Fraction, Fraction] = (0.0, 0.2)  # Probability of solarization.
    local_crops: Annotated[int, Ge(0)] = 0  # Number of local crops (multi-crop).
    local_size: Count = 96  # Side of the local crops in pixels.
    local_area: tuple[float, float] = (0.05, 0.35)  # Smallest and largest share of the image that a local crop covers.
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean per channel, subtracted from the pixels (white is 1); empty for that of the initial weights or the data."""
    std: tuple[Above0, ...] = IMAGENET_STD  # Standard deviation per channel; empty likewise.


@dataclass(frozen=True)
class ModelConfig:
    """The encoder. Sizes follow from the model's name unless they are given."""

    name: Annotated[str, arg(name="model")] = "vit_small_patch16_224"
    """Any timm ViT, vit_{tiny,small,base}_patchP_S (patch size P, image size S), or same: the initial weights' own."""
    init_from: str | None = None
    """Initial weights: a run, a file, timm:NAME or hf://USER/NAME; resampled to the image size and patch size."""
    freeze_blocks: Annotated[int, Ge(0)] = 0  # Freeze the embedding and this many of the first blocks.
    image_size: Count | None = None  # Side of the input in pixels.
    patch_size: Count | None = None  # Side of a patch in pixels.
    in_chans: Count = 3
    """Input channels: 1 for grayscale, 3 for RGB; others are read from TIFF files and arrays."""
    dim: Count | None = None  # Width of the tokens.
    depth: Count | None = None  # Number of blocks.
    heads: Count | None = None  # Number of attention heads.
    stem: Literal["patch", "conv"] = "patch"
    """One projection per patch, or convolutions, which learn faster; these export to timm and ONNX only."""
    drop_path: Share = 0.1  # Stochastic depth rate of the base encoder.
    initialization: Literal["mocov3", "timm", "mimetic"] = "mocov3"
    """Initialization of the weights; mimetic is mocov3 with attention that starts like a trained one."""
    positions: Literal["learned", "sincos", "fixed-sincos"] | None = None
    """Positions: learned, learned from 2-d sine-cosine, or fixed sine-cosine; by default fixed for mocov3 and sdmp."""
    author_positions: bool = True
    """Resample positions for smaller images as the authors of DINO, iBOT and PatchMix do; otherwise as timm does."""


@dataclass(frozen=True)
class MethodConfig(Generic[Options]):
    """The method and its options."""

    name: Annotated[str, arg(name="method")] = "patchmix"
    """Method: patchmix, mocov3, simclr, byol, swav, dino, ibot, sdmp, regioncl, or distill with --teacher."""
    options: Annotated[Options, arg(name="")] = field(default_factory=PatchMixOptions)  # type: ignore[assignment]


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer; learning rate with linear warm-up and cosine decay."""

    name: Annotated[Literal["adamw", "muon"], arg(name="optim")] = "adamw"
    """AdamW for all parameters, or Muon for the matrices of the encoder's blocks and AdamW for the rest."""
    base_lr: Above0 = 5e-4  # Learning rate for a batch of 256; it grows in proportion to the batch.
    min_lr: NonNegative = 0.0  # Learning rate at the end.
    warmup_epochs: NonNegative = 10.0  # Epochs of warm-up; with --budget, a share of the recipe's epochs.
    weight_decay: NonNegative = 0.04  # Weight decay at the start.
    weight_decay_end: NonNegative = 0.4  # Weight decay at the end; cosine in between.
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW's betas.
    eps: Above0 = 1e-8  # AdamW's epsilon.
    clip_grad: NonNegative = 0.0  # Clip gradients to this norm; 0 is off.
    encoder_lr: Annotated[float, Interval(gt=0, le=1)] = 1.0  # Factor of the encoder's learning rate.
    layer_decay: Annotated[float, Interval(gt=0, le=1)] = 1.0  # Layer-wise decay of the encoder's learning rate.
    head_warmup: Share = 0.0
    """Fraction of the training in which only the heads learn; the encoder's rate then rises over an equal part."""


@dataclass(frozen=True)
class TrainConfig:
    """The length of the training."""

    batch_size: Count = 1024  # Images per optimizer step, over all processes.
    epochs: Above0 = 300.0  # Passes over the data; a shorter run keeps the recipe's proportion of warm-up.
    budget: str | None = None  # Wall-clock time instead of epochs, such as 45min or 2h.
    accumulate: Count = 1  # Micro-batches per optimizer step.
    token_dropout: tuple[Share, Share] = (0.0, 0.0)
    """Fraction of the patch tokens that queries drop, at the start and at the end; momentum encoders see all."""
    image_sizes: tuple[Above0, ...] = ()
    """Sides of both views in equal stages of the training: pixels, or fractions of the model's such as 0.5 0.75 1."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # Precision; auto is bf16 on hardware that computes in it.
    seed: int = 0  # Random seed.

    def sides(self, whole: int, patch: int) -> tuple[int, ...]:
        """`image_sizes` in pixels, for a model that takes `whole` px; fractions make at least 2 × 2 patches."""
        parts = [min(whole, patch * max(2, round(size * whole / patch))) for size in self.image_sizes]
        pixels = [int(size) if size > 1 else part for size, part in zip(self.image_sizes, parts, strict=True)]
        return tuple(pixels) or (whole,)


@dataclass(frozen=True)
class RuntimeConfig:
    """How a run is carried out, not what it computes: a resumed run may differ here."""

    device: str = "auto"  # Device: auto, cpu or cuda.
    workers: Annotated[int, Ge(0)] = 2  # Processes that load images.
    views: Literal["cpu", "device"] = "cpu"  # Where colors are augmented; results differ by rounding only.
    log_every: Count = 10  # Steps between log entries.
    monitor_every: NonNegative = 10.0  # Epochs between evaluations; 0 evaluates at the start and the end only.
    monitor_bank: Count = 10_000  # Training images of the monitor's kNN.
    monitor_queries: Count = 2_000  # Test images of the monitor's kNN.
    checkpoint_epochs: NonNegative = 1.0  # Epochs between checkpoints.
    checkpoint_minutes: Above0 = 10.0  # Most minutes between checkpoints.
    keep_checkpoints: Count = 1  # Number of checkpoints to keep.
    timeout_minutes: Above0 = 10.0  # Most minutes to wait for another process.
    recompute: bool = False
    """Activation checkpointing: less memory, about a third more time; drop path draws other random numbers."""
    compile: bool = False  # Use torch.compile: minutes of warm-up, then faster steps.
    wandb: str | None = None  # Weights & Biases project to log to as well.
    mlflow: str | None = None  # MLflow experiment to log to as well.
    trackio: str | None = None  # Trackio project to log to as well.


@dataclass(frozen=True)
class Config(Generic[Options]):
    """Everything that defines a run, in the sections of config.yaml."""

    recipe: Suppress[str] = "paper"  # the recipe it comes from
    data: DataConfig = field(default_factory=DataConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig[Options] = field(default_factory=MethodConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    @property
    def lr(self) -> float:
        return self.optim.base_lr * self.train.batch_size / 256

    @property
    def warmup(self) -> float:
        """The share of the training that is warm-up."""
        return self.optim.warmup_epochs / self.train.epochs

    @property
    def budget_minutes(self) -> float | None:
        return None if self.train.budget is None else parse_minutes(self.train.budget)

    def replace(self, **settings: Any) -> Config:
        """A copy with settings by their flat names, validated: `config.replace(base_lr=1e-3, num_mix=2)`.

        Another method starts from its own default options.
        """
        values, method = to_dict(self), settings.get("method", self.method.name)
        if method != self.method.name:
            values["method"] = {"name": method, "options": {}}
        places = {name: path for name, (path, _) in flat(_default(method)).items()}
        for name, value in settings.items():
            check_known(name, places, "setting")
            *sections, key = places[name]
            functools.reduce(operator.getitem, sections, values)[key] = value
        return from_dict(values)


def to_dict(config: Config) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))  # lists for tuples, as YAML has them
    return plain


def from_dict(values: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`; an unknown key or a wrong value raises a ValueError of one line."""
    values = _from_0_1(values)
    method = values.setdefault("method", {})
    default = _default(method.get("name", "patchmix") if isinstance(method, Mapping) else "patchmix")
    _check_keys(values, to_dict(default))
    values["method"] = {"options": {}, **method}
    check_precision(values.get("train", {}).get("precision"))
    generic: Any = Config
    config: Config = validate(generic[type(default.method.options)], values)
    if config.optim.warmup_epochs >= config.train.epochs:
        warmup, epochs = config.optim.warmup_epochs, config.train.epochs
        why = ": with a budget, it is a share of them" if config.train.budget else ""
        raise ValueError(f"optim.warmup_epochs is {warmup:g}; it must be below train.epochs ({epochs:g}){why}")
    if config.train.budget is not None:
        parse_minutes(config.train.budget)
    if odd := [size for size in config.train.image_sizes if size > 1 and size % 1]:
        raise ValueError(f"train.image_sizes has {odd[0]:g}; give whole pixels, or fractions up to 1")
    if any(config.train.token_dropout) and config.method.name in ("ibot", "regioncl", "distill"):
        raise ValueError(f"train.token_dropout does not work with {config.method.name}, which compares patch tokens")
    return config


def _default(method: str) -> Config:
    known = METHOD_OPTIONS | DISTILLATION
    check_known(method, known, "method")
    return Config(method=MethodConfig(method, known[method]()))


def check_precision(name: Any) -> None:
    if name == "fp16":
        raise ValueError(
            "precision is fp16, whose small gradients vanish without loss scaling; use bf16, or fp32 on GPUs without it"
        )


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def from_yaml(text: str) -> Config:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"the configuration is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError("the configuration is empty; expected the sections of config.yaml")
    return from_dict(values)


def read_config(path: Path) -> Config:
    """A config.yaml, or that of a run's folder."""
    path = path / "config.yaml" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"there is no configuration {path}; give a config.yaml or a run's folder")
    try:
        return from_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of one line, or bytes that are not text
        raise ValueError(f"{path}: {error}") from error


def flat(config: Config) -> dict[str, tuple[tuple[str, ...], Any]]:
    """The flat name of every setting → where it is in the sections, and its value."""

    def walk(section: Any, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[tuple[str, ...], Any]]]:
        for each in dataclasses.fields(section):
            value, place = getattr(section, each.name), (*path, each.name)
            if dataclasses.is_dataclass(value):
                yield from walk(value, place)
            else:
                yield path[0] if path and each.name in ("name", "path") else each.name, (place, value)

    return dict(walk(config, ()))


def differences(a: Config, b: Config) -> list[str]:
    """What two configurations would compute differently, as `key: a → b`."""
    left, right = ({".".join(place): value for place, value in flat(c).values()} for c in (a, b))
    return [
        f"{key.replace('.options', '')}: {left.get(key)} → {right.get(key)}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key) and not key.startswith("runtime.") and key != "data.path"
    ]


def parse_minutes(text: str) -> float:
    """`45min`, `2h`, `90s` or `1h30min` in minutes."""
    pattern = r"(?:(\d+(?:\.\d+)?)\s*h)?\s*(?:(\d+(?:\.\d+)?)\s*(?:min|m))?\s*(?:(\d+(?:\.\d+)?)\s*s)?"
    found = re.fullmatch(pattern, text.strip())
    if found is None or not any(float(part or 0) for part in found.groups()):
        raise ValueError(f"budget is {text!r}; write it as 45min, 2h, 90s or 1h30min")
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return hours * 60 + minutes + seconds / 60


# Settings of version 0.1 that have one value now.
_DROPPED: dict[str, dict[str, Any]] = {
    "views": {"local_blur": 0.5},
    "model": {"freeze_patch_embed": False, "freeze_pos_embed": False},
    "runtime": {"monitor_momentum": False},
}


def _from_0_1(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of version 0.1 in today's keys; any other as it is."""
    values = {name: dict(section) if isinstance(section, Mapping) else section for name, section in values.items()}
    for name, dropped in _DROPPED.items():
        section = values.get(name)
        for key, only in dropped.items():
            if isinstance(section, dict) and section.pop(key, only) != only:
                raise ValueError(f"{name}.{key} was removed; it can only be {only}. Leave it out")
    method, train = values.get("method"), values.get("train")
    if isinstance(method, dict) and isinstance(method.get("options"), Mapping):
        method["options"] = {RENAMED.get(key, key): value for key, value in method["options"].items()}
    if isinstance(train, dict) and "budget_minutes" in train:
        minutes = train.pop("budget_minutes")
        train["budget"] = None if minutes is None else f"{minutes:g}min"
        values["model"] = {"author_positions": False, "positions": "learned", **(values.get("model") or {})}
    return values


def validate(cls: type[S], values: Mapping[str, Any]) -> S:
    """An instance of the dataclass from plain values, or a ValueError of one line: what, why, and the nearest name."""
    from pydantic import ValidationError

    kind: Any = cls
    known = [each.name for each in dataclasses.fields(typing.get_origin(kind) or kind)]
    for key in values:
        check_known(key, known, "setting")
    try:
        validated: Any = _adapter(kind).validate_python(values)
    except ValidationError as error:
        first, *others = error.errors()
        key = _key(values, first["loc"])
        if first["type"] == "missing":
            raise ValueError(f"{key} is missing; give it as {key}=…") from None
        rules = dict.fromkeys(each["msg"] for each in (first, *others) if _key(values, each["loc"]) == key)
        rule = " or ".join(text.removeprefix("Input should be ") for text in rules)
        hint = did_you_mean(first["input"], re.findall(r"'([^']+)'", rule), least=0.4)
        raise ValueError(f"{key} is {first['input']!r}; it must be {rule}{hint and f'; {hint}'}") from None
    paths = {each.name: getattr(validated, each.name) for each in dataclasses.fields(validated)}
    paths = {name: path.expanduser() for name, path in paths.items() if isinstance(path, Path)}
    settings: S = dataclasses.replace(validated, **paths)
    return settings


@functools.cache
def _adapter(cls: type[Any]) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _key(values: Any, location: Iterable[int | str]) -> str:
    """The dotted name of the setting at a place of pydantic's, such as ("method", "options", "num_mix", "int")."""
    names: list[str] = []
    for part in location:
        if not isinstance(values, Mapping):
            break
        names, values = [*names, str(part)], values.get(part)
    return ".".join(name for name in names if name != "options")


def check_known(key: str, known: Iterable[str], kind: str, otherwise: str = "") -> None:
    """A ValueError that says where `key` belongs or names the nearest right key, if it is not a known one."""
    known = list(known)
    if key not in known:
        elsewhere = _methods_with(key) if {"method", "--method"} & set(known) else ""
        hint = elsewhere or did_you_mean(key, known) or otherwise or f"known: {', '.join(known)}"
        raise ValueError(f"unknown {kind} {key!r}; {hint}")


def _methods_with(option: str) -> str:
    """A hint that names the methods with this option; empty where there are none."""
    name, methods = option.strip("-").replace("-", "_"), METHOD_OPTIONS | DISTILLATION
    found = [method for method, options in methods.items() if name in options.__dataclass_fields__]
    return f"it belongs to method {' or '.join(found)}" if found else ""


def did_you_mean(value: Any, known: Sequence[str], least: float = 0.6) -> str:
    """A question that names the nearest of the known values; empty where none is as similar as `least` (0 … 1)."""
    text, names = str(value).strip("-"), {name.strip("-"): name for name in known}
    near = [name for name in names if text in re.split("[-_]", name)]
    near = near or difflib.get_close_matches(text, names, n=1, cutoff=least)
    return f"did you mean {names[near[0]]!r}?" if near else ""


def _check_keys(values: Any, known: Mapping[str, Any], path: str = "") -> None:
    """A ValueError for a key that is not in `known`, where each section is a dictionary."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} is {values!r}; it must be a section of keys")
    for key, value in values.items():
        check_known(key, known, f"key in {path}:" if path else "section")
        if isinstance(known[key], dict):
            _check_keys(value, known[key], f"{path}.{key}".lstrip("."))
