"""A run: start it, continue it, and use what it made."""

import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import patchmix
from patchmix import build, distributed
from patchmix.config import Config, differences, from_dict, read_config, to_dict, to_yaml
from patchmix.data import IMAGENET_MEAN, IMAGENET_STD
from patchmix.data.contract import Source
from patchmix.data.decode import pixel_channels
from patchmix.data.memory import mean_and_std
from patchmix.device import resolve_device
from patchmix.evaluate.monitor import Guard, collapse_warning, guard_verdict
from patchmix.evaluate.results import Result
from patchmix.files import remove_unfinished, replacing, run_lock, write_text
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.interop.loading import load_backbone
from patchmix.settings import Adapt, Pretrain
from patchmix.train.allocator import keep_freed_memory, return_freed_memory
from patchmix.train.checkpoint import Checkpoints, load_checkpoint
from patchmix.train.log import TRACKERS, BadSamples, RunLog
from patchmix.train.loop import train
from patchmix.train.watch import Interrupted, NonFiniteLoss


class Run:
    """A folder with config.yaml, metrics.jsonl, checkpoints/ and, once it is complete, encoder.safetensors."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.encoder_path = self.path / "encoder.safetensors"
        if not (self.path / "config.yaml").is_file():
            raise ValueError(f"{self.path} is not a run: it has no config.yaml")

    @property
    def config(self) -> Config:
        return read_config(self.path)

    def load(self) -> Backbone:
        """The trained encoder with its architecture and normalization; `.embed(images)` gives features."""
        return load_backbone(self.path)

    def encoder(self) -> VisionTransformer:
        """The trained encoder as a plain timm model, in evaluation mode."""
        return self.load().encoder()

    def knn(self, data: Any, **settings: Any) -> Result:
        """`patchmix.knn` of this run; the result is also added to its results.jsonl."""
        return patchmix.knn(self.path, data, **settings)  # type: ignore[no-any-return]

    def linear(self, data: Any, **settings: Any) -> Result:
        """`patchmix.linear` of this run."""
        return patchmix.linear(self.path, data, **settings)  # type: ignore[no-any-return]

    def finetune(self, data: Any, **settings: Any) -> Result:
        """`patchmix.finetune` of this run."""
        return patchmix.finetune(self.path, data, **settings)  # type: ignore[no-any-return]


def run_pretrain(settings: Pretrain) -> Run:
    """Pre-trains with these settings in the folder `out`."""
    return run_config(settings.run, settings.out, resume=settings.resume)


def run_adapt(settings: Adapt) -> Run:
    """Pre-trains from existing weights; the same as `pretrain` with `init_from` and the recipe `adapt`."""
    if settings.config is None and settings.run.model.init_from is not None:
        raise ValueError("WEIGHTS and --init-from both give the weights to start from; leave --init-from out")
    return run_config(settings.run.replace(init_from=settings.weights), settings.out, resume=settings.resume)


def run_config(config: Config, out: Path, *, resume: str | Path | None = None) -> Run:
    """Trains `config` in the folder `out`, from the start or from a checkpoint."""
    device = resolve_device(config.runtime.device)
    if device.type == "cpu":
        (return_freed_memory if config.runtime.recompute else keep_freed_memory)()
    group = distributed.process_group(device, config.runtime.timeout_minutes)
    with group, run_lock(out) if distributed.is_main() else nullcontext():
        state = _find_checkpoint(config, out, resume)
        start = None if state is not None or config.model.init_from is None else load_backbone(config.model.init_from)
        config = completed(config, start if state is None else from_dict(state["config"]))
        source = build.build_source(config)
        if not (config.views.mean and config.views.std):
            mean, std = mean_and_std(source)
            config = config.replace(mean=config.views.mean or mean, std=config.views.std or std)
        if state is not None and state["data"] != source.fingerprint():
            raise ValueError(
                f"{source.name} is not the data that the checkpoint was trained on; resume with the same data"
            )
        found = [0 if state is None else state["step"], source.fingerprint()]
        if any(other != found for other in distributed.gather_json(found, device)):
            raise ValueError(
                f"the processes see different checkpoints in {out}, or different data; use a file system that all share"
            )
        method = build.build_method(config, None if start is None else start.weights)
        encoder: Any = method.encoder
        architecture = Architecture.of(config.model.name, encoder)
        method.to(device).train()
        loader = build.build_loader(config, source, architecture.image_size, pin_memory=device.type == "cuda")
        main = distributed.is_main()
        if main:
            remove_unfinished(out)
            remove_unfinished(out / "checkpoints")
            write_text(out / "config.yaml", to_yaml(config))
        compared: dict[str, Any] = {} if state is None else state.get("start", {})  # which a Guard adds to
        if start is not None:
            compared["weights"] = {"source": config.model.init_from, "digest": start.digest(), **start.origin}

        def save(path: Path, step: int) -> None:
            if main:
                origin = _origin(config, source, step, step / loader.steps_per_epoch, compared)
                weights = {name: tensor.cpu() for name, tensor in encoder.state_dict().items()}
                Backbone(architecture, weights, config.views.mean, config.views.std, origin).save(path)

        best = out / "best.safetensors"
        if main and resume is not None and not best.is_file():  # continued in another folder
            elsewhere = Path(resume).resolve().parent.parent / best.name
            if str(resume) != "auto" and elsewhere.is_file():
                with replacing(best) as copy:
                    shutil.copyfile(elsewhere, copy)
            else:
                compared.pop("best", None)
        guard = Guard(compared, partial(save, best)) if compared else None
        checkpoints = Checkpoints(out / "checkpoints", keep=config.runtime.keep_checkpoints)
        log = RunLog(out if main else None, step=int(state["step"]) if state else 0)
        try:
            log.track({name: getattr(config.runtime, name) for name in TRACKERS}, to_dict(config))
            log.say(_introduction(config, source, architecture, encoder, device))
            if config.model.in_chans not in (1, 3):
                log.say(f"{config.model.in_chans} channels: views have brightness, contrast and blur, no colors")
            if start is not None and (start.mean, start.std) != (config.views.mean, config.views.std):
                expected = f"mean {start.mean}, std {start.std}"
                log.say(f"warning: the weights expect {expected}; add --mean and --std", style="yellow")
            normal = "a loss is normal between its floor and its chance level; both are in metrics.jsonl"
            log.say(normal if state is None else f"continuing at step {state['step']}")
            plan = build.build_plan(config, method.encoder, loader.steps_per_epoch, device)
            train(
                method,
                loader,
                plan,
                optimizer=build.build_optimizer(config, method, plan.autocast),
                device=device,
                prepare=build.build_prepare(config.views, config.model.in_chans),
                log=log,
                checkpoints=checkpoints,
                resume_from=state,
                extra_state={"config": to_dict(config), "data": source.fingerprint(), "start": compared},
                evaluators=build.build_evaluators(config, method, source, architecture.image_size, device, guard),
                warning=partial(_warning, guard),
                on_bad_sample=BadSamples(log, limit=max(1, round(0.01 * len(source)))),
            )
            if main:
                _finish(out, checkpoints, guard, log, save)
        except Interrupted as error:
            if resume is None:  # who has resumed before knows how
                error.args = (f"{error}; continue with --resume auto",)
            raise
        except NonFiniteLoss as error:
            kept = checkpoints.last
            where = f"the last good checkpoint is {kept}" if kept else "there is no checkpoint yet"
            raise NonFiniteLoss(f"{error}; training stopped, {where}. Lower --base-lr, or set --clip-grad 1") from error
        finally:
            log.close()
        distributed.barrier()
    return Run(out)


def _warning(guard: Guard | None, step: int, values: dict[str, float]) -> str | None:
    """What is wrong with the monitor's values, if anything. An untrained network may look collapsed."""
    said = guard(step, values) if guard else None
    return said or (collapse_warning(values) if step else None)


def _find_checkpoint(config: Config, out: Path, resume: str | Path | None) -> dict[str, Any] | None:
    """The state to continue from, after checking that it belongs to this configuration."""
    path = Checkpoints(out / "checkpoints").last
    finished = (out / "encoder.safetensors").exists()
    if resume is None and (path is not None or finished):
        raise ValueError(f"{out} already holds a run; continue it with --resume auto, or choose another --out")
    if resume is not None and str(resume) != "auto":
        elsewhere = Path(resume).resolve().parent != (out / "checkpoints").resolve()
        if elsewhere and (path is not None or finished):
            raise ValueError(
                f"{out} already holds a run, which {resume} would replace; continue it with --resume auto, or choose "
                "another --out"
            )
        path = Path(resume)
    if path is None and finished:
        raise ValueError(f"{out} holds a finished run without its checkpoints; choose another --out")
    if path is None:
        return None  # a new run, or one killed before its first checkpoint
    state = load_checkpoint(path)
    saved = from_dict(state["config"])
    changed = differences(saved, completed(config, saved))
    if changed:
        raise ValueError(
            f"{path} was made with another configuration ({'; '.join(changed)}); resume with the same one "
            "(--config RUN), or start a new run with --init-from"
        )
    return state


def completed(config: Config, like: Config | Backbone | None) -> Config:
    """The configuration with what it takes from the weights to start from: architecture, mean and std.

    Mean and std that are empty after this are measured. Colors are changed in RGB only.
    """
    taken: dict[str, Any] = {}
    shape: Any = like.model if isinstance(like, Config) else None if like is None else like.architecture
    if config.model.name == "same":
        if shape is None:
            raise ValueError("model same needs weights to start from; give --init-from WEIGHTS")
        sizes = ("image_size", "patch_size", "dim", "depth", "heads")
        taken = {name: getattr(shape, name) for name in sizes if getattr(config.model, name) is None}
        taken |= {"model": shape.name, "stem": shape.stem}
        taken["in_chans"] = shape.in_chans if config.model.in_chans == 3 else config.model.in_chans
    in_chans = taken.get("in_chans", config.model.in_chans)
    channels, normalization = pixel_channels(in_chans), like.views if isinstance(like, Config) else like
    for name, usual in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)):
        given, known = getattr(config.views, name), getattr(normalization, name, ())
        if len(given) not in (0, channels) and given != usual:
            raise ValueError(f"{name} has {len(given)} values for {channels} channels; give {channels}, or none")
        taken[name] = given if len(given) == channels else known if len(known) == channels else ()
    if channels != 3:
        taken |= {"saturation": 0.0, "hue": 0.0, "gray": 0.0, "solarize": (0.0, 0.0)}
    return config.replace(**taken)


def _finish(
    out: Path, checkpoints: Checkpoints, guard: Guard | None, log: RunLog, save: Callable[[Path, int], None]
) -> None:
    """Writes the encoder: the last one, or the best one where the last is worse than the start."""
    step = int(re.sub(r"\D", "", checkpoints.last.stem)) if checkpoints.last else 0
    path, verdict = out / "encoder.safetensors", None if guard is None else guard_verdict(guard.state)
    if guard is not None and verdict is not None:
        best = load_backbone(out / "best.safetensors")
        origin = best.origin | {"start": _without_neighbors(guard.state)}
        replace(best, origin=origin).save(path)
    else:
        save(path, step)
    log.say(f"encoder: {path}")
    if step == 0:
        log.say("warning: the budget ended before the first step: the encoder is untrained", style="bold red")
    if verdict is not None:
        log.say(f"warning: {verdict}", style="bold red")


def _without_neighbors(compared: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in compared.items() if name not in ("neighbors", "correct")}


def _origin(config: Config, source: Source, step: int, epochs: float, compared: dict[str, Any]) -> dict[str, Any]:
    """Where an encoder comes from, as its file says."""
    origin = {
        "recipe": config.recipe,
        "method": config.method.name,
        "data": source.name,
        "images": len(source),
        "step": step,
        "epochs": round(epochs, 2),
        "seed": config.train.seed,
    }
    return origin | ({"start": _without_neighbors(compared)} if compared else {})


def _introduction(
    config: Config, source: Source, architecture: Architecture, encoder: nn.Module, device: torch.device
) -> str:
    millions = sum(parameter.numel() for parameter in encoder.parameters()) / 1e6
    processes = distributed.world_size()
    length = config.train.budget or f"{config.train.epochs:g} epochs"
    return (
        f"{config.method.name} ({config.recipe}): {architecture.name}, {millions:.1f} M parameters, "
        f"{architecture.image_size} px, patch {architecture.patch_size}; {source.name}, {len(source):,} images; "
        f"batch {config.train.batch_size}, lr {config.lr:.2e}, {length}; {device}, "
        f"{processes} process{'es' if processes > 1 else ''} × {torch.get_num_threads()} threads"
    )
