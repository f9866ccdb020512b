"""patchmix pretrain, ablate, recipes, demo, flops."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from patchmix.cli.arguments import Count, Data, File, Number, Set, Text


def pretrain(
    data: Data,
    /,
    out: Path,
    recipe: str = "paper",
    config: File = None,
    model: Text = None,
    method: Text = None,
    mix: Text = None,
    mix_across: bool = False,
    epochs: Number = None,
    budget: Text = None,
    batch_size: Count = None,
    workers: Count = None,
    views: Text = None,
    device: Text = None,
    seed: Count = None,
    compile: bool = False,
    resume: Text = None,
    init_from: File = None,
    wandb: Text = None,
    devices: Count = None,
    settings: Set = (),
) -> None:
    """Pre-train a ViT on unlabelled images.

    Args:
        data: A name (shapes, cifar10, cifar100, imagenet), a folder of images, parquet, or .tar shards.
        out: The run's folder.
        recipe: paper, official or demo; `patchmix recipes` lists them.
        config: A config.yaml, or a run whose configuration to use, instead of a recipe.
        model: vit_{tiny,small,base}_patchP_S for any patch size P and image size S, or any timm ViT.
        method: patchmix, mocov3, simclr, byol, swav, dino, ibot, sdmp or regioncl; by default what the recipe says.
        mix: patchmix, mixup, cutmix, cutmix+mixup, resizemix or regionswap, for the methods that mix.
        mix_across: Mix over the batch of all processes, not within each one's own part (patchmix only).
        epochs: Passes over the data; a shorter run keeps the recipe's proportion of warm-up.
        budget: Wall-clock time instead of epochs, such as 45min or 2h.
        batch_size: Images per optimiser step, over all processes.
        workers: Processes that prepare images.
        views: cpu, or device: then the workers only crop, and colours and blur are the GPU's work.
        device: auto, cpu or cuda.
        seed: Fixes every random number of the run.
        compile: Compile the method with torch.compile: minutes of warm-up, then faster on most GPUs.
        resume: auto continues OUT where it stopped; or a checkpoint's path.
        init_from: A run or an encoder.safetensors whose weights to start from.
        wandb: A Weights & Biases project to log to as well.
        devices: Processes to start on this machine, one for each GPU; on the CPU they share the cores.
    """
    if devices is not None and "RANK" not in os.environ:
        _start_processes(devices, dict(locals()))
        return
    from patchmix.run import pretrain

    pretrain(
        data,
        out,
        recipe=recipe,
        config=config,
        model=model,
        method=method,
        mix=mix,
        epochs=epochs,
        budget=budget,
        batch_size=batch_size,
        workers=workers,
        views=views,
        device=device,
        seed=seed,
        compile=compile or None,
        resume=resume,
        init_from=init_from,
        wandb=wandb,
        settings=("method.mix_across=true", *settings) if mix_across else settings,
    )


def _start_processes(devices: int, options: dict[str, Any]) -> None:
    """The same command in so many processes; leaves by their exit code if it is not 0."""
    if devices < 1:
        raise ValueError(f"--devices is {devices}; it must be at least 1")
    from patchmix.launch import launch

    words = ["pretrain", str(options.pop("data"))]
    settings = options.pop("settings")
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    for setting in settings:
        words += ["--set", setting]
    if code := launch(words, devices):
        raise SystemExit(code)


def recipes() -> None:
    """List the recipes, what they cost and what the paper reports for them."""
    from patchmix.study.recipe_table import print_recipes

    print_recipes()


def demo(out: File = None, budget: str = "3min") -> None:
    """Pre-train a small ViT on generated images, judge it and draw pictures: minutes on a CPU, no data needed.

    Args:
        out: The run's folder; runs/demo-DATE-TIME if not given.
        budget: How long to train.
    """
    from patchmix.demo import default_folder, demo

    demo(out or default_folder(), budget=budget)


def flops(
    method: Text = None,
    model: Text = None,
    batch: int = 2,
    image_size: Count = None,
    local_crops: Count = None,
    local_size: Count = None,
    count: bool = False,
) -> None:
    """Print parameters and FLOPs of one training iteration, beside the paper's.

    Args:
        method: As for pretrain; by default all.
        model: vit_{tiny,small,base}_patchP_S; by default the paper's for CIFAR.
        batch: Images in the iteration; the paper's table has 2.
        image_size: Other than the model's.
        local_crops: Small crops for multi-crop.
        local_size: Their side.
        count: Add what torch counts, on tensors without values: seconds a row.
    """
    from patchmix.study.flops import FlopsRow, print_flops

    def weightless(row: FlopsRow) -> Any:
        from patchmix.build import build_weightless

        crops = {"local_crops": row.local_crops, "local_size": row.local_size}
        return build_weightless(row.method, row.model, batch=batch, image_size=image_size, **crops)

    print_flops(
        method,
        model,
        batch=batch,
        image_size=image_size,
        local_crops=local_crops,
        local_size=local_size,
        build=weightless if count else None,
    )


def ablate(
    ablation: Positional[Literal["mix", "num-mix", "terms", "epochs", "method"]],
    data: Data,
    /,
    out: Path,
    seeds: tuple[int, ...] = (0,),
    rows: tuple[str, ...] = (),
    epochs: Number = None,
    budget: Text = None,
    test_data: Text = None,
    recipe: str = "paper",
    config: File = None,
    model: Text = None,
    batch_size: Count = None,
    workers: Count = None,
    device: Text = None,
    settings: Set = (),
) -> None:
    """Train and judge the rows of one of the paper's ablations, or all methods, into one table.

    Args:
        ablation: mix, num-mix, terms, epochs (the paper's), or method (all methods side by side).
        data: As for pretrain.
        out: Holds a run's folder for each row and seed, and the table; the same call continues.
        seeds: Every row is trained with each.
        rows: Some of the rows, by name; by default all.
        epochs: Passes over the data, the same for every row; rows of `epochs` get a share of it.
        budget: Wall-clock time for each row instead, such as 20min.
        test_data: Labelled images to judge on; by default DATA, where it has labels.
        recipe: paper, official or demo.
        config: A config.yaml, or a run whose configuration to use, instead of a recipe.
        model: As for pretrain.
        batch_size: Images per optimiser step, over all processes.
        workers: Processes that prepare images.
        device: auto, cpu or cuda.
        settings: Override a setting in every row that has it, e.g. optim.base_lr=1e-3, or in one row, e.g.
            dino:optim.clip_grad=3; may be repeated.
    """
    from patchmix.ablate import ablate

    ablate(
        ablation,
        data,
        out,
        seeds=seeds,
        rows=rows,
        epochs=epochs,
        budget=budget,
        test_data=test_data,
        recipe=recipe,
        config=config,
        model=model,
        batch_size=batch_size,
        workers=workers,
        device=device,
        settings=settings,
    )
