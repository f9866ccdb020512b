"""One way to any encoder: a run, a file of ours, a checkpoint of another project, or a timm model by name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor

from patchmix.interop.encoder_file import Architecture, EncoderFile
from patchmix.interop.images import Images, image_batches
from patchmix.interop.importing import import_checkpoint
from patchmix.interop.layouts import Which
from patchmix.interop.reading import read_entries
from patchmix.nn.vit import create_encoder


@dataclass(frozen=True)
class Backbone:
    """An encoder that is ready to use. `name` is short, for tables."""

    file: EncoderFile
    name: str

    @torch.inference_mode()
    def embed(
        self,
        images: Images,
        *,
        pool: Literal["token", "mean"] = "token",
        batch_size: int = 256,
        device: str = "auto",
    ) -> Tensor:
        """Features (N, dim), float32 on the CPU: the class token, or the mean over patch tokens.

        images: a float tensor (N, 3, H, W) in [0, 1], a uint8 array (N, H, W, 3), or a list of PIL images, files or
        uint8 arrays (H, W, 3). They are resized and centre-cropped to the encoder's size, and normalised with its own
        mean and std. `device` is auto (an accelerator if there is one), cpu, cuda, cuda:1, …
        """
        if pool not in ("token", "mean"):
            raise ValueError(f"pool is {pool!r}; it must be token or mean")
        place = _device(device)
        encoder = self.file.encoder().to(place)
        if pool == "token" and encoder.num_prefix_tokens == 0:
            raise ValueError(f"{self.name} has no class token; use pool='mean'")
        mean = torch.tensor(self.file.mean, device=place).view(-1, 1, 1)
        std = torch.tensor(self.file.std, device=place).view(-1, 1, 1)
        features = []
        for batch in image_batches(images, size=self.file.architecture.image_size, batch_size=batch_size):
            normal = (batch.to(place) - mean) / std
            if self.file.architecture.in_chans == 1:
                normal = normal.mean(dim=1, keepdim=True)  # as in training on grey images
            if pool == "token":
                vectors = encoder(normal)
            else:
                vectors = encoder.forward_features(normal)[:, encoder.num_prefix_tokens :].mean(dim=1)
            features.append(vectors.float().cpu())
        return torch.cat(features)


def load_backbone(
    what: str | Path,
    *,
    encoder: Which | None = None,
    format: str | None = None,
    heads: int | None = None,
    image_size: int | None = None,
) -> Backbone:
    """The encoder that `what` names.

    what: a run's folder (its encoder.safetensors; while the run goes on, or for encoder="momentum", its newest
        checkpoint), a folder or file made by import or export, a checkpoint of another project (imported on the fly,
        see `import_checkpoint` for the other arguments), or `timm:NAME`. A timm name with a tag, such as
        `timm:vit_small_patch16_224.dino`, means pretrained weights from the local cache: nothing is downloaded.
        Without a tag the weights are random, the same ones each time, and `Backbone.name` says so.
    """
    if str(what).startswith("timm:"):
        if encoder or format or heads or image_size:
            raise ValueError(f"{what} takes no encoder, format, heads or image size; its name says all")
        return _timm_model(str(what).removeprefix("timm:"))
    path = Path(what)
    if not path.exists():
        known = timm.list_models("vit_*")
        near = difflib.get_close_matches(str(what).split(".")[0], known, n=1, cutoff=0.8)
        hint = f"; for the timm model write timm:{what if str(what) in known else near[0]}" if near else ""
        raise ValueError(f"{what} does not exist; give a run's folder, a checkpoint file or timm:NAME{hint}")
    name = path.name if path.name not in ("", ".", "..") else path.resolve().name
    if path.is_dir():
        path, unfinished = _file_in(path, encoder)
    else:
        unfinished = False
        name = _name_of(path.absolute())
    file = import_checkpoint(path, format=format, encoder=encoder, heads=heads, image_size=image_size).file
    if encoder == "momentum":
        name += " (momentum)"
    if unfinished:
        name += f" (unfinished, step {file.origin.get('step')})"
    return Backbone(file, name)


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
    checkpoints = sorted((folder / "checkpoints").glob("step-*.pt")) or [
        path for path in [folder / "checkpoints" / "last"] if path.is_file()
    ]
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


def _timm_model(name: str) -> Backbone:
    architecture, _, tag = name.partition(".")
    if not tag:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random = create_encoder(name)
        file = EncoderFile(
            Architecture.of(name, random), random.state_dict(), origin={"format": "timm", "random": True}
        )
        return Backbone(file, f"{name} (random weights)")
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
            f"the weights of {name} are not on this machine, and nothing is downloaded unasked; fetch them once with "
            f"`python -c \"import timm; timm.create_model('{name}', pretrained=True)\"`"
        )
    model = create_encoder(architecture)
    weights = _encoder_part(path, model.state_dict().keys())
    file = EncoderFile(
        Architecture.of(architecture, model),
        weights,
        mean=tuple(cfg.mean),
        std=tuple(cfg.std),
        origin={"format": "timm", "file": name},
    )
    if problems := file.architecture.mismatches(weights):
        raise ValueError(f"{path} does not fit {name} as timm builds it: {problems[0]}")
    return Backbone(file, name)


def _cached(cfg: Any) -> Path | None:
    """timm's own copy of pretrained weights, from the Hugging Face cache or torch's; None when there is none."""
    if cfg.hf_hub_id:
        repository, _, revision = cfg.hf_hub_id.partition("@")
        for filename in (cfg.hf_hub_filename, "model.safetensors", "pytorch_model.bin"):
            if filename:
                found = try_to_load_from_cache(repository, filename, revision=revision or None)
                if isinstance(found, str):
                    return Path(found)
    if cfg.url:
        path = Path(torch.hub.get_dir()) / "checkpoints" / str(cfg.url).rsplit("/", 1)[-1]
        return path if path.is_file() else None
    return None


def _encoder_part(path: Path, wanted: Any) -> dict[str, Tensor]:
    entries, _ = read_entries(path)
    state = entries.get("model", entries.get("state_dict", entries))
    return {name: tensor.float() for name, tensor in state.items() if name in wanted or not name.startswith("head")}


def _device(name: str) -> torch.device:
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} can't be used here; use auto or cpu") from error
    return device
