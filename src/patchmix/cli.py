"""The command `patchmix`. Every verb is a function; what it needs is imported when it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, UseAppendAction, arg

Text = Annotated[str | None, arg(metavar="TEXT")]
Number = Annotated[float | None, arg(metavar="NUMBER")]
Count = Annotated[int | None, arg(metavar="N")]
File = Annotated[Path | None, arg(metavar="PATH")]
Set = UseAppendAction[
    Annotated[
        tuple[str, ...],
        arg(name="set", metavar="KEY=VALUE", help="Override a setting, e.g. optim.base_lr=1e-3; may be repeated."),
    ]
]


def pretrain(
    data: Positional[Annotated[str, arg(metavar="DATA")]],
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


def show_mix(
    data: Positional[Annotated[str, arg(metavar="DATA")]],
    /,
    out: Path = Path("mix.png"),
    num_mix: int = 3,
    patch_size: int = 8,
    size: int = 64,
    images: int = 6,
    seed: int = 0,
) -> None:
    """Draw originals and their mixes, every patch framed in the colour of its original.

    Args:
        data: As for pretrain.
        out: A .png, .svg or .pdf; the target matrices go beside it, as NAME-targets.
        num_mix: Images in a mix, M.
        patch_size: Side of a patch in pixels of the picture.
        size: Side of the centre crop that is shown.
        images: How many images of DATA to take.
        seed: Of the permutation.
    """
    from patchmix.report.pictures import show_mix

    show_mix(data, out, num_mix=num_mix, patch_size=patch_size, size=size, images=images, seed=seed)


def show_curves(runs: Positional[tuple[Path, ...]], /, out: Path = Path("curves.png")) -> None:
    """Draw a run's losses between floor and chance, its kNN, rank and learning rate.

    Args:
        runs: One or more run folders; each gets a picture of its own.
        out: A .png, .svg or .pdf; with several runs, NAME-RUN.
    """
    from patchmix.report.pictures import show_curves

    show_curves(runs, out)


def show() -> None:
    """Draw figures: mix, curves."""
    _dispatch(SHOW, ["--help"], "patchmix show", "Draw figures.")


SHOW: dict[str, Any] = {"mix": show_mix, "curves": show_curves}
COMMANDS: dict[str, Any] = {"pretrain": pretrain, "recipes": recipes, "demo": demo, "show": show}


def main(args: list[str] | None = None) -> None:
    """Runs one command; a user's mistake ends in one line and exit code 2."""
    args = sys.argv[1:] if args is None else args
    try:
        if args[:1] == ["show"]:
            _dispatch(SHOW, args[1:], "patchmix show", "Draw figures.")
        else:
            summary = "Self-supervised pre-training of Vision Transformers with PatchMix."
            _dispatch(COMMANDS, args, "patchmix", summary)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        code = _exit_code(error)
        if code is None or os.environ.get("PATCHMIX_TRACEBACK"):
            raise
        _fail(str(error), code)


def _dispatch(commands: dict[str, Any], args: list[str], prog: str, description: str) -> None:
    tyro.extras.subcommand_cli_from_dict(commands, prog=prog, description=description, args=args)


def _exit_code(error: Exception) -> int | None:
    """128 + the signal that stopped a run, 3 for a non-finite loss, 2 for a mistake, None for a fault of ours."""
    from patchmix.train.loop import Interrupted, NonFiniteLoss

    if isinstance(error, Interrupted):
        return 128 + error.signum
    if isinstance(error, NonFiniteLoss):
        return 3
    return 2 if isinstance(error, (ValueError, OSError)) else None


def _fail(message: str, code: int) -> None:
    print(f"patchmix: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
