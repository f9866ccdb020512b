"""All that can be chosen about a detector and its training; the defaults are the paper's setting where it is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from patchmix.nn.pyramid import PyramidName


@dataclass(frozen=True)
class Shape:
    """What a detector's weights depend on, and how images come in; stored with the weights."""

    pyramid: PyramidName = "fpn"
    image_size: int = 1024
    patch_size: int | None = None
    window: int = 16
    global_blocks: int = 4
    channels: int = 256
    head_dim: int = 1024
    smallest_anchor: int = 32


@dataclass(frozen=True)
class DetectSettings:
    """The paper's transfer to COCO "as MAE": Mask R-CNN with FPN, 1024 × 1024 px, 100 epochs.

    What the paper leaves open is as in MAE's benchmark and its successor ViTDet: batch 64, AdamW, large-scale jitter.
    `lr` is for `batch_size` images and is not scaled with it. A detector's `window` is in tokens; 0 is attention over
    the whole image in all blocks, otherwise `global_blocks` blocks at even depths have it. `patch_size` resamples the
    patch embedding, for encoders whose patches are not 4, 8, 16 or 32 px.
    """

    pyramid: PyramidName = "fpn"
    image_size: int = 1024
    patch_size: int | None = None  # None: the encoder's own
    window: int = 16
    global_blocks: int = 4
    channels: int = 256  # of every map of the pyramid and of the heads
    head_dim: int = 1024
    smallest_anchor: int = 32  # px on the canvas, at stride 4; each next level has twice that

    epochs: float = 100.0
    batch_size: int = 64
    accumulate: int = 1
    lr: float = 1e-4
    schedule: Literal["cosine", "step"] = "cosine"
    warmup_steps: int = 250
    weight_decay: float = 0.1
    layer_decay: float = 0.75
    drop_path: float = 0.1
    clip_grad: float = 0.0  # 0 is off
    scale: tuple[float, float] = (0.1, 2.0)  # of large-scale jitter; 1 fits the image to the canvas
    flip: bool = True
    keep_empty: bool = False  # also train on images without objects
    rois_per_image: int = 512
    recompute: bool = False  # activation checkpointing: less memory, about a third more time
    evaluate_every: float = 10.0  # epochs; 0: at the end only
    eval_batch_size: int = 1  # in each process
    seed: int = 0

    def check(self) -> None:
        unit = 32 if self.patch_size is None else max(32, self.patch_size)
        low, high = self.scale
        rules = [
            ("pyramid", self.pyramid in ("fpn", "simple"), "fpn or simple"),
            ("image_size", self.image_size >= 32 and self.image_size % unit == 0, f"a multiple of {unit}"),
            ("patch_size", self.patch_size in (None, 4, 8, 16, 32), "4, 8, 16 or 32, or left out"),
            ("window", self.window >= 0, "at least 0; 0 is attention over the whole image"),
            ("global_blocks", self.global_blocks >= 0, "at least 0"),
            ("channels", self.channels >= 1, "at least 1"),
            ("head_dim", self.head_dim >= 1, "at least 1"),
            ("smallest_anchor", self.smallest_anchor >= 1, "at least 1"),
            ("epochs", self.epochs > 0, "above 0"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("accumulate", self.accumulate >= 1, "at least 1"),
            ("lr", self.lr > 0, "above 0"),
            ("schedule", self.schedule in ("cosine", "step"), "cosine or step"),
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("layer_decay", 0 < self.layer_decay <= 1, "in (0, 1]; 1 trains all layers alike"),
            ("drop_path", 0 <= self.drop_path < 1, "in [0, 1)"),
            ("clip_grad", self.clip_grad >= 0, "at least 0; 0 is off"),
            ("scale", 0 < low <= high <= 4, "two factors, 0 < low ≤ high ≤ 4"),
            ("rois_per_image", self.rois_per_image >= 4, "at least 4"),
            ("evaluate_every", self.evaluate_every >= 0, "at least 0; 0 is at the end only"),
            ("eval_batch_size", self.eval_batch_size >= 1, "at least 1"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {rule}")

    def shape(self) -> Shape:
        return Shape(**{field.name: getattr(self, field.name) for field in fields(Shape)})

    def told(self) -> dict[str, Any]:
        """As plain data: what is stored with results and checkpoints."""
        return asdict(self) | {"scale": list(self.scale)}
