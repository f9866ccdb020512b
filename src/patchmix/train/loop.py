"""The one training loop: data, schedules, forward, backward, step, log, monitor, checkpoint."""

import math
import signal
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from patchmix import distributed
from patchmix.methods.method import Method
from patchmix.schedules import stage
from patchmix.train.checkpoint import Checkpoints, CheckpointWriter
from patchmix.train.log import RunLog
from patchmix.train.optimizer import set_hyperparameters
from patchmix.train.watch import Clock, Interrupted, LossWatch, Meter, NonFiniteLoss, catch_signals, name_dead_workers

STEPS_BETWEEN_AGREEMENTS = 10  # how often ranks agree on when to save and to stop

Evaluator = Callable[[nn.Module], Iterator[tuple[str, float]]]  # takes the encoder, yields (name, value)


class Batches(Protocol):
    """What the loop needs of a loader. A batch has `bad`, the names of broken images, and `to(device)`."""

    steps_per_epoch: int

    def batches(self, start_step: int = 0) -> Generator[Any]: ...


@dataclass(frozen=True)
class Plan:
    """How long to train, and with which hyperparameters."""

    lr: Callable[[float], float]  # of the progress, from 0 to 1
    weight_decay: Callable[[float], float]
    batch_size: int  # of one optimizer step, over all ranks
    epochs: float
    token_dropout: Callable[[float], float] = lambda progress: 0.0  # of the queries
    image_sizes: Sequence[int] = ()  # of the two views, in equal stages; empty: as they are
    budget_seconds: float | None = None
    accumulate: int = 1
    clip_grad: float = 0.0
    autocast: torch.dtype | None = None
    compile: bool = False
    seed: int = 0
    log_every: int = 10
    monitor_every: float = 10.0
    checkpoint_epochs: float = 1.0
    checkpoint_minutes: float = 10.0


def train(
    method: Method,
    loader: Batches,
    plan: Plan,
    *,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    prepare: Callable[[Any], Any],
    log: RunLog,
    checkpoints: Checkpoints | None = None,
    resume_from: dict[str, Any] | None = None,
    extra_state: dict[str, Any] | None = None,
    evaluators: Sequence[Evaluator] = (),
    warning: Callable[[int, dict[str, float]], str | None] = lambda step, values: None,
    on_bad_sample: Callable[[Sequence[str]], None] = lambda names: None,
) -> dict[str, float]:
    """Trains to the end of the plan and returns the last values of the evaluators.

    `prepare` turns a batch of the loader, on the device, into the argument of `method.forward`. `warning` says what is
    wrong with the evaluators' values at a step, if anything.
    """
    step, spent = 0, 0.0
    if resume_from is not None:
        method.load_state_dict(resume_from["method"])
        optimizer.load_state_dict(resume_from["optimizer"])
        step, spent = int(resume_from["step"]), float(resume_from["seconds"])
    total_steps = max(1, round(plan.epochs * loader.steps_per_epoch))
    clock = Clock(total_steps, plan.budget_seconds, first_step=step, spent_before=spent)
    clock.reserve = float((resume_from or {}).get("reserve", 0.0))  # absent in version 0.1
    meter, watch = Meter(), LossWatch(device)
    module = wrap(method, device, plan)
    writer = CheckpointWriter(checkpoints if distributed.is_main() else None)

    def monitor() -> dict[str, float]:
        began = time.monotonic()
        values = _evaluate(method.encoder, evaluators)
        if values:
            log.record("monitor", step, {"epoch": step / loader.steps_per_epoch, **values})
            log.say(f"step {step:>7}  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()))
            if said := warning(step, values):
                log.say(f"warning: {said}", style="bold red")
        clock.reserve = time.monotonic() - began  # the last evaluation must fit into the budget, too
        return values

    def save() -> None:
        watch.check()
        largest = nn.utils.get_total_norm(method.parameters(), math.inf)
        if not largest.isfinite():  # a gradient may be infinite where the loss is not
            raise NonFiniteLoss(f"step {step}: the weights are not finite")
        state = {"method": method.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        timing = {"seconds": clock.spent(progress), "reserve": clock.reserve}
        writer.save({**state, **timing, **(extra_state or {})}, step)

    progress = 0.0
    if step == 0:
        monitor()

    with catch_signals() as caught, closing(writer), name_dead_workers(), closing(loader.batches(step)) as loaded:
        batches = (batch.to(device) for batch in _received(loaded, meter, on_bad_sample))
        how: dict[str, Any] = {"device": device, "prepare": prepare, "on_losses": watch.push}
        meter.restart()
        last_saved = time.monotonic()
        progress = clock.progress(step, device)
        while progress < 1.0:
            train_step(module, method, optimizer, batches, plan, step=step, progress=progress, **how)
            lr, weight_decay = plan.lr(progress), plan.weight_decay(progress)
            step += 1
            meter.count(plan.batch_size)
            progress = clock.progress(step, device)

            done = progress >= 1.0
            if step % plan.log_every == 0 or done:
                losses = distributed.average(watch.latest(), device)
                speed, waited = meter.read()
                timing = {"images_per_second": speed, "data_wait": waited, "seconds": clock.spent()}
                values = {"epoch": step / loader.steps_per_epoch, "progress": progress, **losses}
                values |= {"lr": lr, "weight_decay": weight_decay, **method.scalars, **timing}
                log.record("train", step, values)
                line = _line(values, losses, plan)
                log.show_progress(progress, line, remaining=clock.remaining(progress), final=done)

            if _every(plan.monitor_every, step, loader.steps_per_epoch) and not done:
                monitor()
                meter.restart()  # it measures training only
            writer.check()
            due = _every(plan.checkpoint_epochs, step, loader.steps_per_epoch)
            late = time.monotonic() - last_saved > plan.checkpoint_minutes * 60
            if not done and (due or _agree(late, step, device)):
                save()
                last_saved = time.monotonic()
            if _agree(bool(caught), step, device):
                save()
                writer.wait()
                distributed.barrier()  # a launcher ends all soon after the first: no rank ends before it is written
                signum = caught[0] if caught else int(signal.SIGTERM)
                raise Interrupted(signum, f"stopped at step {step}; its checkpoint is written")

        save()  # the evaluation may take long, and may be killed
        results = monitor()
        save()  # with what the evaluators keep in the method
        writer.wait()
    return results


def train_step(
    module: nn.Module,
    method: Method,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    plan: Plan,
    *,
    step: int,
    progress: float,
    device: torch.device,
    prepare: Callable[[Any], Any],
    on_losses: Callable[[int, dict[str, Tensor]], None] = lambda step, losses: None,
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> dict[str, Tensor]:
    """One optimizer step of `plan.accumulate` passes, each over the next of `batches`; returns their mean losses.

    `module` is what `wrap` made of `method`. Benchmarks time what runs inside `phase(name)`.
    """
    # schedules
    with phase("EMA"):
        method.before_step(progress)
    rates = {"lr": plan.lr(progress), "weight_decay": plan.weight_decay(progress)}
    set_hyperparameters(optimizer, **rates, progress=progress)
    method.drop_tokens(plan.token_dropout(progress))
    hold_statistics(method, optimizer, progress)

    # forward, backward
    means: dict[str, Tensor] = {}
    for micro in range(plan.accumulate):
        batch = next(batches)
        seed_pass(plan.seed, step * plan.accumulate + micro, method)
        earlier = micro < plan.accumulate - 1  # gradients are exchanged in the last pass
        with module.no_sync() if earlier and isinstance(module, DistributedDataParallel) else nullcontext():
            with phase("forward"), torch.autocast(device.type, dtype=plan.autocast, enabled=plan.autocast is not None):
                views = prepare(batch)
                if plan.image_sizes:
                    views = shrink(views, stage(plan.image_sizes, progress))
                losses: dict[str, Tensor] = module(views, *method.draw(views))
            with phase("backward"):
                (losses["loss"] / plan.accumulate).backward()  # type: ignore[no-untyped-call]
        for name, value in losses.items():
            share = value.detach() / plan.accumulate
            means[name] = means[name] + share if micro else share
    on_losses(step, means)

    # optimizer
    with phase("optimizer"):
        for group in optimizer.param_groups:
            for parameter in group["params"] if progress < group.get("start", 0.0) else ():
                parameter.grad = None
        if plan.clip_grad:
            nn.utils.clip_grad_norm_(method.parameters(), plan.clip_grad)
        for parameter in method.fixed_parameters():
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with phase("EMA"):
        method.after_step(progress)
    return means


def hold_statistics(method: Method, optimizer: torch.optim.Optimizer, progress: float) -> None:
    """Batch norms in the encoder (of a convolutional stem) that do not learn now don't update their statistics either.

    Nor do their copies in a momentum encoder.
    """
    encoders = [method.encoder, method.momentum_encoder() or method.encoder]
    norms = [[m for m in e.modules() if isinstance(m, nn.BatchNorm1d) and m.affine] for e in encoders]
    if not norms[0]:
        return
    learning = {id(p) for g in optimizer.param_groups if progress >= g.get("start", 0.0) for p in g["params"]}
    for module, copied in zip(*norms, strict=True):
        for each in (module, copied):
            each.train(method.training and id(module.weight) in learning)


def wrap(method: Method, device: torch.device, plan: Plan) -> nn.Module:
    """The method as it is called: in DistributedDataParallel where there are several ranks, compiled if wanted.

    Every image size has a graph of its own; where the number of tokens changes with every step, graphs are for any.
    """
    module: nn.Module = method
    if distributed.world_size() > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the new name of broadcast_buffers is not in every torch
            module = DistributedDataParallel(
                method,
                device_ids=[device.index] if device.type == "cuda" else None,
                broadcast_buffers=False,  # batch norms have the same global statistics on every rank
                gradient_as_bucket_view=True,
            )
    if plan.compile:
        module.compile(dynamic=None if plan.token_dropout(0.0) != plan.token_dropout(1.0) else False)
    return module


def shrink(views: Sequence[Tensor], size: int) -> list[Tensor]:
    """Both views at this size if they are larger; local crops as they are."""
    two = [F.interpolate(x, (size, size), mode="bilinear", antialias=True) for x in views[:2] if x.shape[-1] > size]
    return [*(two or views[:2]), *views[2:]]


def seed_pass(seed: int, number: int, method: Method) -> None:
    """Seeds all random numbers of a forward pass from (seed, number of the pass, rank), so that a resumed run draws
    what the first one drew; the method's shared generator without the rank.
    """
    everywhere = seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9
    here = (everywhere + distributed.rank() * 0x94D049BB133111EB) % 2**63
    torch.manual_seed(here)
    method.generator.manual_seed(here ^ 0x5851F42D4C957F2D)
    method.shared_generator.manual_seed(everywhere % 2**63 ^ 0x5851F42D4C957F2D)


def _received(batches: Iterator[Any], meter: Meter, on_bad_sample: Callable[[Sequence[str]], None]) -> Iterator[Any]:
    while True:
        with meter.waiting():
            batch = next(batches)
        if batch.bad:
            on_bad_sample(batch.bad)
        yield batch


def _evaluate(encoder: nn.Module, evaluators: Sequence[Evaluator]) -> dict[str, float]:
    """Every rank takes part (an evaluator may split its work); the encoder is left in training mode."""
    encoder.eval()
    try:
        with torch.no_grad():
            return {name: value for evaluator in evaluators for name, value in evaluator(encoder)}
    finally:
        encoder.train()


def _every(epochs: float, step: int, steps_per_epoch: int) -> bool:
    """True on the step that completes another `epochs` epochs."""
    return epochs > 0 and step % max(1, round(epochs * steps_per_epoch)) == 0


def _agree(wanted: bool, step: int, device: torch.device) -> bool:
    """All ranks do the same at the same step. They ask each other only occasionally: it makes the device wait."""
    if distributed.world_size() == 1:
        return wanted
    return step % STEPS_BETWEEN_AGREEMENTS == 0 and distributed.any_process(wanted, device)


def _line(values: dict[str, float], losses: dict[str, float], plan: Plan) -> str:
    terms = "  ".join(f"{name} {value:.3f}" for name, value in losses.items() if "/" not in name)
    of = f"/{plan.epochs:g}" if plan.budget_seconds is None else ""
    speed = f"{values['images_per_second']:.0f} img/s  data wait {100 * values['data_wait']:.0f} %"
    return f"epoch {values['epoch']:.2f}{of}  {terms}  lr {values['lr']:.2e}  {speed}"
