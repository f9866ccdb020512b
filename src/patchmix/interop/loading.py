"""One way to any encoder: a run, a file of ours, a checkpoint of another project, or a timm model by name."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor

from patchmix.data.views import IMAGENET_MEAN, IMAGENET_STD
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.interop.importing import import_checkpoint, is_own, read_entries
from patchmix.interop.layouts import Which
from patchmix.nn.vit import create_encoder


def load_backbone(source: str | Path, *, encoder: Which | None = None, heads: int | None = None) -> Backbone:
    """The encoder that `source` names.

    source: a run's folder (its encoder.safetensors; while the run goes on, or for encoder="momentum", its newest
        checkpoint), a folder or file made by import or export, a checkpoint of another project (imported on the fly,
        see `import_checkpoint`, also for `encoder` and `heads`), or `timm:NAME`. A timm name with a tag, such as
        `timm:vit_small_patch16_224.dino`, means pretrained weights from the local cache: nothing is downloaded.
        Without a tag the weights are random, the same ones each time, and `Backbone.name` says so.
    """
    if encoder not in (None, "base", "momentum"):
        raise ValueError(f"encoder {encoder!r} is unknown; it must be base or momentum")
    if str(source).startswith("timm:"):
        if encoder or heads:
            raise ValueError(f"{source} takes no encoder and no heads; the name is enough")
        return _timm_model(str(source).removeprefix("timm:"))
    path = Path(source)
    if not path.exists():
        known = timm.list_models("vit_*")
        near = difflib.get_close_matches(str(source).split(".")[0], known, n=1, cutoff=0.8)
        hint = f"; for the timm model write timm:{source if str(source) in known else near[0]}" if near else ""
        raise ValueError(f"{source} does not exist; give a run's folder, a checkpoint file or timm:NAME{hint}")
    if path.is_dir():
        name = path.name if path.name not in ("", "..") else path.resolve().name
        path, unfinished = _file_in(path, encoder)
    else:
        name, unfinished = _name_of(path.absolute()), False
    entries, metadata = read_entries(path)
    if is_own(entries, metadata):
        try:
            backbone = _own(entries, metadata, encoder, heads)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    else:
        backbone = import_checkpoint(path, entries=entries, encoder=encoder, heads=heads).backbone
    if encoder == "momentum":
        name += " (momentum)"
    if unfinished:
        name += f" (unfinished, step {backbone.origin.get('step')})"
    return dataclasses.replace(backbone, name=name)


def _name_of(file: Path) -> str:
    """A run's files are all called alike: the run says more."""
    if file.name == "encoder.safetensors":
        return file.parent.name
    if file.parent.name == "checkpoints":
        return f"{file.parent.parent.name}/{file.resolve().stem}"
    return file.stem


def _file_in(folder: Path, encoder: Which | None) -> tuple[Path, bool]:
    """The file of a run or of an export that holds the encoder, and whether it is of an unfinished run."""
    finished = folder / "encoder.safetensors"
    checkpoints = sorted(folder.glob("checkpoints/step-*.pt")) or list(folder.glob("checkpoints/last"))
    if encoder == "momentum" and checkpoints:  # encoder.safetensors holds the base encoder only
        return checkpoints[-1], not finished.is_file()
    if finished.is_file():
        return finished, False
    if checkpoints:
        return checkpoints[-1], True
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return folder / name, False
    if (folder / "config.yaml").is_file():
        raise ValueError(
            f"{folder} is a run without encoder or checkpoint yet; wait for its first checkpoint, or continue it with "
            "`patchmix pretrain … --resume auto`"
        )
    raise ValueError(f"{folder} holds no encoder; expected a run (encoder.safetensors) or an exported model")


def _own(entries: dict[str, Any], metadata: Mapping[str, str], encoder: Which | None, heads: int | None) -> Backbone:
    """From encoder.safetensors or from a run's checkpoint."""
    if "patchmix" in metadata:
        backbone = Backbone.from_metadata(metadata["patchmix"], entries)
        kept = backbone.origin.get("encoder", "base")
        if encoder not in (None, kept):
            raise ValueError(f"it holds only the {kept} encoder; for the {encoder} one, give the run's checkpoint")
    else:
        backbone = _from_run_checkpoint(entries, encoder or "base")
    if heads not in (None, backbone.architecture.heads):
        raise ValueError(f"its encoder has {backbone.architecture.heads} heads; leave heads={heads} out")
    return backbone


def _from_run_checkpoint(entries: Mapping[str, Any], encoder: Which) -> Backbone:
    state: dict[str, Tensor] = {str(name): value for name, value in entries["method"].items()}
    prefix = {"base": "encoder.", "momentum": "momentum_copy.network.0."}[encoder]
    weights = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    if not weights:
        raise ValueError(f"there is no {encoder} encoder; this run's method keeps none, so take the other one")
    config: Mapping[str, Any] = entries["config"]
    try:
        model = config["model"]
        sizes = {key: model.get(key) for key in ("image_size", "patch_size", "dim", "depth", "heads")}
        with torch.device("meta"):
            shell = create_encoder(model["name"], in_chans=model.get("in_chans") or 3, **sizes)
        architecture = Architecture.of(model["name"], shell)
        architecture.check(weights, "this is not the encoder that the configuration describes")
        views = config.get("views", {})
        return Backbone(
            architecture,
            weights,
            mean=tuple(views.get("mean", IMAGENET_MEAN)),
            std=tuple(views.get("std", IMAGENET_STD)),
            origin={
                "format": "patchmix",
                "recipe": config.get("recipe"),
                "method": dict(config.get("method") or {}).get("name"),
                "data": dict(config.get("data") or {}).get("path"),
                "step": entries.get("step"),
                "encoder": encoder,
            },
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no usable configuration ({error}); it was not written by a run") from error


def _timm_model(name: str) -> Backbone:
    architecture, _, tag = name.partition(".")
    if not tag:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random = create_encoder(name)
        origin = {"format": "timm", "random": True}
        shape = Architecture.of(name, random)
        return Backbone(shape, random.state_dict(), origin=origin, name=f"{name} (random weights)")
    try:
        cfg = timm.get_pretrained_cfg(name)
    except RuntimeError:
        cfg = None
    if cfg is None:
        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
        raise ValueError(f"timm has no {name}; it has {architecture} with {', '.join(tags) or 'no pretrained weights'}")
    path = _cached(cfg)
    if path is None:
        raise ValueError(
            f"the weights of {name} are not on this machine; download them once with "
            f"`python -c \"import timm; timm.create_model('{name}', pretrained=True)\"`"
        )
    model = create_encoder(architecture)
    entries, _ = read_entries(path)
    state: Mapping[str, Tensor] = entries.get("model", entries.get("state_dict", entries))
    wanted = model.state_dict().keys()
    weights = {key: tensor.float() for key, tensor in state.items() if key in wanted or not key.startswith("head")}
    shape = Architecture.of(architecture, model)
    shape.check(weights, f"{path} does not fit {name} as timm builds it")
    origin = {"format": "timm", "file": name}
    return Backbone(shape, weights, mean=tuple(cfg.mean), std=tuple(cfg.std), origin=origin, name=name)


def _cached(cfg: Any) -> Path | None:
    """timm's own copy of pretrained weights, from the Hugging Face cache or torch's; None when there is none."""
    if cfg.hf_hub_id:
        repository, _, revision = cfg.hf_hub_id.partition("@")
        for filename in filter(None, (cfg.hf_hub_filename, "model.safetensors", "pytorch_model.bin")):
            path = try_to_load_from_cache(repository, filename, revision=revision or None)
            if isinstance(path, str):
                return Path(path)
    file = Path(torch.hub.get_dir()) / "checkpoints" / str(cfg.url).rsplit("/", 1)[-1]
    return file if cfg.url and file.is_file() else None
