"""patchmix pretrain, recipes, demo."""

from __future__ import annotations

from pathlib import Path

from patchmix.cli.arguments import Count, Data, File, Number, Set, Text


def pretrain(
    data: Data,
    /,
    out: Path,
    recipe: str = "paper",
    model: Text = None,
    epochs: Number = None,
    budget: Text = None,
    batch_size: Count = None,
    workers: Count = None,
    device: Text = None,
    seed: Count = None,
    resume: Text = None,
    init_from: File = None,
    wandb: Text = None,
    settings: Set = (),
) -> None:
    """Pre-train a ViT on unlabelled images.

    Args:
        data: A name (shapes, cifar10, cifar100, imagenet), a folder of images, or parquet.
        out: The run's folder.
        recipe: paper, official or demo; `patchmix recipes` lists them.
        model: vit_{tiny,small,base}_patchP_S for any patch size P and image size S, or any timm ViT.
        epochs: Passes over the data; a shorter run keeps the recipe's proportion of warm-up.
        budget: Wall-clock time instead of epochs, such as 45min or 2h.
        batch_size: Images per optimiser step, over all processes.
        workers: Processes that prepare images.
        device: auto, cpu or cuda.
        seed: Fixes every random number of the run.
        resume: auto continues OUT where it stopped; or a checkpoint's path.
        init_from: A run or an encoder.safetensors whose weights to start from.
        wandb: A Weights & Biases project to log to as well.
    """
    from patchmix.run import pretrain

    pretrain(
        data,
        out,
        recipe=recipe,
        model=model,
        epochs=epochs,
        budget=budget,
        batch_size=batch_size,
        workers=workers,
        device=device,
        seed=seed,
        resume=resume,
        init_from=init_from,
        wandb=wandb,
        settings=settings,
    )


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
