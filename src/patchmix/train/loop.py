"""The one training loop: data, schedules, forward, backward, step, log, monitor, checkpoint."""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from patchmix import distributed
from patchmix.methods.method import Method
from patchmix.train.checkpoint import Checkpoints
from patchmix.train.log import RunLog
from patchmix.train.monitor import Evaluator, collapse_warning
from patchmix.train.optimizer import set_hyperparameters
from patchmix.train.signals import Interrupted, catch_signals, name_dead_workers
from patchmix.train.writer import CheckpointWriter

STEPS_BETWEEN_AGREEMENTS = 10  # how often processes agree on when to save and to stop


class Batches(Protocol):
    """What the loop needs of a loader."""

    steps_per_epoch: int

    def batches(self, start_step: int = 0) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Plan:
    """What is to be trained, for how long, and how the hyper-parameters move."""

    lr: Callable[[float], float]
    weight_decay: Callable[[float], float]
    batch_size: int  # of one optimiser step, over all processes
    epochs: float
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


class NonFiniteLoss(ArithmeticError):
    """The loss is NaN or infinite: training on would only spread it."""


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
    on_bad_sample: Callable[[Sequence[str]], None] = lambda names: None,
) -> dict[str, float]:
    """Trains to the end of the plan and returns the last values of the evaluators.

    `prepare` turns a batch of the loader into the argument of `method.forward`, on the device.
    """
    # ------------------------------------------------------------------------------------------------ where we are
    step, spent = 0, 0.0
    if resume_from is not None:
        method.load_state_dict(resume_from["method"])
        optimizer.load_state_dict(resume_from["optimizer"])
        step, spent = int(resume_from["step"]), float(resume_from["seconds"])
    clock = Clock(plan, loader.steps_per_epoch, spent)
    wrapped = _wrap(method, device, plan.compile)
    watch = LossWatch(device)
    results: dict[str, float] = {}
    writer = CheckpointWriter(checkpoints) if distributed.is_main() else CheckpointWriter(None)

    def save() -> None:
        state = {"method": method.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        writer.save({**state, "seconds": clock.spent(), **(extra_state or {})}, step)

    def monitor() -> None:
        began = time.monotonic()
        values = _evaluate(method, evaluators)
        if values:
            results.update(values)
            log.record("monitor", step, {"epoch": step / loader.steps_per_epoch, **values})
            log.say(f"step {step:>7}  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()))
            if warning := collapse_warning(values):
                log.say(f"warning: {warning}", style="bold red")
        clock.reserve = time.monotonic() - began  # the last evaluation must fit into the budget, too

    if step == 0:
        monitor()

    # ---------------------------------------------------------------------------------------------------- the loop
    with catch_signals() as caught, closing(writer), name_dead_workers():
        batches = loader.batches(step)
        meter = Meter()
        last_saved = time.monotonic()
        progress = clock.progress(step, device)
        while progress < 1.0:
            # -------------------------------------------------------------------------------------------- schedules
            method.before_step(progress)
            lr, weight_decay = plan.lr(progress), plan.weight_decay(progress)
            set_hyperparameters(optimizer, lr=lr, weight_decay=weight_decay)

            # ------------------------------------------------------------------------------------ forward, backward
            for micro in range(plan.accumulate):
                with meter.waiting():
                    batch = next(batches)
                if batch.bad:
                    on_bad_sample(batch.bad)
                seed_pass(plan.seed, step * plan.accumulate + micro, method.generator, method.shared_generator)
                last_micro = micro == plan.accumulate - 1
                with _no_sync(wrapped, not last_micro):
                    with torch.autocast(device.type, dtype=plan.autocast, enabled=plan.autocast is not None):
                        out = wrapped(prepare(batch.to(device)))
                    watch.push(step, out)
                    (out["loss"] / plan.accumulate).backward()

            # --------------------------------------------------------------------------------------- optimiser step
            if plan.clip_grad:
                nn.utils.clip_grad_norm_(method.parameters(), plan.clip_grad)
            for parameter in method.fixed_parameters():
                parameter.grad = None
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            method.after_step(progress)
            step += 1
            meter.count(plan.batch_size)
            progress = clock.progress(step, device)

            # -------------------------------------------------------------------------------------------------- log
            done = progress >= 1.0
            if step % plan.log_every == 0 or done:
                values = distributed.average(watch.latest(), device)
                speed, waited = meter.read()
                epoch = step / loader.steps_per_epoch
                rates = {"lr": lr, "weight_decay": weight_decay, **method.scalars}
                timing = {"images_per_second": speed, "data_wait": waited, "seconds": clock.spent()}
                log.record("train", step, {"epoch": epoch, "progress": progress, **values, **rates, **timing})
                eta = clock.remaining(progress, step)
                log.show_progress(progress, _line(epoch, plan, values, lr, speed, waited, eta), final=done)

            # --------------------------------------------------------------------------------- monitor, checkpoint
            if _every(plan.monitor_every, step, loader.steps_per_epoch) and not done:
                monitor()
                meter.restart()  # it measures training
            writer.check()
            due = _every(plan.checkpoint_epochs, step, loader.steps_per_epoch)
            late = _agree(time.monotonic() - last_saved > plan.checkpoint_minutes * 60, step, device)
            if (due or late) and not done:
                watch.check()
                save()
                last_saved = time.monotonic()
            if _agree(bool(caught), step, device):
                watch.check()
                save()
                writer.wait()
                signum = caught[0] if caught else int(signal.SIGTERM)
                raise Interrupted(signum, f"stopped at step {step}; its checkpoint is written")

        watch.check()
        save()  # what follows may take long, and may be killed
        monitor()
        save()  # with what the evaluators keep in the method
        writer.wait()
    return results


# ------------------------------------------------------------------------------------------------------------- time


class Clock:
    """Progress by steps, or by wall-clock where the plan has a budget. Time is monotonic: clock jumps don't count."""

    def __init__(self, plan: Plan, steps_per_epoch: int, spent_before: float) -> None:
        self.total_steps = max(1, round(plan.epochs * steps_per_epoch))
        self.budget = plan.budget_seconds
        self.reserve = 0.0  # seconds to keep for what follows the last step
        self._before = spent_before
        self._began = time.monotonic()
        self._slowest = 0.0
        self._previous = self._began
        self._first_step: int | None = None

    def spent(self) -> float:
        return self._before + time.monotonic() - self._began

    def progress(self, step: int, device: torch.device) -> float:
        if self._first_step is None:
            self._first_step = step
        if self.budget is None:
            return step / self.total_steps
        now = time.monotonic()
        if step > self._first_step:
            self._slowest = max(self._slowest * 0.9, min(now - self._previous, self.budget))
        self._previous = now
        usable = max(self.budget - min(self.reserve, 0.5 * self.budget), 1e-3)
        done = self.spent() / usable
        if self.spent() + 0.5 * self._slowest >= usable:  # the next step would end beyond the budget
            done = 1.0
        return distributed.broadcast_float(min(done, 1.0), device)

    def remaining(self, progress: float, step: int) -> float:
        """Seconds to go, at the speed so far."""
        if self.budget is not None:
            return max(self.budget - self.spent(), 0.0)
        assert self._first_step is not None
        began = self._first_step / self.total_steps
        elapsed = time.monotonic() - self._began
        return elapsed * (1.0 - progress) / max(progress - began, 1e-9)


class Meter:
    """Images per second, and the share of time spent waiting for data, since the last reading."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._began, self._waited, self._images = time.perf_counter(), 0.0, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def count(self, images: int) -> None:
        self._images += images

    def read(self) -> tuple[float, float]:
        elapsed = max(time.perf_counter() - self._began, 1e-9)
        reading = self._images / elapsed, self._waited / elapsed
        self.restart()
        return reading


class LossWatch:
    """Stops at the first loss that is not finite, without making the device wait.

    On the CPU the values of a step are checked at once. On a GPU they are copied in the background, and looked at
    when the next step has been launched or when a checkpoint is due, so that no bad state is ever saved.
    """

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type == "cuda"
        self._pending: tuple[int, list[str], Tensor, torch.cuda.Event | None] | None = None
        self._latest: dict[str, float] = {}

    def push(self, step: int, out: dict[str, Tensor]) -> None:
        self.check()
        values = torch.stack([value.detach().float() for value in out.values()])
        event = None
        if self._asynchronous:
            values = values.to("cpu", non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._pending = (step, list(out), values, event)
        if not self._asynchronous:
            self.check()

    def check(self) -> None:
        if self._pending is None:
            return
        step, names, values, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        self._latest = dict(zip(names, values.tolist(), strict=True))
        bad = [name for name in names if not math.isfinite(self._latest[name])]
        if bad:
            terms = [name for name in bad if name != "loss"] or bad
            raise NonFiniteLoss(f"step {step}: {', '.join(f'{t} is {self._latest[t]}' for t in terms)}")

    def latest(self) -> dict[str, float]:
        self.check()
        return self._latest


# --------------------------------------------------------------------------------------------- steps of the loop


def seed_pass(seed: int, number: int, generator: torch.Generator, shared: torch.Generator | None = None) -> None:
    """Every random number of a forward pass follows from (seed, number of the pass, rank); of `shared`, without rank.

    A resumed run draws what the first one drew, and nothing but the pass itself can disturb its random numbers.
    """
    everywhere = seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9
    here = (everywhere + distributed.rank() * 0x94D049BB133111EB) % 2**63
    torch.manual_seed(here)
    generator.manual_seed(here ^ 0x5851F42D4C957F2D)
    if shared is not None:
        shared.manual_seed(everywhere % 2**63 ^ 0x5851F42D4C957F2D)


def _wrap(method: Method, device: torch.device, compiled: bool) -> nn.Module:
    wrapped: nn.Module = method
    if distributed.world_size() > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the new name of broadcast_buffers is not in every torch
            wrapped = DistributedDataParallel(
                method,
                device_ids=[device.index] if device.type == "cuda" else None,
                broadcast_buffers=False,  # batch norms see the same global statistics everywhere
                gradient_as_bucket_view=True,
            )
    if compiled:
        wrapped.compile()
    return wrapped


def _no_sync(module: nn.Module, active: bool) -> Any:
    return module.no_sync() if active and isinstance(module, DistributedDataParallel) else nullcontext()


def _evaluate(method: Method, evaluators: Sequence[Evaluator]) -> dict[str, float]:
    """Every process takes part (an evaluator may split its work); the encoder comes back in training mode."""
    method.encoder.eval()
    try:
        with torch.no_grad():
            return {name: value for evaluator in evaluators for name, value in evaluator(method.encoder)}
    finally:
        method.encoder.train()


def _every(epochs: float, step: int, steps_per_epoch: int) -> bool:
    """True on the step that completes another `epochs` epochs."""
    if epochs <= 0:
        return False
    period = max(1, round(epochs * steps_per_epoch))
    return step % period == 0


def _agree(wanted: bool, step: int, device: torch.device) -> bool:
    """Processes must do the same thing at the same step; asking every step would make the device wait."""
    if distributed.world_size() == 1:
        return wanted
    return step % STEPS_BETWEEN_AGREEMENTS == 0 and distributed.any_process(wanted, device)


def _line(
    epoch: float, plan: Plan, values: dict[str, float], lr: float, speed: float, waited: float, eta: float
) -> str:
    terms = "  ".join(f"{name} {value:.3f}" for name, value in values.items() if "/" not in name)
    minutes, seconds = divmod(round(eta), 60)
    of = f"/{plan.epochs:g}" if plan.budget_seconds is None else ""
    return (
        f"epoch {epoch:.2f}{of}  {terms}  lr {lr:.2e}  {speed:.0f} img/s  data wait {100 * waited:.0f} %  "
        f"ETA {minutes}:{seconds:02d}"
    )
