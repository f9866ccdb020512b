"""The settings of every verb: name, type, default and help of each option, once.

`cli.py` makes the command line of them, `patchmix.VERB(...)` the Python keywords. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Generic, Literal

from annotated_types import Ge, Gt, Interval
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg

from patchmix.config import Config, Count, NonNegative, Options, Probability

Weights = Annotated[Positional[str], arg(metavar="WEIGHTS")]
Data = Annotated[Positional[str], arg(metavar="DATA")]
Runs = Annotated[Positional[tuple[str, ...]], arg(metavar="RUN")]
RunSettings = OmitArgPrefixes[Annotated[Config[Options], arg(name="")]]
Json = Annotated[bool, arg(name="json")]
Split = Annotated[Literal["train", "test"] | None, arg(metavar="{train,test}")]
Device = str
Workers = Annotated[int, Ge(0)]
Above0 = Annotated[float, Gt(0)]
Share = Annotated[float, Interval(ge=0, lt=1)]

# ---------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Pretrain(Generic[Options]):
    """Pre-train a ViT on unlabeled images."""

    out: Path  # The run's folder.
    recipe: str = "paper"  # paper, official or demo; `patchmix recipes` lists them.
    config: Path | None = None  # A config.yaml, or a run whose configuration to use, instead of a recipe.
    resume: str | None = None  # auto continues OUT where it stopped; or the path of a checkpoint.
    init_from: str | None = None  # A run or other weights to start from.
    devices: Count | None = None  # Processes to start on this machine, one per GPU; on the CPU they share the cores.
    run: RunSettings[Options] = field(default_factory=Config)


@dataclass(frozen=True)
class Ablate(Generic[Options]):
    """Train and evaluate the rows of one of the paper's ablations, or all methods, into one table."""

    ablation: Positional[Literal["mix", "num-mix", "terms", "epochs", "method"]]
    """The paper's ablations, or method: all methods side by side."""
    out: Path  # A folder for the table and one run per row and seed; the same call continues.
    seeds: tuple[int, ...] = (0,)  # Train every row with each seed.
    rows: tuple[str, ...] = ()  # Some of the rows, by name; by default all.
    row_settings: UseAppendAction[Annotated[tuple[str, ...], arg(name="row-set", metavar="ROW:KEY=VALUE")]] = ()
    """A setting for one row, such as dino:clip_grad=3; may be repeated."""
    test_data: str | None = None  # Labeled images to evaluate on; by default DATA, where it has labels.
    recipe: str = "paper"  # paper, official or demo.
    config: Path | None = None  # A config.yaml, or a run whose configuration to use, instead of a recipe.
    run: RunSettings[Options] = field(default_factory=Config)


@dataclass(frozen=True)
class Demo:
    """Pre-train a small ViT on generated images, evaluate it and draw figures: minutes on a CPU, no data needed."""

    out: Path | None = None  # The run's folder; by default runs/demo-DATE-TIME.
    budget: str = "3min"  # How long to train.


# -------------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Knn:
    """Evaluate an encoder by weighted k-nearest neighbors."""

    weights: Weights  # A run's folder, an encoder.safetensors, another project's checkpoint, or timm:NAME.
    data: str  # Labeled images: a name, class folders, parquet, or shards.
    k: tuple[Count, ...] = ()
    """Numbers of neighbors; by default those of 10, 20, 100, 200 that the data allows (headline 20)."""
    pool: Literal["token", "mean"] = "token"  # The class token, or the mean over patch tokens.
    resize: Count | None = None  # Shorter side before the center crop; the authors' code has 36 for CIFAR.
    encoder: Literal["base", "momentum"] | None = None  # By default the one that the checkpoint's project evaluates.
    device: Device = "auto"  # auto, cpu or cuda.
    workers: Workers = 0  # Processes that load images.
    cache: bool = True  # Keep features on disk, and use those of an earlier evaluation.
    out: Path | None = None  # Folder of results.jsonl; by default the run's folder.


@dataclass(frozen=True)
class Linear:
    """Evaluate an encoder by a linear classifier on its frozen features."""

    weights: Weights  # A run's folder, an encoder.safetensors, another project's checkpoint, or timm:NAME.
    data: str  # Labeled images: a name, class folders, parquet, or shards.
    protocol: Literal["paper", "fast"] = "paper"
    """paper trains with augmentation; fast sweeps classifiers on stored features in seconds."""
    epochs: Above0 | None = None  # By default 100 for paper; for fast it depends on the number of images.
    lr: Above0 | None = None  # Learning rate of the paper's protocol; by default 0.05.
    batch_size: Count | None = None  # By default 256 up to 64 px, 1024 above (paper's protocol).
    pool: Literal["token", "mean"] = "token"  # The class token, or the mean over patch tokens.
    resize: Count | None = None  # Shorter side before the center crop of test images.
    encoder: Literal["base", "momentum"] | None = None  # By default the one that the checkpoint's project evaluates.
    device: Device = "auto"  # auto, cpu or cuda.
    workers: Workers = 2  # Processes that load images.
    seed: int = 0  # Seed of every random number.
    cache: bool = True  # Keep features on disk, and use those of an earlier evaluation.
    out: Path | None = None  # Folder of results.jsonl and checkpoints; by default the run's. The same call resumes.


@dataclass(frozen=True)
class Finetune:
    """Evaluate an encoder by fine-tuning it with labels. The defaults are the authors'."""

    weights: Weights  # A run's folder, an encoder.safetensors, another project's checkpoint, or timm:NAME.
    data: str  # Labeled images: a name, class folders, parquet, or shards.
    epochs: Above0 = 100.0  # Passes over the training images.
    warmup_epochs: NonNegative = 10.0  # Length of the warm-up; at most a tenth of the epochs.
    base_lr: Above0 | None = None  # For a batch of 256; by default 5e-4, and 1e-3 for ViT-T.
    min_lr: NonNegative = 1e-6  # Learning rate at the end.
    batch_size: Annotated[int, Ge(2)] | None = None  # By default 256 up to 64 px, 1024 above.
    weight_decay: NonNegative = 0.05  # AdamW's weight decay.
    layer_decay: Annotated[float, Interval(gt=0, le=1)] = 0.75  # Factor of the learning rate from layer to layer.
    drop_path: Share = 0.1  # Stochastic depth.
    rand_augment: str = "rand-m9-mstd0.5-inc1"  # timm's RandAugment policy.
    erasing: Probability = 0.25  # Probability of random erasing.
    mixup: NonNegative = 0.8  # Alpha of Mixup; 0 is off.
    cutmix: NonNegative = 1.0  # Alpha of CutMix; 0 is off.
    label_smoothing: Share = 0.1  # Label smoothing.
    ema_decay: Share = 0.9999  # Decay of the average of the weights.
    resize: Count | None = None  # Shorter side before the center crop of test images.
    encoder: Literal["base", "momentum"] | None = None  # By default the one that the checkpoint's project evaluates.
    device: Device = "auto"  # auto, cpu or cuda.
    workers: Workers = 2  # Processes that load images.
    seed: int = 0  # Seed of every random number.
    out: Path | None = None
    """Folder of results.jsonl, checkpoints and models; by default the run's. The same call resumes."""


@dataclass(frozen=True)
class Detect:
    """Evaluate an encoder by Mask R-CNN on COCO: object detection and instance segmentation.

    The defaults are the paper's ("as MAE"): FPN, 1024 × 1024 px, 100 epochs; what it leaves open is as in ViTDet.
    """

    weights: Weights
    """An encoder as for knn, or `scratch`. With --eval-only or --predict: a detector, or the folder of one."""
    data: Path | None = None  # A folder with train2017/, val2017/ and annotations/instances_*.json.
    out: Path | None = None  # Folder of results and detector; by default the run's folder.
    eval_only: bool = False  # Evaluate a detector without training.
    predict: tuple[Path, ...] = ()  # Images, or folders of images, to draw boxes and masks on.
    threshold: Probability = 0.5  # Lowest score that is drawn.
    pictures: Annotated[int, Ge(0)] = 8  # How many predictions to draw beside the ground truth.
    model: str = "vit_base_patch16_224"  # The architecture for `scratch`.
    start: Path | None = None  # A detector to go on from, with WEIGHTS = scratch.
    train: str = "train2017"  # Another name than train2017 in the same layout.
    val: str = "val2017"  # Another name than val2017 in the same layout.
    train_images: str | None = None  # A folder below DATA, in any layout.
    train_annotations: str | None = None  # A json below DATA, in any layout.
    val_images: str | None = None  # A folder below DATA, in any layout.
    val_annotations: str | None = None  # A json below DATA, in any layout.
    image_size: Annotated[int, Ge(32)] = 1024  # Side of the padded input.
    patch_size: Literal[4, 8, 16, 32] | None = None  # By default the encoder's own; otherwise resampled.
    window: Annotated[int, Ge(0)] = 16  # Attention window in tokens; 0 is attention over the whole image.
    global_blocks: Annotated[int, Ge(0)] = 4  # Blocks at even depths with attention over the whole image.
    channels: Count = 256  # Channels of the pyramid and the heads.
    head_dim: Count = 1024  # Width of the box head.
    smallest_anchor: Count = 32  # Side of the anchors at stride 4; doubled at each next level.
    epochs: Above0 = 100.0  # Passes over the training images.
    batch_size: Count = 64  # Images per optimizer step, over all processes.
    accumulate: Count = 1  # Micro-batches per optimizer step.
    lr: Above0 = 1e-4  # Learning rate, not scaled with the batch.
    warmup_steps: Annotated[int, Ge(0)] = 250  # Steps of linear warm-up.
    weight_decay: NonNegative = 0.1  # AdamW's weight decay.
    layer_decay: Annotated[float, Interval(gt=0, le=1)] = 0.75  # Factor of the learning rate from layer to layer.
    drop_path: Share = 0.1  # Stochastic depth.
    clip_grad: NonNegative = 0.0  # Largest norm of the gradients; 0 is off.
    scale: tuple[float, float] = (0.1, 2.0)  # Range of large-scale jitter; 1 fits the image to the input.
    flip: bool = True  # Flip half of the images.
    rois_per_image: Annotated[int, Ge(4)] = 512  # Region proposals per image in training.
    recompute: bool = False  # Activation checkpointing: less memory, about a third more time.
    evaluate_every: NonNegative = 10.0  # Epochs between evaluations; 0: at the end only.
    encoder: Literal["base", "momentum"] | None = None  # By default the one that the checkpoint's project evaluates.
    device: Device = "auto"  # auto, cpu or cuda.
    workers: Workers = 2  # Processes that load images.
    seed: int = 0  # Seed of every random number.


@dataclass(frozen=True)
class Embed:
    """Write the feature vector of every image."""

    weights: Weights  # A run's folder, an encoder.safetensors, another project's checkpoint, or timm:NAME.
    data: str  # Images, labeled or not.
    out: Path  # A .parquet (path, label, vector), or a .npy of vectors with paths and labels in a .csv beside it.
    split: Literal["train", "test"] = "train"  # Which part of DATA, where it has parts.
    pool: Literal["token", "mean"] = "token"  # The class token, or the mean over patch tokens.
    resize: Count | None = None  # Shorter side before the center crop.
    encoder: Literal["base", "momentum"] | None = None  # By default the one that the checkpoint's project evaluates.
    device: Device = "auto"  # auto, cpu or cuda.
    workers: Workers = 0  # Processes that load images.


@dataclass(frozen=True)
class Compare:
    """Print the results of runs side by side, with the paper's where the training is the paper's."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")]  # Run folders.


# ------------------------------------------------------------------------------------------------- data and weights


@dataclass(frozen=True)
class Shards:
    """Write data as tar shards with an index, for data that is large or remote."""

    data: Data  # A name, a folder of images, parquet, or other shards.
    out: Path  # The folder to write to; empty, or with the shards of the same call that was interrupted.
    split: Split = None  # One split only; by default all.
    shard_size: str | None = None  # Approximate size of a shard; by default 256MB.
    per_shard: Count | None = None  # Images per shard, instead.
    workers: Count = 4  # Shards that are written at a time.
    quality: Annotated[int, Interval(ge=1, le=100)] | None = None
    """Write JPEG of this quality; by default files keep their bytes, and generated images become PNG."""
    shuffle: bool = True  # Write in a random order, which training from shards needs.


@dataclass(frozen=True)
class Import:
    """Import another project's encoder; afterwards every command works on OUT as on a run."""

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """Of the authors' PatchMix, MoCo v3, DINO, iBOT, MAE, timm or torchvision."""
    out: Path  # A folder for encoder.safetensors.
    format: str | None = None
    """patchmix-authors, mocov3, dino, ibot, mae, timm or torchvision; by default found by its keys."""
    encoder: Literal["base", "momentum"] | None = None  # By default the one that the checkpoint's project evaluates.
    heads: Count | None = None  # Attention heads, which the tensors do not show; needed for unusual widths.
    image_size: Count | None = None  # By default found from the position embedding; interpolated if another.
    overwrite: bool = False  # Replace what OUT holds.


@dataclass(frozen=True)
class Export:
    """Write an encoder for another program, and print the lines that open it there."""

    weights: Weights  # A run's folder, an encoder.safetensors, another project's checkpoint, or timm:NAME.
    out: Path  # A file, or a folder for huggingface.
    format: Literal["timm", "torchvision", "huggingface", "onnx"] = "timm"  # What to write.
    encoder: Literal["base", "momentum"] | None = None  # By default the one that the checkpoint's project evaluates.
    overwrite: bool = False  # Replace what is there.


# ------------------------------------------------------------------------------------------------ figures and report


@dataclass(frozen=True)
class ShowMix:
    """Draw originals and their mixes, every patch framed in the color of its original."""

    data: Data  # As for pretrain.
    out: Path = Path("mix.png")  # A .png, .svg or .pdf; the target matrices go beside it, as NAME-targets.
    mix: str = "patchmix"  # patchmix, mixup, cutmix, cutmix+mixup, resizemix or regionswap.
    num_mix: Count = 3  # Images per mix, M.
    patch_size: Count = 8  # Side of a patch in pixels of the picture.
    size: Count = 64  # Side of the center crop that is drawn.
    images: Count = 6  # How many images of DATA.
    seed: int = 0  # Seed of the mix.


@dataclass(frozen=True)
class ShowCurves:
    """Draw losses between floor and chance, kNN, rank, rates and speed of one or several runs."""

    runs: Runs  # Run folders.
    out: Path = Path("curves.png")  # A .png, .svg or .pdf.
    axis: Literal["epochs", "images", "hours", "flops"] = "epochs"  # What the horizontal axis counts.
    smoothing: Probability = 0.0  # From 0 to 1.


@dataclass(frozen=True)
class ShowSimilarity:
    """Draw how similar some images are to one or several encoders (the paper's similarity figure)."""

    runs: Runs  # Run folders, encoder files or timm:NAME.
    data: str  # The images to compare.
    out: Path = Path("similarity.png")  # A .png, .svg or .pdf.
    query: tuple[str, ...] = ()  # Paths or positions of query images; by default some of different classes.
    key: tuple[int, ...] = ()
    """Positions of images to compare with; by default one of the same class, two of a related one, and others."""
    related: int | None = None  # The class that counts as related; by default the nearest.
    queries: Count = 3  # How many, where none are named.
    images: Count = 1000  # Read at most this many of DATA.
    device: Device = "auto"  # auto, cpu or cuda.


@dataclass(frozen=True)
class ShowAttention:
    """Draw the attention of the class token, one map per head."""

    runs: Runs  # Run folders, encoder files or timm:NAME.
    data: str | None = None  # The images.
    image: tuple[Path, ...] = ()  # Image files instead of DATA.
    out: Path = Path("attention.png")  # A .png, .svg or .pdf.
    block: int = -1  # 0 is the first, -1 the last.
    images: Count = 3  # How many images of DATA.
    position: tuple[int, ...] = ()  # Which images of DATA instead.
    size: Count | None = None  # Side of the input in pixels; a larger one gives finer maps.
    device: Device = "cpu"  # cpu or cuda.


@dataclass(frozen=True)
class ShowNeighbors:
    """Draw the nearest neighbors of some query images."""

    runs: Runs  # Run folders, encoder files or timm:NAME.
    data: str  # The images to search.
    out: Path = Path("neighbors.png")  # A .png, .svg or .pdf.
    query: tuple[str, ...] = ()  # Paths or positions of query images; by default some of different classes.
    queries: Count = 5  # How many, where none are named.
    k: Count = 8  # Neighbors of each query.
    images: Count = 2000  # Read at most this many of DATA.
    device: Device = "auto"  # auto, cpu or cuda.


@dataclass(frozen=True)
class ShowMap:
    """Draw the features in two dimensions (PCA), with thumbnails."""

    runs: Runs  # Run folders, encoder files or timm:NAME.
    data: str  # The images.
    out: Path = Path("map.png")  # A .png, .svg or .pdf.
    images: Count = 300  # At most this many.
    device: Device = "auto"  # auto, cpu or cuda.


@dataclass(frozen=True)
class Report:
    """Write one HTML file about runs: summary, curves, evaluations, figures, and an explorer of neighbors."""

    runs: Runs  # Run folders; for comparison also encoder files and timm:NAME.
    out: Path | None = None  # The file; by default report.html in the first run's folder.
    data: str | None = None  # The images of the explorer; by default the first run's.
    images: Annotated[int, Ge(0)] = 2000  # At most this many in the explorer; 0 leaves pictures out.
    device: Device = "auto"  # auto, cpu or cuda.
    workers: Workers = 0  # Processes that load images.


# -------------------------------------------------------------------------------------------------------- the machine


@dataclass(frozen=True)
class Recipes:
    """List the recipes, what they cost and what the paper reports for them."""


@dataclass(frozen=True)
class Flops:
    """Print parameters and FLOPs of one training iteration, beside the paper's."""

    method: str | None = None  # As for pretrain; by default all.
    model: str | None = None  # vit_{tiny,small,base}_patchP_S; by default the paper's for CIFAR.
    batch: Count = 2  # Images in the iteration; the paper's table has 2.
    image_size: Count | None = None  # Other than the model's.
    local_crops: Annotated[int, Ge(0)] | None = None  # Small crops for multi-crop.
    local_size: Count | None = None  # Side of the small crops.
    count: bool = False  # Add what torch counts, on tensors without values: seconds per row.


@dataclass(frozen=True)
class Bench(Generic[Options]):
    """Measure how fast a model trains here: images per second, share of the machine's best, phases, memory."""

    recipe: str = "paper"  # paper, official or demo.
    config: Path | None = None  # A config.yaml, or a run whose configuration to use, instead of a recipe.
    steps: Count = 5  # Steps to measure, after one to warm up.
    as_json: Json = False  # JSON instead of a table.
    run: RunSettings[Options] = field(default_factory=Config)


@dataclass(frozen=True)
class Doctor:
    """Report what is active on this machine, and what would make runs faster."""

    runs: Path = Path("runs")  # Where runs are going to be written.
    as_json: Json = False  # JSON instead of a table.
