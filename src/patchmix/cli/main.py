"""The command `patchmix`. Every verb is a function; what it needs is imported when it runs."""

from __future__ import annotations

import os
import sys
from typing import Any

import tyro

from patchmix.cli import detecting, judging, machine, pictures, preparing, training, weights
from patchmix.train.allocator import keep_freed_memory, restart_with_huge_pages


def show() -> None:
    """Draw figures: mix, curves, similarity, attention, neighbours, map."""
    _dispatch(SHOW, ["--help"], "patchmix show", "Draw figures.")


SHOW: dict[str, Any] = {
    "mix": pictures.show_mix,
    "curves": pictures.show_curves,
    "similarity": pictures.show_similarity,
    "attention": pictures.show_attention,
    "neighbours": pictures.show_neighbours,
    "map": pictures.show_map,
}
COMMANDS: dict[str, Any] = {
    "pretrain": training.pretrain,
    "shards": preparing.shards,
    "knn": judging.knn,
    "linear": judging.linear,
    "finetune": judging.finetune,
    "detect": detecting.detect,
    "embed": judging.embed,
    "compare": judging.compare,
    "ablate": training.ablate,
    "import": weights.import_weights,
    "export": weights.export_weights,
    "show": show,
    "report": pictures.report,
    "flops": training.flops,
    "bench": machine.bench,
    "doctor": machine.doctor,
    "recipes": training.recipes,
    "demo": training.demo,
}


COMPUTE = {"pretrain", "demo", "ablate", "compare", "knn", "linear", "finetune", "detect", "embed", "bench"}
WRITE_ALONE = {"shards", "import", "export", "show", "report", "demo"}  # what several processes would write twice


def main(args: list[str] | None = None) -> None:
    """Runs one command; a user's mistake ends in one line and exit code 2."""
    if args is None:
        args = sys.argv[1:]
        if args and args[0] in COMPUTE:
            restart_with_huge_pages()
            keep_freed_memory()
    try:
        if "WORLD_SIZE" in os.environ and args and args[0] in WRITE_ALONE:
            from patchmix.distributed import check_alone

            check_alone(f"patchmix {args[0]}")
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
    """128 + the signal that stopped a run, 4 for a lost process, 3 for a loss that is not finite, 2 for mistakes."""
    from patchmix.distributed import PeerLost
    from patchmix.launch import LOST_PEER
    from patchmix.train.watch import Interrupted, NonFiniteLoss

    if isinstance(error, Interrupted):
        return 128 + error.signum
    if isinstance(error, NonFiniteLoss):
        return 3
    if isinstance(error, PeerLost):
        return LOST_PEER
    return 2 if isinstance(error, (ValueError, OSError)) else None


def _fail(message: str, code: int) -> None:
    print(f"patchmix: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(code)
