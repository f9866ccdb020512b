"""encoder.safetensors: a plain timm state dict, with what is needed to rebuild the encoder in its metadata."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

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
        patch, image = encoder.patch_embed.patch_size, encoder.patch_embed.img_size
        return Architecture(
            name=name,
            image_size=int(image[0]),
            patch_size=int(patch[0]),
            in_chans=int(encoder.patch_embed.proj.in_channels),
            dim=int(encoder.embed_dim),
            depth=len(encoder.blocks),
            heads=int(encoder.blocks[0].attn.num_heads),
        )

    def create(self, *, drop_path: float = 0.0, any_image_size: bool = False) -> VisionTransformer:
        return create_encoder(**dataclasses.asdict(self), drop_path=drop_path, any_image_size=any_image_size)


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

    def save(self, path: Path) -> None:
        """Written to a temporary name, synced, renamed: a crash leaves the old file or the new one."""
        header = {
            "architecture": dataclasses.asdict(self.architecture),
            "mean": self.mean,
            "std": self.std,
            "origin": self.origin,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.weights.items()}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            save_file(weights, temporary, metadata={"format": "pt", "patchmix": json.dumps(header)})
            with open(temporary, "rb") as file:  # noqa: PTH123
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())  # noqa: PTH101
            os.replace(temporary, path)  # noqa: PTH105
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

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
        header = json.loads(metadata["patchmix"])
        return EncoderFile(
            architecture=Architecture(**header["architecture"]),
            weights=weights,
            mean=tuple(header["mean"]),
            std=tuple(header["std"]),
            origin=header["origin"],
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
