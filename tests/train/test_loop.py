from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from patchmix import distributed
from patchmix.evaluate.monitor import collapse_warning
from patchmix.methods.method import Method
from patchmix.nn.tokens import TokenDropout
from patchmix.schedules import Cosine, Linear, WarmupCosine
from patchmix.train.checkpoint import Checkpoints, load_checkpoint
from patchmix.train.log import RunLog, read_metrics
from patchmix.train.loop import Plan, seed_pass, train
from patchmix.train.optimizer import build_optimizer
from patchmix.train.watch import Clock, Interrupted, NonFiniteLoss


@dataclass
class Batch:
    x: Tensor
    bad: tuple[str, ...] = ()

    def to(self, device: torch.device) -> Batch:
        return self


@dataclass
class Numbers:
    """Batches whose content follows from their position."""

    steps_per_epoch: int = 4
    accumulate: int = 1
    positions: list[int] = field(default_factory=list)

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        position = start_step * self.accumulate
        while True:
            self.positions.append(position)
            yield Batch(torch.randn(8, 3, generator=torch.Generator().manual_seed(position)))
            position += 1


class Toy(Method):
    def __init__(self, poison_at: int = -1) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 2)
        self.calls: list[tuple[str, float]] = []
        self.poison_at, self.steps = poison_at, 0

    def before_step(self, progress: float) -> None:
        self.calls.append(("before", progress))

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        noise = torch.rand((), generator=self.generator) + torch.rand(())
        value = (self.encoder(x) ** 2).mean() * (1 + noise)
        if self.steps == self.poison_at:
            value = value * math.nan
        self.steps += 1
        return {"loss": value, "part": value.detach(), "steady": torch.tensor(1.0)}

    def after_step(self, progress: float) -> None:
        self.calls.append(("after", progress))


def plan(**changes: object) -> Plan:
    settings: dict[str, object] = {"epochs": 3, "batch_size": 8, "log_every": 1, "monitor_every": 0.0}
    return Plan(lr=WarmupCosine(0.1, 0.0, 0.1), weight_decay=Cosine(0.0, 0.1), **(settings | changes))  # type: ignore[arg-type]


def run(method: Method, folder: Path, loader: Numbers | None = None, **changes: object) -> list[dict]:
    evaluators = changes.pop("evaluators", ())
    warning = changes.pop("warning", lambda step, values: None)
    resume_from = changes.pop("resume_from", None)
    log = RunLog(folder, step=resume_from["step"] if resume_from else 0)
    try:
        train(
            method,
            loader or Numbers(),
            plan(**changes),
            optimizer=build_optimizer(method),
            device=torch.device("cpu"),
            prepare=lambda batch: batch.x,
            log=log,
            checkpoints=Checkpoints(folder / "checkpoints"),
            resume_from=resume_from,
            evaluators=evaluators,
            warning=warning,
        )
    finally:
        log.close()
    return read_metrics(folder / "metrics.jsonl")


def test_steps_and_progress(tmp_path: Path) -> None:
    torch.manual_seed(0)
    method = Toy()
    rows = run(method, tmp_path)
    assert [r["step"] for r in rows] == list(range(1, 13))
    befores = [p for name, p in method.calls if name == "before"]
    assert befores == [i / 12 for i in range(12)]
    assert [name for name, _ in method.calls] == ["before", "after"] * 12
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert load_checkpoint(tmp_path / "checkpoints" / "last")["step"] == 12


def test_the_loss_that_is_not_finite_is_named_and_the_last_good_checkpoint_kept(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match="step 6: part is nan"):
        run(Toy(poison_at=6), tmp_path)
    state = load_checkpoint(tmp_path / "checkpoints" / "last")
    assert state["step"] == 4  # the end of the first epoch
    assert all(torch.isfinite(t).all() for t in state["method"].values())


def test_accumulation_equals_the_large_batch_where_terms_are_independent(tmp_path: Path) -> None:
    class Mean(Method):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": (self.encoder(x) ** 2).mean()}

    class Joined(Numbers):
        def batches(self, start_step: int = 0) -> Iterator[Batch]:
            parts = Numbers().batches()
            while True:
                yield Batch(torch.cat([next(parts).x, next(parts).x]))

    methods = []
    for name, loader, accumulate in (("one", Joined(), 1), ("two", Numbers(accumulate=2), 2)):
        torch.manual_seed(1)
        methods.append(Mean())
        run(methods[-1], tmp_path / name, loader, accumulate=accumulate)
    torch.testing.assert_close(methods[0].encoder.weight, methods[1].encoder.weight)
    logged = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("one", "two")]
    assert logged[0] == pytest.approx(logged[1]) and len(logged[0]) > 1


def test_the_optimizer_leaves_fixed_parameters_alone_until_they_are_released(tmp_path: Path) -> None:
    class Held(Toy):
        def fixed_parameters(self) -> list[nn.Parameter]:
            return [self.encoder.weight] if self.steps <= 6 else []

        def after_step(self, progress: float) -> None:
            seen.append(self.encoder.weight.detach().clone())

    seen: list[Tensor] = []
    method = Held()
    started = method.encoder.weight.detach().clone()
    optimizer = build_optimizer(method)
    with closing(RunLog(tmp_path)) as log:
        train(
            method, Numbers(), plan(), optimizer=optimizer, device=torch.device("cpu"), prepare=lambda b: b.x, log=log
        )
    moved = [not torch.equal(weight, started) for weight in seen]
    assert moved == [False] * 6 + [True] * 6
    assert int(optimizer.state[method.encoder.weight]["step"]) == 6
    assert int(optimizer.state[method.encoder.bias]["step"]) == 12


def test_clipping_bounds_the_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.stack([g.norm() for g in grads]).norm().item())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    run(Toy(), tmp_path / "a", clip_grad=1e-3)
    assert max(norms) <= 1e-3 * (1 + 1e-4)
    norms.clear()
    run(Toy(), tmp_path / "b")
    assert max(norms) > 1e-3


class FakeTime:
    """A clock that only the loader moves: no test waits, none depends on the machine's speed."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


def test_a_budget_ends_on_time_with_the_schedule_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    for module in ("loop", "watch"):
        monkeypatch.setattr(f"patchmix.train.{module}.time", clock)

    class Slow(Numbers):
        def batches(self, start_step: int = 0) -> Iterator[Batch]:
            for batch in super().batches(start_step):
                clock.now += 0.02
                yield batch

    rows = run(Toy(), tmp_path, Slow(), budget_seconds=1.5, epochs=1000)
    assert 1.48 <= rows[-1]["seconds"] <= 1.5
    assert 74 <= rows[-1]["step"] <= 75
    assert rows[-1]["progress"] == 1.0
    assert rows[-1]["lr"] < 0.1 * max(r["lr"] for r in rows)
    progress = [r["progress"] for r in rows]
    assert progress == sorted(progress)


def test_the_last_evaluation_ends_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    for module in ("loop", "watch"):
        monkeypatch.setattr(f"patchmix.train.{module}.time", clock)

    class Slow(Numbers):
        def batches(self, start_step: int = 0) -> Iterator[Batch]:
            for batch in super().batches(start_step):
                clock.now += 0.02
                yield batch

    def evaluate(encoder: nn.Module) -> Iterator[tuple[str, float]]:
        clock.now += 0.3
        yield "value", 1.0

    how = {"budget_seconds": 1.5, "epochs": 1000, "evaluators": [evaluate]}
    run(Toy(), tmp_path, Slow(), **how)
    assert 1.46 <= clock.now - 1000.0 <= 1.5 + 1e-6

    state = load_checkpoint(tmp_path / "checkpoints" / "last")
    run(Toy(), tmp_path, Slow(), **how, resume_from=state)  # it is done
    assert load_checkpoint(tmp_path / "checkpoints" / "last")["step"] == state["step"]

    with pytest.raises(NonFiniteLoss):
        run(Toy(poison_at=30), tmp_path / "stopped", Slow(), **how)
    state, began = load_checkpoint(tmp_path / "stopped" / "checkpoints" / "last"), clock.now
    run(Toy(), tmp_path / "stopped", Slow(), **how, resume_from=state)
    assert 1.46 <= state["seconds"] + clock.now - began <= 1.5 + 1e-6


def test_every_pass_draws_its_own_numbers() -> None:
    method = Toy()
    drawn = set()
    for seed, number in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        seed_pass(seed, number, method)
        drawn |= {torch.rand(()).item(), torch.rand((), generator=method.generator).item()}
    assert len(drawn) == 10


def test_a_budget_leaves_room_for_the_last_evaluation() -> None:
    clock = Clock(12, 100.0, first_step=0, spent_before=85.0)
    cpu = torch.device("cpu")
    assert clock.progress(0, cpu) == pytest.approx(0.85, abs=0.01)
    clock.reserve = 10.0
    assert clock.progress(1, cpu) == pytest.approx(85 / 90, abs=0.01)


def test_a_quicker_evaluation_does_not_set_progress_back() -> None:
    cpu, clock = torch.device("cpu"), Clock(12, 100.0, first_step=0, spent_before=60.0)
    clock.reserve = 20.0
    before = clock.progress(1, cpu)
    assert before == pytest.approx(60 / 80, abs=0.01)
    clock.reserve = 5.0
    assert clock.progress(2, cpu) == before


def test_time_spent_before_a_resume_counts() -> None:
    clock = Clock(12, 100.0, first_step=7, spent_before=100.0)
    assert clock.progress(7, torch.device("cpu")) == 1.0


def test_evaluators_run_at_the_start_in_between_and_at_the_end(tmp_path: Path) -> None:
    modes = []

    def evaluate(encoder: nn.Module) -> Iterator[tuple[str, float]]:
        modes.append((encoder.training, torch.is_grad_enabled()))
        yield "value", float(len(modes))

    method = Toy()
    rows = run(method, tmp_path, monitor_every=1.0, evaluators=[evaluate])
    assert [(r["step"], r["value"]) for r in rows if r["kind"] == "monitor"] == [
        (0, 1.0),
        (4, 2.0),
        (8, 3.0),
        (12, 4.0),
    ]
    assert modes == [(False, False)] * 4
    assert method.encoder.training


def test_what_is_wrong_with_the_values_is_said_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluators = [lambda encoder: iter([("rank", 1.2), ("mean_cosine", 0.4)])]
    run(Toy(), tmp_path, evaluators=evaluators, warning=lambda step, values: collapse_warning(values))
    assert "warning: the features look collapsed: effective rank 1.2" in capsys.readouterr().out


def test_resume_replays_nothing_and_forgets_what_was_logged_after_the_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(3)
    whole = run(Toy(), tmp_path / "whole")

    torch.manual_seed(3)
    with pytest.raises(NonFiniteLoss):
        run(Toy(poison_at=10), tmp_path / "cut")
    state = load_checkpoint(tmp_path / "cut" / "checkpoints" / "last")
    assert state["step"] == 8
    assert len(read_metrics(tmp_path / "cut" / "metrics.jsonl")) == 10
    loader = Numbers()
    rows = run(Toy(), tmp_path / "cut", loader, resume_from=state)
    assert loader.positions[0] == 8
    keep = ("step", "loss", "lr")
    assert [[r[k] for k in keep] for r in rows] == [[r[k] for k in keep] for r in whole]


def test_views_are_small_and_tokens_few_at_the_stages_that_say_so(tmp_path: Path) -> None:
    seen: list[tuple[int, int, float]] = []

    class Views(Numbers):
        def batches(self, start_step: int = 0) -> Iterator[Batch]:
            while True:
                yield Batch([torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32), torch.randn(2, 3, 8, 8)])  # type: ignore[arg-type]

    class Spy(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.encoder.patch_drop = TokenDropout(prefix=1)

        def forward(self, x: list[Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
            assert x[0].shape == x[1].shape
            seen.append((x[0].shape[-1], x[2].shape[-1], round(self.encoder.patch_drop.share, 2)))  # type: ignore[union-attr, arg-type]
            return super().forward(torch.ones(8, 3))

    run(Spy(), tmp_path, Views(), epochs=1, image_sizes=(16, 32), token_dropout=Linear(0.5, 0.0, duration=1.0))
    assert seen == [(16, 8, 0.5), (16, 8, 0.38), (32, 8, 0.25), (32, 8, 0.12)]


def test_the_encoder_is_evaluated_in_its_mode_for_it(tmp_path: Path) -> None:
    method = Toy()
    start = method.encoder.weight.detach().sum().item()

    def evaluate(encoder: nn.Module) -> Iterator[tuple[str, float]]:
        assert not encoder.training
        yield "sum", encoder.weight.detach().sum().item()  # type: ignore[operator, union-attr]

    rows = [row for row in run(method, tmp_path, evaluators=[evaluate]) if row["kind"] == "monitor"]
    assert rows[0]["sum"] == pytest.approx(start) and rows[-1]["sum"] != start
    assert all(module.training for module in method.modules())


def test_no_process_ends_before_the_checkpoint_of_an_interrupted_run_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Toy):
        def after_step(self, progress: float) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    waited: list[list[str]] = []
    monkeypatch.setattr(
        distributed, "barrier", lambda: waited.append([path.name for path in tmp_path.glob("checkpoints/step-*.pt")])
    )
    with pytest.raises(Interrupted, match="stopped at step 1"):
        run(Stopped(), tmp_path)
    assert waited == [["step-000000001.pt"]]


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path: Path) -> None:
    """A gradient may be infinite where the loss is not."""

    class Overflow(Toy):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            losses = super().forward(x)
            if self.steps == 6:
                losses["loss"] = losses["loss"] + (0 * self.encoder.weight).sum().sqrt()
            return losses

    with pytest.raises(NonFiniteLoss):
        run(Overflow(), tmp_path, checkpoint_epochs=0.25)
    kept = load_checkpoint(tmp_path / "checkpoints" / "last")
    assert kept["step"] == 5
    assert all(tensor.isfinite().all() for tensor in kept["method"].values())
