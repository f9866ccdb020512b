"""patchmix knn, linear, finetune, embed, compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from patchmix.cli.arguments import Backbone, Count, File, Number, Pool, Which

if TYPE_CHECKING:
    from patchmix.evaluate.results import Result


def knn(
    run: Backbone,
    /,
    data: str,
    k: tuple[int, ...] = (),
    pool: Pool = "token",
    resize: Count = None,
    encoder: Which = None,
    device: str = "auto",
    workers: int = 0,
    cache: bool = True,
    out: File = None,
) -> None:
    """Judge an encoder by weighted k-nearest neighbours.

    Args:
        data: Labelled images: a name, class folders, parquet, or shards.
        k: Numbers of neighbours; by default those of 10, 20, 100, 200 that the data allows (headline 20).
        resize: Shorter side before the centre crop; the authors' code has 36 for CIFAR.
        device: auto, cpu or cuda.
        workers: Processes that prepare images.
        cache: Keep features on disk, and use those of an earlier evaluation.
        out: Where results.jsonl is; by default the run's folder.
    """
    from patchmix.evaluate.knn import evaluate_knn
    from patchmix.interop.loading import load_backbone

    result = evaluate_knn(
        load_backbone(run, encoder=encoder),
        data,
        ks=k or None,
        pool=pool,
        resize=resize,
        device=device,
        workers=workers,
        cache=cache,
        out=results_folder(run, out),
    )
    _print(result)


def linear(
    run: Backbone,
    /,
    data: str,
    protocol: Literal["paper", "fast"] = "paper",
    epochs: Number = None,
    lr: Number = None,
    batch_size: Count = None,
    pool: Pool = "token",
    resize: Count = None,
    encoder: Which = None,
    device: str = "auto",
    workers: int = 2,
    seed: int = 0,
    cache: bool = True,
    out: File = None,
) -> None:
    """Judge an encoder by a linear classifier on its frozen features.

    Args:
        data: Labelled images: a name, class folders, parquet, or shards.
        protocol: paper trains 100 epochs with augmentation; fast sweeps classifiers on stored features in seconds.
        epochs: Other than the protocol's.
        lr: Learning rate of the paper's protocol, 0.05 if not given.
        batch_size: Images per step of the paper's protocol; 256 for small images, 1024 for large ones.
        resize: Shorter side before the centre crop of test images.
        device: auto, cpu or cuda.
        workers: Processes that prepare images.
        seed: Fixes every random number.
        cache: Keep features on disk, and use those of an earlier evaluation.
        out: Where results.jsonl and checkpoints go; by default the run's folder. The same call resumes.
    """
    from patchmix.evaluate.linear import evaluate_linear
    from patchmix.interop.loading import load_backbone

    result = evaluate_linear(
        load_backbone(run, encoder=encoder),
        data,
        protocol=protocol,
        epochs=epochs,
        lr=lr,
        batch_size=batch_size,
        pool=pool,
        resize=resize,
        device=device,
        workers=workers,
        seed=seed,
        cache=cache,
        out=results_folder(run, out),
    )
    _print(result)


def finetune(
    run: Backbone,
    /,
    data: str,
    epochs: float = 100.0,
    base_lr: Number = None,
    batch_size: Count = None,
    layer_decay: float = 0.75,
    drop_path: float = 0.1,
    mixup: float = 0.8,
    cutmix: float = 1.0,
    erasing: float = 0.25,
    rand_augment: str = "rand-m9-mstd0.5-inc1",
    resize: Count = None,
    encoder: Which = None,
    device: str = "auto",
    workers: int = 2,
    seed: int = 0,
    out: File = None,
) -> None:
    """Judge an encoder by training it further, with labels.

    Args:
        data: Labelled images: a name, class folders, parquet, or shards.
        epochs: Passes over the training images; warm-up is a tenth, at most 10.
        base_lr: For a batch of 256; 5e-4 if not given, 1e-3 for ViT-T.
        batch_size: Images per step; 256 for small images, 1024 for large ones.
        layer_decay: How much less each earlier layer learns.
        drop_path: Stochastic depth.
        mixup: Its alpha; 0 is off.
        cutmix: Its alpha; 0 is off.
        erasing: Probability of random erasing.
        rand_augment: timm's RandAugment policy.
        resize: Shorter side before the centre crop of test images.
        device: auto, cpu or cuda.
        workers: Processes that prepare images.
        seed: Fixes every random number.
        out: Where results.jsonl, checkpoints and the models go; by default the run's folder. The same call resumes.
    """
    from patchmix.evaluate.finetune import FinetuneSettings, evaluate_finetune
    from patchmix.interop.loading import load_backbone

    settings = FinetuneSettings(
        epochs=epochs,
        base_lr=base_lr,
        batch_size=batch_size,
        layer_decay=layer_decay,
        drop_path=drop_path,
        mixup=mixup,
        cutmix=cutmix,
        erasing=erasing,
        rand_augment=rand_augment,
        seed=seed,
    )
    result = evaluate_finetune(
        load_backbone(run, encoder=encoder),
        data,
        settings=settings,
        resize=resize,
        device=device,
        workers=workers,
        out=results_folder(run, out),
    )
    _print(result)


def embed(
    run: Backbone,
    /,
    data: str,
    out: Path,
    split: Literal["train", "test"] = "train",
    pool: Pool = "token",
    resize: Count = None,
    encoder: Which = None,
    device: str = "auto",
    workers: int = 0,
) -> None:
    """Write the feature vector of every image.

    Args:
        data: Images, labelled or not.
        out: A .parquet (path, label, vector), or a .npy of vectors with paths and labels in a .csv beside it.
        split: Which part of DATA, where it has parts.
        resize: Shorter side before the centre crop.
        device: auto, cpu or cuda.
        workers: Processes that prepare images.
    """
    from patchmix.evaluate.embed import embed
    from patchmix.interop.loading import load_backbone

    file = load_backbone(run, encoder=encoder)
    for path in embed(file, data, out, split=split, pool=pool, resize=resize, device=device, workers=workers):
        print(f"wrote {path}")


def compare(runs: Positional[tuple[Path, ...]], /) -> None:
    """Print the results of runs side by side, with the paper's where the training is the paper's.

    Args:
        runs: Run folders.
    """
    from patchmix.study.compare import compare, print_comparison

    print_comparison(compare(runs))


def results_folder(run: str, out: Path | None) -> Path | None:
    """A run keeps its own results; of a single file or a timm model they go where --out says, if anywhere."""
    return out or (Path(run) if Path(run).is_dir() else None)


def _print(result: Result) -> None:
    from patchmix import distributed
    from patchmix.evaluate.results import print_result

    if distributed.is_main():
        print_result(result)
