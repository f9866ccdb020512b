"""detector.safetensors: a detector's weights, with what is needed to rebuild and use it in its metadata."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from patchmix.evaluate.detection.coco import Category
from patchmix.evaluate.detection.model import Detector, build_detector
from patchmix.evaluate.detection.settings import Shape
from patchmix.files import replacing
from patchmix.interop.backbone import Architecture, digest
from patchmix.interop.importing import read_entries

FILE = "detector.safetensors"
_METADATA = "patchmix-detector"


@dataclass(frozen=True)
class DetectorFile:
    """A detector with all that its users must know. `origin` says where its encoder comes from."""

    architecture: Architecture
    shape: Shape
    categories: tuple[Category, ...]
    weights: dict[str, Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    origin: dict[str, Any] = field(default_factory=dict)

    def detector(self) -> Detector:
        """The network with these weights, in evaluation mode."""
        detector = build_detector(self.architecture, len(self.categories), self.shape)
        detector.load_state_dict(self.weights)
        return detector.eval()

    def digest(self) -> str:
        """SHA-256 over names and values."""
        return digest(self.weights)

    def header(self) -> dict[str, Any]:
        """All but the weights, as plain data."""
        return {
            "architecture": dataclasses.asdict(self.architecture),
            "shape": dataclasses.asdict(self.shape),
            "categories": [dataclasses.asdict(category) for category in self.categories],
            "mean": list(self.mean),
            "std": list(self.std),
            "origin": self.origin,
        }

    def save(self, path: Path) -> None:
        """Written to a temporary name, then renamed."""
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.weights.items()}
        with replacing(path) as temporary:
            save_file(weights, temporary, metadata={"format": "pt", _METADATA: json.dumps(self.header())})


def load_detector(path: Path) -> DetectorFile:
    """From detector.safetensors, from the folder that `detect` left, or from a checkpoint of its training (.pt)."""
    file = _file_in(path) if path.is_dir() else path
    entries, metadata = read_entries(file)
    if _METADATA in metadata:
        header, weights = metadata[_METADATA], entries
    elif isinstance(entries.get("identity"), dict) and "detector" in entries["identity"]:
        header = entries["identity"]["detector"]
        prefix = "encoder."  # the detector is what the training method calls its encoder
        weights = {
            name.removeprefix(prefix): tensor for name, tensor in entries["method"].items() if name.startswith(prefix)
        }
    else:
        raise ValueError(f"{file} is not a detector; give a {FILE} or a checkpoint that `patchmix detect` wrote")
    try:
        parsed = json.loads(header)
        found = DetectorFile(
            Architecture(**parsed["architecture"]),
            Shape(**parsed["shape"]),
            tuple(Category(**category) for category in parsed["categories"]),
            weights,
            tuple(parsed["mean"]),
            tuple(parsed["std"]),
            parsed["origin"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} has damaged metadata ({error}); take another checkpoint of its training") from error
    _check_weights(found, file)
    return found


def _check_weights(found: DetectorFile, file: Path) -> None:
    with torch.device("meta"):
        wanted = build_detector(found.architecture, len(found.categories), found.shape).state_dict()
    for name, tensor in wanted.items():
        if name not in found.weights:
            raise ValueError(f"{file} does not hold the detector that its metadata says: {name} is missing")
        if found.weights[name].shape != tensor.shape:
            shapes = f"{tuple(found.weights[name].shape)}, not {tuple(tensor.shape)}"
            raise ValueError(f"{file} does not hold the detector that its metadata says: {name} is {shapes}")
    if unknown := sorted(set(found.weights) - set(wanted)):
        raise ValueError(f"{file} does not hold the detector that its metadata says: {unknown[0]} is unknown")


def _file_in(folder: Path) -> Path:
    """detector.safetensors there or in the newest folder below it; else the newest checkpoint."""
    finished = [folder / FILE, *folder.glob(f"detect-*/{FILE}")]
    unfinished = [*folder.glob("checkpoints/step-*.pt"), *folder.glob("detect-*/checkpoints/step-*.pt")]
    for group in (finished, unfinished):
        if present := [path for path in group if path.is_file()]:
            return max(present, key=lambda path: path.stat().st_mtime)
    raise ValueError(f"{folder} holds no detector; train one with `patchmix detect`")
