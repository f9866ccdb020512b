"""Everything that defines a run, as plain typed data that goes to and from config.yaml.

No torch here, and no behaviour: `recipes.py` fills these in, `build.py` turns them into objects.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml


@dataclass(frozen=True)
class DataConfig:
    path: str = "shapes"
    cache_gb: float = 2.0  # sets that decode to less than this are kept in memory


@dataclass(frozen=True)
class ViewsConfig:
    """Table "augmentation"; blur and solarize have one probability for each of T1 and T2."""

    area: tuple[float, float] = (0.05, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    gray: float = 0.2
    blur: tuple[float, float] = (1.0, 0.1)
    sigma: tuple[float, float] = (0.1, 2.0)
    solarize: tuple[float, float] = (0.0, 0.2)
    local_crops: int = 0
    local_size: int = 96
    local_area: tuple[float, float] = (0.05, 0.35)
    local_blur: float = 0.5
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ModelConfig:
    """None means: as the name says."""

    name: str = "vit_small_patch16_224"
    image_size: int | None = None
    patch_size: int | None = None
    in_chans: int = 3
    dim: int | None = None
    depth: int | None = None
    heads: int | None = None
    drop_path: float = 0.1
    initialization: Literal["mocov3", "timm"] = "mocov3"
    freeze_patch_embed: bool = False
    freeze_pos_embed: bool = False


@dataclass(frozen=True)
class MethodConfig:
    """`options` are keyword arguments of the method's class; build.py checks their names and types."""

    name: str = "patchmix"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimConfig:
    base_lr: float = 5e-4  # for a global batch of 256; the learning rate grows in proportion
    min_lr: float = 0.0
    warmup_epochs: float = 10.0
    weight_decay: float = 0.04
    weight_decay_end: float = 0.4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_grad: float = 0.0  # 0: gradients are not clipped


@dataclass(frozen=True)
class TrainConfig:
    batch_size: int = 1024  # of one optimiser step, over all processes
    epochs: float = 300.0
    budget_minutes: float | None = None  # wall-clock; then `epochs` only scales the schedules
    accumulate: int = 1
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    seed: int = 0


@dataclass(frozen=True)
class RuntimeConfig:
    """How a run is carried out, not what it computes: a resumed run may differ here."""

    device: str = "auto"
    workers: int = 2
    views: Literal["cpu", "device"] = "cpu"  # where colours are changed; the results differ by rounding only
    log_every: int = 10
    monitor_every: float = 10.0  # epochs; 0: only at the start and the end
    monitor_bank: int = 10_000
    monitor_queries: int = 2_000
    checkpoint_epochs: float = 1.0
    checkpoint_minutes: float = 10.0
    keep_checkpoints: int = 1
    timeout_minutes: float = 10.0  # the longest that a process waits for another, be it a peer or a worker
    recompute: bool = False  # keep only each block's input, and compute the rest again in the backward pass
    compile: bool = False  # torch.compile of the method: minutes of warm-up
    wandb: str | None = None  # project name


@dataclass(frozen=True)
class Config:
    recipe: str = "paper"
    data: DataConfig = field(default_factory=DataConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
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

    def check(self) -> None:
        rules = [
            ("train.batch_size", self.train.batch_size, self.train.batch_size >= 1, "at least 1"),
            ("train.epochs", self.train.epochs, self.train.epochs > 0, "above 0"),
            ("train.accumulate", self.train.accumulate, self.train.accumulate >= 1, "at least 1"),
            ("optim.base_lr", self.optim.base_lr, self.optim.base_lr > 0, "above 0"),
            ("optim.clip_grad", self.optim.clip_grad, self.optim.clip_grad >= 0, "at least 0 (0: off)"),
            (
                "optim.warmup_epochs",
                self.optim.warmup_epochs,
                0 <= self.optim.warmup_epochs < self.train.epochs,
                f"at least 0 and below train.epochs ({self.train.epochs:g})",
            ),
            (
                "train.budget_minutes",
                self.train.budget_minutes,
                self.train.budget_minutes is None or self.train.budget_minutes > 0,
                "above 0",
            ),
            ("runtime.workers", self.runtime.workers, self.runtime.workers >= 0, "at least 0"),
            ("runtime.log_every", self.runtime.log_every, self.runtime.log_every >= 1, "at least 1"),
            ("runtime.keep_checkpoints", self.runtime.keep_checkpoints, self.runtime.keep_checkpoints >= 1, "≥ 1"),
            ("runtime.timeout_minutes", self.runtime.timeout_minutes, self.runtime.timeout_minutes > 0, "above 0"),
            ("model.in_chans", self.model.in_chans, self.model.in_chans in (1, 3), "1 (grey) or 3 (RGB)"),
        ]
        for key, value, holds, rule in rules:
            if not holds:
                raise ValueError(f"{key} is {value}; it must be {rule}")


# ---------------------------------------------------------------------------------------------------------- yaml


def to_dict(config: Config) -> dict[str, Any]:
    plain = _plain(dataclasses.asdict(config))
    assert isinstance(plain, dict)
    return plain


def from_dict(values: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`; unknown keys and wrong types fail, naming the nearest right key."""
    config = _from_dict(Config, values, "")
    assert isinstance(config, Config)
    return config


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


def override(config: Config, settings: Iterable[str]) -> Config:
    """Applies settings such as `optim.base_lr=1e-3` or `method.num_mix=[2, 3]`, as `--set` takes them."""
    values = to_dict(config)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting!r} has no '='; write --set section.key=value, e.g. optim.base_lr=1e-3")
        place: dict[str, Any] = values
        *sections, last = key.strip().split(".")
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ValueError(f"--set {setting!r}: {section!r} is a value, not a section")
        if sections == ["method"] and last not in ("name", "options"):
            place = place["options"]
        value = parse_value(text)
        if sections == ["method"] and last == "name" and place["name"] != value:
            place["options"] = {}  # another method has other options: it starts from its own defaults
        place[last] = value
    return from_dict(values)


def differences(a: Config, b: Config) -> list[str]:
    """What two configurations would compute differently, as `key: a → b`."""
    left, right = (dict(_flat(to_dict(c))) for c in (a, b))
    return [
        f"{key}: {left.get(key)} → {right.get(key)}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key) and not key.startswith("runtime.") and key != "data.path"
    ]


# -------------------------------------------------------------------------------------------------------- values


def parse_value(text: str) -> Any:
    """A command line's text as YAML reads it; `1e-3` is a number here, which plain YAML takes for a string."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def coerce(value: Any, hint: Any, key: str) -> Any:
    """`value` as the annotated type, or a ValueError that says what was expected."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return coerce(value, option, key)
            except ValueError:
                continue
    elif hint is type(None):
        if value is None:
            return None
    elif origin is Literal:
        if value in arguments:
            return value
        near = difflib.get_close_matches(str(value), [str(a) for a in arguments], n=1)
        hint_text = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{key} is {value!r}; it must be one of {', '.join(map(str, arguments))}{hint_text}")
    elif origin in (tuple, Sequence):
        if isinstance(value, (list, tuple)):
            variadic = origin is Sequence or (len(arguments) == 2 and arguments[1] is Ellipsis)
            hints = [arguments[0]] * len(value) if variadic else arguments
            if len(hints) == len(value):
                return tuple(coerce(v, h, f"{key}[{i}]") for i, (v, h) in enumerate(zip(value, hints, strict=True)))
    elif origin is dict:
        if isinstance(value, dict):
            return dict(value)
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif hint is str and not isinstance(value, (dict, list, tuple)) and value is not None:
        return str(value)
    raise ValueError(f"{key} is {value!r}; it must be {_describe(hint)}")


def check_known(key: str, known: Iterable[str], where: str) -> None:
    """A ValueError that names the nearest right key, if `key` is not a known one."""
    known = list(known)
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"unknown {where} {key!r}; {hint}")


def _from_dict(cls: type[Any], values: Mapping[str, Any], path: str) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{path.rstrip('.') or 'the configuration'} is {values!r}; it must be a section of keys")
    hints = typing.get_type_hints(cls)
    for key in values:
        check_known(key, hints, f"key in {path.rstrip('.')}:" if path else "section")
    arguments = {}
    for key, value in values.items():
        hint = hints[key]
        is_section = dataclasses.is_dataclass(hint)
        arguments[key] = _from_dict(hint, value, f"{path}{key}.") if is_section else coerce(value, hint, path + key)
    return cls(**arguments)


def _describe(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if hint in words:
        return words[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in arguments)
    if origin in (tuple, Sequence):
        count = "" if origin is Sequence or Ellipsis in arguments else f"{len(arguments)} of "
        return f"a list: {count}{_describe(arguments[0])}"
    return str(hint)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
