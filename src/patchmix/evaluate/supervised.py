"""Training on labels through the one loop: what the linear and the fine-tuning protocol share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchmix import distributed
from patchmix.data.loader import Batch, Loader
from patchmix.evaluate.features import SMALL_IMAGES
from patchmix.files import write_text
from patchmix.methods.method import Method
from patchmix.train.checkpoint import Checkpoints, load_checkpoint, run_lock
from patchmix.train.log import RunLog
from patchmix.train.loop import Evaluator, Plan, train


class BestScores(nn.Module):
    """The steps done and the best value of each accuracy so far. Saved with the method: a resumed run knows them."""

    steps: Tensor
    best: Tensor
    best_step: Tensor

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("best", torch.full((len(names),), -1.0, dtype=torch.float64))
        self.register_buffer("best_step", torch.zeros(len(names), dtype=torch.int64))

    def note(self, values: Mapping[str, float], steps_per_epoch: int) -> Iterator[tuple[str, float]]:
        """Yields the values, then the best so far and its epoch, of each name."""
        yield from values.items()
        for i, name in enumerate(self.names):
            if values[name] > float(self.best[i]):
                self.best[i] = values[name]
                self.best_step[i] = self.steps
            yield f"best_{name}", float(self.best[i])
            yield f"best_{name}_epoch", float(self.best_step[i]) / steps_per_epoch


def usual_batch(image_size: int, images: int, *, multiple: int) -> int:
    """256 for small images (CIFAR), 1024 for larger ones, and less where there are fewer images."""
    wanted = min(256 if image_size <= SMALL_IMAGES else 1024, images)
    return max(1, wanted // multiple) * multiple


def fit(
    method: Method,
    loader: Loader,
    plan: Plan,
    *,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    prepare: Callable[[Batch], Any],
    evaluator: Evaluator,
    folder: Path | None,
    identity: Mapping[str, Any],
) -> dict[str, float]:
    """Trains to the end of the plan and returns what the evaluator found last.

    With a `folder`, checkpoints are kept there, and a call with the same `identity` goes on where one was stopped;
    two at a time in one folder are refused.
    """
    main = distributed.is_main()
    with run_lock(folder) if folder is not None and main else nullcontext():
        checkpoints, state = None, None
        if folder is not None:
            checkpoints = Checkpoints(folder / "checkpoints")
            if checkpoints.last is not None:
                state = load_checkpoint(checkpoints.last)
                if state.get("identity") != dict(identity):
                    raise ValueError(f"{checkpoints.last} belongs to another evaluation; remove {folder} to start anew")
        distributed.barrier()  # nobody writes before everybody has read
        if folder is not None and main:
            write_text(folder / "settings.json", json.dumps(dict(identity), indent=2) + "\n")
        log = RunLog(folder if main else None, step=int(state["step"]) if state else 0)
        try:
            return train(
                method,
                loader,
                plan,
                optimizer=optimizer,
                device=device,
                prepare=prepare,
                log=log,
                checkpoints=checkpoints,
                resume_from=state,
                extra_state={"identity": dict(identity)},
                evaluators=[evaluator],
                on_bad_sample=_Warn(log),
            )
        finally:
            log.close()


def work_folder(out: Path | None, protocol: str, identity: Mapping[str, Any]) -> Path | None:
    """Where an evaluation keeps its checkpoints: one folder for each set of settings, data and weights."""
    if out is None:
        return None
    digest = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
    return out / f"{protocol}-{digest[:10]}"


def top_accuracies(logits: Tensor, labels: Tensor, prefix: str = "") -> dict[str, float]:
    """(N, K) and (N,) → top-1, and top-5 where there are more than five classes."""
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = ranked == labels.to(ranked.device).unsqueeze(1)
    found = {f"{prefix}top1": float(hits[:, 0].double().mean())}
    if logits.shape[1] > 5:
        found[f"{prefix}top5"] = float(hits.any(dim=1).double().mean())
    return found


class _Warn:
    """Names every image that can't be decoded once."""

    def __init__(self, log: RunLog) -> None:
        self._log, self._seen = log, set[str]()

    def __call__(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._seen:
                self._seen.add(name)
                self._log.say(f"warning: {name} (replaced by another image)", style="yellow")
