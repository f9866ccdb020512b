"""encoder.safetensors: a plain timm state dict, with what is needed to rebuild the encoder in its metadata."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchmix.files import replacing
from patchmix.nn.vit import create_encoder

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Architecture:
    """What `create_encoder` needs to rebuild an encoder; tensor shapes do not tell `heads`."""

    name: str
    image_size: int
    patch_size: int
    in_chans: int
    dim: int
    depth: int
    heads: int

    @staticmethod
    def of(name: str, encoder: VisionTransformer) -> Architecture:
        blocks: Any = encoder.blocks
        patch, image = encoder.patch_embed.patch_size, encoder.patch_embed.img_size
        return Architecture(
            name=name,
            image_size=int(image[0]),
            patch_size=int(patch[0]),
            in_chans=int(encoder.patch_embed.proj.in_channels),
            dim=int(encoder.embed_dim),
            depth=len(blocks),
            heads=int(blocks[0].attn.num_heads),
        )

    def create(self, *, drop_path: float = 0.0, any_image_size: bool = False) -> VisionTransformer:
        return create_encoder(**dataclasses.asdict(self), drop_path=drop_path, any_image_size=any_image_size)

    def mismatches(self, weights: Mapping[str, Tensor]) -> list[str]:
        """What keeps `weights` from being loaded, one entry for each name or shape; empty when they fit."""
        with torch.device("meta"):  # shapes only, no memory
            wanted = {name: tuple(tensor.shape) for name, tensor in self.create().state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        missing = [f"{name} is missing" for name in wanted if name not in found]
        unknown = [f"{name} is unknown" for name in found if name not in wanted]
        shapes = [
            f"{name} is {_times(found[name])}, not {_times(wanted[name])}"
            for name in wanted
            if name in found and found[name] != wanted[name]
        ]
        return missing + unknown + shapes


@dataclass(frozen=True)
class EncoderFile:
    """An encoder with all that its users must know. `origin` says where it comes from: recipe, step, data, format."""

    architecture: Architecture
    weights: dict[str, Tensor]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    origin: dict[str, Any] = field(default_factory=dict)

    def encoder(self, *, drop_path: float = 0.0, any_image_size: bool = False) -> VisionTransformer:
        """The timm model with these weights, in evaluation mode."""
        encoder = self.architecture.create(drop_path=drop_path, any_image_size=any_image_size)
        encoder.load_state_dict(self.weights)
        return encoder.eval()

    def digest(self) -> str:
        """SHA-256 over names and values: equal weights have equal digests, wherever they are stored."""
        sha = hashlib.sha256()
        for name in sorted(self.weights):
            tensor = self.weights[name].detach().cpu().contiguous()
            sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            sha.update(tensor.view(-1).view(torch.uint8).numpy().data)
        return sha.hexdigest()

    def save(self, path: Path, *, overwrite: bool = True) -> None:
        """Written to a temporary name, synced, renamed: a crash leaves the old file or the new one."""
        header = {
            "architecture": dataclasses.asdict(self.architecture),
            "mean": self.mean,
            "std": self.std,
            "origin": self.origin,
        }
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.weights.items()}
        with replacing(path, overwrite=overwrite, same=_same_content) as temporary:
            save_file(weights, temporary, metadata={"format": "pt", "patchmix": json.dumps(header)})

    @staticmethod
    def load(path: Path) -> EncoderFile:
        try:
            with safe_open(path, framework="pt") as file:
                metadata: Mapping[str, str] = file.metadata() or {}
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} can't be read as safetensors ({error}); is it complete?") from error
        if "patchmix" not in metadata:
            raise ValueError(f"{path} has no patchmix metadata; bring it in with `patchmix import {path}`")
        try:
            header = json.loads(metadata["patchmix"])
            file_read = EncoderFile(
                architecture=Architecture(**header["architecture"]),
                weights=weights,
                mean=tuple(header["mean"]),
                std=tuple(header["std"]),
                origin=header["origin"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} has damaged patchmix metadata ({error}); write it anew from its run") from error
        if problems := file_read.architecture.mismatches(weights):
            more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise ValueError(f"{path} does not hold the encoder that its metadata says: {problems[0]}{more}")
        return file_read


def _same_content(a: Path, b: Path) -> bool:
    """safetensors writes its metadata in any order, so that equal files may differ in bytes."""
    try:
        left, right = EncoderFile.load(a), EncoderFile.load(b)
    except ValueError:
        return False
    headers_agree = dataclasses.replace(left, weights={}) == dataclasses.replace(right, weights={})
    return headers_agree and left.digest() == right.digest()


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "a number"
