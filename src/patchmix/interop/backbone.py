"""A backbone: an encoder's weights with all that their users must know. N: images, S: the encoder's image size."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed, resample_patch_embed  # type: ignore[attr-defined]
from timm.models import adapt_input_conv
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchmix.data import IMAGENET_MEAN, IMAGENET_STD
from patchmix.data.decode import Pixels, as_pixels, pixel_channels, read_image
from patchmix.data.python import pixels_of
from patchmix.data.views import CenterCrop, as_channels, to_float, usual_resize
from patchmix.device import resolve_device
from patchmix.files import replacing
from patchmix.nn.tokens import class_tokens
from patchmix.nn.vit import ConvStem, create_encoder

AnyImage = Image.Image | str | Path | Tensor | npt.NDArray[Any]
Images = Tensor | npt.NDArray[Any] | Sequence[AnyImage] | str | Path
Pool = Literal["token", "mean"]

# What timm's `create_model` calls the sizes of an Architecture.
TIMM_ARGUMENTS = {"img_size": "image_size", "patch_size": "patch_size", "in_chans": "in_chans"}
TIMM_ARGUMENTS |= {"embed_dim": "dim", "depth": "depth", "num_heads": "heads"}


@dataclass(frozen=True)
class Architecture:
    """What `create_encoder` needs to rebuild an encoder; tensor shapes do not show `heads`."""

    name: str
    image_size: int
    patch_size: int
    in_chans: int
    dim: int
    depth: int
    heads: int
    stem: str = "patch"

    def __post_init__(self) -> None:
        _, *numbers, stem = dataclasses.astuple(self)
        if stem not in ("patch", "conv"):
            raise ValueError(f"{self} has a stem that is neither patch nor conv")
        if any(type(number) is not int or number < 1 for number in numbers):
            raise ValueError(f"{self} has sizes that are not whole numbers above 0")

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @staticmethod
    def of(name: str, encoder: VisionTransformer) -> "Architecture":
        blocks: Any = encoder.blocks
        return Architecture(
            name=name,
            image_size=encoder.patch_embed.img_size[0],
            patch_size=encoder.patch_embed.patch_size[0],
            in_chans=encoder.patch_embed.proj.in_channels,
            dim=encoder.embed_dim,
            depth=len(blocks),
            heads=blocks[0].attn.num_heads,
            stem="conv" if isinstance(encoder.patch_embed.proj, ConvStem) else "patch",
        )

    def create(self, *, drop_path: float = 0.0, any_image_size: bool = False) -> VisionTransformer:
        return create_encoder(**vars(self), drop_path=drop_path, any_image_size=any_image_size)

    def check(self, weights: Mapping[str, Tensor], complaint: str) -> None:
        """A ValueError unless all names and shapes are those of this architecture, and all numbers finite."""
        if self.depth > len(weights):  # before a damaged file makes us build a million blocks
            raise ValueError(f"{complaint}: {len(weights)} tensors are too few for depth {self.depth}")
        with torch.device("meta"):  # shapes only, no memory
            check_weights(weights, self.create().state_dict(), complaint)
        if broken := [name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())]:
            raise ValueError(f"NaN or infinite weights in {first_of(broken)}; use an earlier checkpoint")


@dataclass(frozen=True)
class Backbone:
    """An encoder that is ready to use. `origin` says where it comes from: recipe, step, data, format.

    `name` is short, for tables; `load_backbone` sets it, and files do not keep it.
    """

    architecture: Architecture
    weights: dict[str, Tensor]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    origin: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def encoder(self, *, drop_path: float = 0.0, any_image_size: bool = False) -> VisionTransformer:
        """The timm model with these weights, in evaluation mode."""
        encoder = self.architecture.create(drop_path=drop_path, any_image_size=any_image_size)
        encoder.load_state_dict(self.weights)
        return encoder.eval()

    @torch.inference_mode()
    def embed(self, images: Images, *, pool: Pool = "token", batch_size: int = 256, device: str = "auto") -> Tensor:
        """Features (N, dim), float32 on the CPU: the class token, or the mean over patch tokens.

        images: a tensor or array (N, C, H, W) or (N, H, W, C) of uint8, uint16 or floats in [0, 1], or a list of PIL
        images, files and arrays (H, W, C). C is 3 for encoders of 1 or 3 channels. They are resized and center-cropped
        as in evaluation (above 64 px with a margin of 8/7), and normalized with the encoder's own mean and std.
        `device` is auto, cpu, cuda, cuda:1, …
        """
        if pool not in ("token", "mean"):
            raise ValueError(f"pool is {pool!r}; it must be token or mean")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if isinstance(images, str | Path):
            images = [images]
        if len(images) == 0:
            raise ValueError("there are no images to embed; give at least one")
        if isinstance(images, Tensor | np.ndarray) and images.ndim != 4:
            raise ValueError(f"images have shape {tuple(images.shape)}; expected (N, C, H, W) or (N, H, W, C)")
        target, size = resolve_device(device), self.architecture.image_size
        crop = CenterCrop(size, resize=usual_resize(size))
        encoder, channels = self.encoder().to(target), pixel_channels(self.architecture.in_chans)
        features = []
        for start in range(0, len(images), batch_size):
            pixels = [_pixels(image, channels) for image in images[start : start + batch_size]]
            (views,) = crop(pixels, epoch=0, indices=np.arange(len(pixels)))
            batch = to_float(torch.from_numpy(views).to(target), self.mean, self.std)
            features.append(pooled(encoder, batch, pool).float().cpu())
        return torch.cat(features)

    def digest(self) -> str:
        """SHA-256 over names and values: equal weights have equal digests, wherever they are stored."""
        return digest(self.weights)

    def save(self, path: Path) -> None:
        """Writes encoder.safetensors: a plain timm state dict, and in its metadata what `load_backbone` needs."""
        save_weights(self.weights, path, self.metadata())

    def metadata(self) -> dict[str, str]:
        """All but the weights, for a safetensors file."""
        header = {"architecture": vars(self.architecture), "mean": self.mean, "std": self.std, "origin": self.origin}
        return {"patchmix": json.dumps(header)}

    @staticmethod
    def from_metadata(header: str, weights: dict[str, Tensor]) -> "Backbone":
        """The reverse of `metadata`; weights have timm's names."""
        try:
            entries = json.loads(header)
            mean, std = (tuple(map(float, entries[key])) for key in ("mean", "std"))
            backbone = Backbone(Architecture(**entries["architecture"]), weights, mean, std, dict(entries["origin"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"damaged patchmix metadata ({error}); export it again from its run") from error
        backbone.architecture.check(weights, "this is not the encoder that the metadata describes")
        return backbone


def check_weights(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor], complaint: str) -> None:
    """A ValueError that begins with `complaint` unless names and shapes are those of `wanted`."""
    problems = [f"{name} is missing" for name in wanted if name not in weights]
    problems += [f"{name} is unknown" for name in weights if name not in wanted]
    problems += [
        f"{name} is {_times(weights[name])}, not {_times(tensor)}"
        for name, tensor in wanted.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if problems:
        raise ValueError(f"{complaint}: {first_of(problems)}")


def fitted(weights: Mapping[str, Tensor], encoder: VisionTransformer) -> dict[str, Tensor]:
    """Weights for an encoder of another image size, patch size or number of channels, converted as timm does it."""
    weights, wanted = dict(weights), encoder.state_dict()
    names = {"patch_embed.proj.weight", "patch_embed.proj.0.weight"}  # of a patch projection, of a ConvStem
    for name in names & weights.keys() & wanted.keys():
        kernel, (_, in_chans, rows, columns) = weights[name], wanted[name].shape
        if kernel.shape[1] != in_chans:
            if kernel.shape[1] != 3:
                raise ValueError(f"the weights take {kernel.shape[1]} channels, which can't become {in_chans}; 3 can")
            kernel = adapt_input_conv(in_chans, kernel)
        weights[name] = resample_patch_embed(kernel, [rows, columns])
    positions, expected = weights.get("pos_embed"), wanted.get("pos_embed")
    if positions is not None and expected is not None and positions.shape[1] != expected.shape[1]:
        prefix = expected.shape[1] - encoder.patch_embed.num_patches
        grid = list(encoder.patch_embed.grid_size)
        weights["pos_embed"] = resample_abs_pos_embed(positions, grid, num_prefix_tokens=prefix)
    return weights


def first_of(names: Sequence[str]) -> str:
    """The first three, for a message."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def digest(weights: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def save_weights(weights: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Written to a temporary name, synced, renamed: a crash leaves the old safetensors file or the new one."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", **metadata})


def _times(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape)) or "a number"


def pooled(encoder: nn.Module, images: Tensor, pool: str) -> Tensor:
    """(N, 3, H, W) → (N, D): the class token or the mean over patch tokens; gray images for encoders of gray ones."""
    if isinstance(encoder, VisionTransformer | Eva):
        images = as_channels(images, int(encoder.patch_embed.proj.in_channels))
    if pool == "token":
        return class_tokens(encoder, images)
    assert isinstance(encoder, VisionTransformer | Eva), "the mean over patch tokens needs a timm ViT"
    tokens: Tensor = encoder.forward_features(images)
    return tokens[:, encoder.num_prefix_tokens :].mean(dim=1)


def _pixels(image: AnyImage, channels: int) -> Pixels:
    if isinstance(image, str | Path):
        try:
            return read_image(Path(image).read_bytes(), str(image), channels)
        except OSError as error:
            raise ValueError(f"{image} can't be read ({error.strerror}); give the path of an image") from error
    if isinstance(image, Image.Image):
        image = pixels_of(image)
    if isinstance(image, Tensor):
        image = (image.float() if image.is_floating_point() else image).cpu().numpy()
    return as_pixels(np.asarray(image), "an image", channels)
