"""The settings of every verb: name, type, default and help of each option, once.

`cli.py` makes the command line of them, `patchmix.VERB(...)` the Python keywords. No torch here.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Generic, Literal

from annotated_types import Ge, Interval
from tyro.conf import OmitArgPrefixes, Positional, Suppress, UseAppendAction, arg

from patchmix.config import Above0, Config, Options, Share
from patchmix.methods.options import Count, Fraction, MixName, NonNegative

Weights = Annotated[Positional[str], arg(metavar="WEIGHTS")]
Data = Annotated[Positional[str], arg(metavar="DATA")]
Runs = Annotated[Positional[tuple[str, ...]], arg(metavar="RUN")]
RunSettings = OmitArgPrefixes[Annotated[Config[Options], arg(name="")]]
Split = Annotated[Literal["train", "test"] | None, arg(metavar="{train,test}")]
Workers = Annotated[int, Ge(0)]


@dataclass(frozen=True)
class Pretrain(Generic[Options]):
    """Pre-train a ViT on unlabeled images."""

    out: Path  # The run's folder.
    recipe: str = "paper"  # Recipe: paper, official, fast or demo; `patchmix recipes` lists them.
    config: Path | None = None  # A config.yaml, or a run with one, to use instead of a recipe.
    resume: str | None = None  # Checkpoint to continue from, or auto for the last one in OUT.
    devices: Count | None = None  # Processes on this machine, one per GPU or sharing the CPU cores; by default 1.
    run: RunSettings[Options] = field(default_factory=Config)


@dataclass(frozen=True)
class OfWeights:
    """What commands for existing weights take."""

    weights: Weights  # Run folder, encoder.safetensors, checkpoint of another project, timm:NAME or hf://USER/NAME.


@dataclass(frozen=True)
class Adapt(Pretrain[Options], OfWeights):
    """Continue pre-training from existing weights on your images."""

    recipe: str = "adapt"  # Recipe, as for pretrain.


@dataclass(frozen=True)
class Ablate(Generic[Options]):
    """Train and evaluate every row of one of the paper's ablations, or every method, in one table."""

    ablation: Positional[Literal["mix", "num-mix", "terms", "epochs", "method"]]
    """One of the paper's ablations, or method: all methods in one table."""
    out: Path  # Folder for the table and one run per row and seed. The same call resumes.
    seeds: tuple[int, ...] = (0,)  # Seeds to train every row with.
    rows: tuple[str, ...] = ()  # Names of the rows to train; by default all.
    row_settings: UseAppendAction[Annotated[tuple[str, ...], arg(name="row-set", metavar="ROW:KEY=VALUE")]] = ()
    """Setting of one row, such as dino:clip_grad=3; may be repeated."""
    test_data: str | None = None  # Labeled images to evaluate on; by default DATA, if it has labels.
    recipe: str = "paper"  # Recipe, as for pretrain.
    config: Path | None = None  # A config.yaml, or a run with one, to use instead of a recipe.
    given: Suppress[tuple[str, ...]] = ()  # the settings of `run` that the call names, for rows with other defaults
    run: RunSettings[Options] = field(default_factory=Config)


@dataclass(frozen=True)
class Demo:
    """Pre-train a small ViT on generated images, evaluate it and draw figures: minutes on a CPU, no data needed."""

    out: Path | None = None  # The run's folder; by default runs/demo-DATE-TIME. The same call resumes.
    budget: str = "3min"  # Training time, such as 90s or 1h; the evaluation comes on top.


@dataclass(frozen=True)
class FewLabels(OfWeights):
    """What evaluations on labeled images take; they can also be done with few labels."""

    data: str  # Labeled images: a name, class folders, parquet, or shards.
    resize: Count | None = None
    """Pixels of the shorter side before the center crop; by default the image size, above 64 px 8/7 of it."""
    encoder: Literal["base", "momentum"] | None = None  # Encoder; by default base for runs, else its project's choice.
    device: str = "auto"  # Device: auto, cpu or cuda.
    workers: Workers = 2  # Processes that load images.
    out: Path | None = None  # Folder for results and trained weights; by default the run's. The same call resumes.
    shots: Count | None = None  # Labeled images per class, drawn at random; by default all.
    fraction: Annotated[float, Interval(gt=0, lt=1)] | None = None
    """Share of each class's labeled images, drawn at random, instead of --shots."""
    draws: Count = 5  # Random draws of --shots or --fraction; the result is their mean.
    seed: int = 0  # Random seed.


@dataclass(frozen=True)
class Knn(FewLabels):
    """Evaluate an encoder by weighted k-nearest neighbors."""

    k: tuple[Count, ...] = ()
    """Numbers of neighbors; by default 10, 20, 100 and 200 as far as possible. The headline is 20, or the first."""
    layers: tuple[Literal["all"] | Count, ...] = ()  # Blocks whose features are also evaluated, or all; 1 is the first.
    pool: Literal["token", "mean", "pixels"] = "token"
    """The class token, the mean over patch tokens, or for comparison the pixels at 16 × 16 px."""
    workers: Workers = 0  # Processes that load images.
    cache: bool = True  # Keep features on disk and reuse them.


@dataclass(frozen=True)
class Linear(FewLabels):
    """Evaluate an encoder by a linear classifier on its frozen features."""

    protocol: Literal["paper", "fast"] = "paper"
    """The paper's protocol with augmentation, or a fast sweep of classifiers on stored features."""
    epochs: Above0 | None = None  # Epochs; by default 100 for paper, and as many as the data needs for fast.
    base_lr: Above0 | None = None
    """Learning rate of the paper's protocol for a batch of 256; by default 0.05, 0.02 and 0.01 for ViT-T, -S and -B."""
    batch_size: Count | None = None  # Batch size of the paper's protocol; by default 256 up to 64 px, 1024 above.
    pool: Literal["token", "mean", "attentive", "pixels"] = "token"
    """The class token or the mean of patch tokens; with fast also attentive (a learned query), or 16 × 16 pixels."""
    cache: bool = True  # Keep features on disk and reuse them.


@dataclass(frozen=True)
class Finetune(FewLabels):
    """Evaluate an encoder by fine-tuning it with labels. The defaults are the authors'."""

    epochs: Above0 = 100.0  # Passes over the training images.
    warmup_epochs: NonNegative = 10.0  # Epochs of warm-up; at most a tenth of all.
    base_lr: Above0 | None = None  # Learning rate for a batch of 256; by default 5e-4, for ViT-T 1e-3.
    min_lr: NonNegative = 1e-5  # Learning rate at the end.
    lr_per_epoch: bool = False  # Change the learning rate once per epoch, as the authors do.
    batch_size: Annotated[int, Ge(2)] | None = None  # Batch size; by default 256 up to 64 px, 1024 above.
    weight_decay: NonNegative = 0.05  # AdamW's weight decay.
    layer_decay: Annotated[float, Interval(gt=0, le=1)] = 0.75  # Layer-wise decay of the learning rate.
    drop_path: Share = 0.1  # Stochastic depth rate.
    rand_augment: str = "rand-m9-mstd0.5-inc1"  # RandAugment policy in timm's notation; for RGB and grayscale only.
    erasing: Fraction = 0.25  # Probability of random erasing.
    mixup: NonNegative = 0.8  # Alpha of Mixup; 0 is off.
    cutmix: NonNegative = 1.0  # Alpha of CutMix; 0 is off.
    label_smoothing: Share = 0.1  # Label smoothing.
    ema_decay: Share = 0.99996  # Decay of the moving average of the weights.


@dataclass(frozen=True)
class Detect:
    """Evaluate an encoder by Mask R-CNN on COCO: object detection and instance segmentation.

    The defaults are the paper's ("as MAE"): FPN, 1024 × 1024 px, 100 epochs; the rest is as in ViTDet.
    """

    weights: Weights
    """An encoder as for knn, or `scratch`. With --eval-only or --predict: a detector, or the folder of one."""
    data: Path | None = None  # A folder with train2017/, val2017/ and annotations/instances_*.json.
    out: Path | None = None  # Folder of results and detector; by default the run's folder.
    eval_only: bool = False  # Evaluate a detector without training; detections go to OUT, or to evaluated/ in the run.
    predict: tuple[Path, ...] = ()
    """Images, or folders of images, to draw boxes and masks on; pictures go to OUT, or to predictions/ in the run."""
    threshold: Fraction = 0.5  # Lowest score that is drawn.
    pictures: Annotated[int, Ge(0)] = 8  # Number of predictions to draw next to the ground truth.
    model: str = "vit_base_patch16_224"  # The architecture for `scratch`.
    start: Path | None = None  # Detector to start from, with WEIGHTS = scratch.
    train: str = "train2017"  # Training split: a folder of images, with annotations/instances_NAME.json.
    val: str = "val2017"  # Validation split, likewise.
    image_size: Annotated[int, Ge(32)] = 1024  # Side of the padded input in pixels.
    patch_size: Literal[4, 8, 16, 32] | None = None  # Patch size to resample to; by default the encoder's own.
    window: Annotated[int, Ge(0)] = 16  # Attention window in tokens; 0 is attention over the whole image.
    global_blocks: Annotated[int, Ge(0)] = 4  # Blocks at even depths with attention over the whole image.
    channels: Count = 256  # Channels of the pyramid and the heads.
    head_dim: Count = 1024  # Width of the box head.
    smallest_anchor: Count = 32  # Side in pixels of the anchors at stride 4, doubled at each level.
    epochs: Above0 = 100.0  # Passes over the training images.
    batch_size: Count = 64  # Images per optimizer step, over all processes.
    accumulate: Count = 1  # Micro-batches per optimizer step.
    lr: Above0 = 1e-4  # Learning rate, not scaled with the batch.
    warmup_steps: Annotated[int, Ge(0)] = 250  # Steps of linear warm-up.
    weight_decay: NonNegative = 0.1  # AdamW's weight decay.
    layer_decay: Annotated[float, Interval(gt=0, le=1)] = 0.75  # Layer-wise decay of the learning rate.
    drop_path: Share = 0.1  # Stochastic depth rate.
    clip_grad: NonNegative = 0.0  # Clip gradients to this norm; 0 is off.
    scale: tuple[float, float] = (0.1, 2.0)  # Range of large-scale jitter; 1 fits the image to the input.
    flip: bool = True  # Flip half of the images.
    rois_per_image: Annotated[int, Ge(4)] = 512  # Region proposals per image in training.
    recompute: bool = False  # Activation checkpointing: less memory, about a third more time.
    evaluate_every: NonNegative = 10.0  # Epochs between evaluations; 0 evaluates at the end only.
    encoder: Literal["base", "momentum"] | None = None  # Encoder; by default base for runs, else its project's choice.
    device: str = "auto"  # Device: auto, cpu or cuda.
    workers: Workers = 2  # Processes that load images.
    seed: int = 0  # Random seed.


@dataclass(frozen=True)
class Segment(OfWeights):
    """Evaluate an encoder by semantic segmentation: a linear layer on its frozen patch tokens."""

    data: Path  # A folder with images and masks of class indices, as in Pets, CamVid or ADE20K, or COCO's.
    out: Path | None = None  # Folder for results and trained weights; by default the run's. The same call resumes.
    protocol: Literal["full", "fast"] = "full"
    """Training on random crops and testing on whole images, or both on stored tokens of center crops."""
    finetune: bool = False  # Train the encoder, too.
    blocks: tuple[int, ...] = (-1,)  # Blocks whose patch tokens are concatenated; 0 is the first, -1 the last.
    image_size: Count | None = None  # Pixels of crops and of test images' shorter side; by default the encoder's.
    ignore_index: tuple[int, ...] = (255,)  # Indices in masks that are neither learned nor counted.
    class_names: Path | None = None  # A file with NAME or INDEX NAME in each line.
    test: str | None = None  # Name of the test split; by default val, validation or test.
    epochs: Above0 | None = None  # Passes over the training images; by default 20, with fast as many as needed.
    batch_size: Count = 32  # Images per optimizer step, over all processes.
    lr: Above0 | None = None  # Learning rate of AdamW; by default 1e-2, with --finetune 5e-4.
    weight_decay: NonNegative = 1e-4  # AdamW's weight decay.
    layer_decay: Annotated[float, Interval(gt=0, le=1)] = 0.75  # Layer-wise decay of the rate, with --finetune.
    pictures: Annotated[int, Ge(0)] = 8  # Number of test images to draw with truth and prediction; fast draws none.
    encoder: Literal["base", "momentum"] | None = None  # Encoder; by default base for runs, else its project's choice.
    device: str = "auto"  # Device: auto, cpu or cuda.
    workers: Workers = 2  # Processes that load images.
    seed: int = 0  # Random seed.


@dataclass(frozen=True)
class Evaluate:
    """Evaluate encoders on several datasets by all cheap protocols, next to an untrained network and raw pixels."""

    runs: Runs  # Run folders, encoder files, timm:NAME or hf://USER/NAME.
    data: tuple[str, ...]  # Labeled images; folders with masks are also segmented.
    out: Path = Path("evaluation")  # Folder of results and table. The same call resumes.
    protocols: tuple[Literal["knn", "linear", "few-shot", "attentive", "segment"], ...] = ()
    """Protocols; by default all."""
    all_steps: bool = False  # Evaluate every kept checkpoint of the runs, and draw the curve.
    baselines: bool = True  # Evaluate the untrained networks and raw pixels, too.
    shots: Count = 5  # Labeled images per class of few-shot.
    draws: Count = 5  # Random draws of these images; the result is their mean.
    ignore_index: tuple[int, ...] = (255,)  # Indices in masks that are neither learned nor counted.
    encoder: Literal["base", "momentum"] | None = None  # Encoder; by default base for runs, else its project's choice.
    device: str = "auto"  # Device: auto, cpu or cuda.
    workers: Workers = 0  # Processes that load images.
    seed: int = 0  # Random seed.


@dataclass(frozen=True)
class Embed(OfWeights):
    """Write the feature vector of every image."""

    data: str  # Images, labeled or not.
    out: Path  # A .parquet file: path, label (where there is one) and vector of each image.
    split: Literal["train", "test"] = "train"  # Split of DATA.
    pool: Literal["token", "mean"] = "token"  # The class token, or the mean over patch tokens.
    resize: Count | None = None  # Pixels of the shorter side before the center crop, as for knn.
    encoder: Literal["base", "momentum"] | None = None  # Encoder; by default base for runs, else its project's choice.
    device: str = "auto"  # Device: auto, cpu or cuda.
    workers: Workers = 0  # Processes that load images.


@dataclass(frozen=True)
class Compare:
    """Print the results of runs side by side, with the paper's results for the same training."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")]  # Run folders.


@dataclass(frozen=True)
class Shards:
    """Write data as tar shards with an index, for data that is large or remote."""

    data: Data  # A name, a folder of images, parquet, or other shards.
    out: Path  # Folder to write to: empty, or from the same interrupted call.
    split: Split = None  # Split to write; by default all.
    shard_mb: Above0 = 256.0  # Approximate size of a shard in MB.
    per_shard: Count | None = None  # Images per shard, instead of a size.
    workers: Count = 4  # Threads that read images.
    quality: Annotated[int, Interval(ge=1, le=100)] | None = None
    """JPEG quality; by default files keep their bytes, and generated images become PNG."""
    shuffle: bool = True  # Write in random order, as training from shards needs.


@dataclass(frozen=True)
class Import:
    """Import another project's encoder. Every command then works on OUT as on a run."""

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """Checkpoint of the authors' PatchMix, MoCo v3, DINO, DINOv2, DINOv3, iBOT, MAE, timm or torchvision."""
    out: Path  # A folder for encoder.safetensors.
    format: str | None = None
    """Format: patchmix-authors, mocov3, dino, dinov2, dinov3, ibot, mae, timm, torchvision; by default recognized."""
    encoder: Literal["base", "momentum"] | None = None  # Encoder; by default base for runs, else its project's choice.
    heads: Count | None = None  # Number of attention heads, which tensors don't show; needed for unusual widths.
    image_size: Count | None = None  # Image size in pixels; by default that of the position embedding.
    overwrite: bool = False  # Replace the content of OUT.


@dataclass(frozen=True)
class Export(OfWeights):
    """Write an encoder for another program, and print the lines that load it there."""

    out: Path  # A file, or a folder for huggingface.
    format: Literal["timm", "torchvision", "huggingface", "onnx"] = "timm"  # Format to write.
    license: str | None = None  # License of the weights in the model card, such as cc-by-4.0.
    encoder: Literal["base", "momentum"] | None = None  # Encoder; by default base for runs, else its project's choice.
    overwrite: bool = False  # Replace an existing file.


@dataclass(frozen=True)
class Push:
    """Upload an encoder with a model card to the Hugging Face Hub; without --send only show what would be sent."""

    weights: Weights  # Run folder, encoder.safetensors, checkpoint of another project, or timm:NAME.
    repo: Annotated[Positional[str], arg(metavar="USER/NAME")]  # Repository on the Hub; created if it does not exist.
    send: bool = False  # Upload; otherwise nothing leaves this machine.
    private: bool = False  # Make a new repository private.
    license: str | None = None  # License of the weights in the model card, such as cc-by-4.0.
    encoder: Literal["base", "momentum"] | None = None  # Encoder; by default base for runs, else its project's choice.


@dataclass(frozen=True)
class ShowMix:
    """Draw originals and their mixes, every patch framed in the color of its original."""

    data: Data  # Images, as for pretrain.
    out: Path = Path("mix.png")  # A .png, .svg or .pdf; the target matrices are written to NAME-targets.
    mix: MixName = "patchmix"  # How images are mixed.
    num_mix: Count = 3  # Images per mix, M, of patchmix; other mixes take two.
    patch_size: Count = 8  # Side of a patch in pixels, of patchmix and regionswap.
    size: Count = 64  # Side in pixels of the center crop that is drawn.
    images: Count = 6  # Number of images of DATA.
    seed: int = 0  # Seed of the mix.


@dataclass(frozen=True)
class ShowCurves:
    """Draw losses between floor and chance, kNN, rank, schedules and speed of one or several runs."""

    runs: Runs  # Run folders.
    out: Path = Path("curves.png")  # A .png, .svg or .pdf.
    axis: Literal["epochs", "images", "hours", "flops"] = "epochs"  # Unit of the horizontal axis.


@dataclass(frozen=True)
class ShowMap:
    """Draw the features in two dimensions (PCA), with thumbnails."""

    runs: Runs  # Run folders, encoder files, timm:NAME or hf://USER/NAME.
    data: str  # The images.
    out: Path = Path("map.png")  # A .png, .svg or .pdf.
    images: Count = 300  # Number of images of DATA to read at most.
    device: str = "auto"  # Device: auto, cpu or cuda.


@dataclass(frozen=True)
class ShowSimilarity(ShowMap):
    """Draw the similarity of some images according to one or several encoders (the paper's figure)."""

    out: Path = Path("similarity.png")  # A .png, .svg or .pdf.
    images: Count = 1000  # Number of images of DATA to read at most.
    query: tuple[str, ...] = ()  # Paths or positions of query images; by default some of different classes.
    queries: Count = 3  # Number of queries, if none are given.


@dataclass(frozen=True)
class ShowNeighbors(ShowSimilarity):
    """Draw the nearest neighbors of some query images."""

    out: Path = Path("neighbors.png")  # A .png, .svg or .pdf.
    images: Count = 2000  # Number of images of DATA to read at most.
    queries: Count = 5  # Number of queries, if none are given.
    k: Count = 8  # Neighbors of each query.


@dataclass(frozen=True)
class ShowAttention:
    """Draw the attention of the class token, one map per head."""

    runs: Runs  # Run folders, encoder files, timm:NAME or hf://USER/NAME.
    data: str | None = None  # The images.
    image: tuple[Path, ...] = ()  # Image files instead of DATA.
    out: Path = Path("attention.png")  # A .png, .svg or .pdf.
    block: int = -1  # Block of the encoder; 0 is the first, -1 the last.
    images: Count = 3  # Number of images of DATA.
    position: tuple[int, ...] = ()  # Positions of images in DATA.
    size: Count | None = None  # Side of the input in pixels; a larger one gives finer maps.
    device: str = "auto"  # Device: auto, cpu or cuda.


@dataclass(frozen=True)
class ShowPatches(ShowAttention):
    """Draw the patch tokens of images as colors: their first three principal components."""

    out: Path = Path("patches.png")  # A .png, .svg or .pdf.
    images: Count = 4  # Number of images of DATA.
    foreground: bool = False  # Color only the patches on one side of the first component, as in DINOv2's figure.


@dataclass(frozen=True)
class Report:
    """Write one HTML file about runs: summary, curves, evaluations, figures, and an explorer of neighbors."""

    runs: Runs  # Run folders; for comparison also encoder files, timm:NAME and hf://USER/NAME.
    out: Path | None = None  # The file; by default report.html in the first run's folder.
    data: str | None = None  # The images of the explorer; by default the first run's.
    images: Annotated[int, Ge(0)] = 2000  # Number of images in the explorer at most; 0 leaves pictures out.
    device: str = "auto"  # Device: auto, cpu or cuda.
    workers: Workers = 0  # Processes that load images.


@dataclass(frozen=True)
class Recipes:
    """List the recipes, what they cost and what the paper reports for them."""


@dataclass(frozen=True)
class Flops:
    """Print parameters and FLOPs of one training iteration, next to the paper's."""

    method: str | None = None  # Method, as for pretrain; by default all.
    model: str | None = None  # Model: vit_{tiny,small,base}_patchP_S; by default the paper's for CIFAR.
    batch: Count = 2  # Images in the iteration; the paper's table has 2.
    local_crops: Annotated[int, Ge(0)] | None = None  # Local crops; by default the paper's for CIFAR, else none.
    local_size: Count | None = None  # Side of the local crops in pixels.


@dataclass(frozen=True)
class Bench(Generic[Options]):
    """Measure training speed, by default on generated images: images per second, share of the peak, phases, memory."""

    recipe: str = "paper"  # Recipe, as for pretrain.
    config: Path | None = None  # A config.yaml, or a run with one, to use instead of a recipe.
    steps: Count = 5  # Steps to measure, after one warm-up step.
    run: RunSettings[Options] = field(default_factory=Config)


@dataclass(frozen=True)
class Plan(Generic[Options]):
    """Estimate what a training takes on given hardware: hours, energy, memory, loader, traffic, checkpoints."""

    recipe: str = "paper"  # Recipe, as for pretrain.
    config: Path | None = None  # A config.yaml, or a run with one, to use instead of a recipe.
    gpus: str | None = None  # Number and kind of GPUs, such as 8xA100-80GB; docs/scale.md lists the kinds.
    here: bool = False  # This machine, at the speed measured over a few steps.
    tflops: Above0 | None = None  # Peak TFLOP/s of one device, for other hardware.
    memory: Above0 | None = None  # Memory of one device in GB, for other hardware.
    utilization: Annotated[float, Interval(gt=0, le=1)] = 0.2  # Share of the peak that is reached; unused with --here.
    images: Count | None = None  # Number of images; known for named datasets.
    image_kb: Above0 | None = None  # Mean size of an image file in KB; by default ImageNet's or CIFAR's.
    run: RunSettings[Options] = field(default_factory=Config)


@dataclass(frozen=True)
class Doctor:
    """Say what would make runs faster on this machine, or what to change first in one run."""

    folder: Annotated[Positional[Path | None], arg(name="run", metavar="RUN")] = None
    """The run to examine, finished or not; by default the machine."""
    runs: Path = Path("runs")  # Folder for runs, whose free space is checked.
