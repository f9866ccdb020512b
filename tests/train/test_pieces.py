"""Schedules, optimizer, checkpoints, log and monitor, one by one."""

from __future__ import annotations

import copy
import errno
import json
import math
import pickle
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from patchmix.build import METHODS
from patchmix.evaluate.monitor import collapse_warning, effective_rank, health
from patchmix.files import write_text, writing
from patchmix.methods.options import IBOTOptions
from patchmix.nn.vit import create_encoder
from patchmix.run import _warning
from patchmix.schedules import WarmupCosine
from patchmix.train import optimizer as optimizer_module
from patchmix.train.checkpoint import Checkpoints, load_checkpoint
from patchmix.train.log import TRACKERS, BadSamples, RunLog, forget_after, read_metrics
from patchmix.train.optimizer import build_optimizer, set_hyperparameters
from patchmix.train.watch import name_dead_workers


def test_warm_up_rises_to_the_peak_and_the_cosine_ends_at_the_end() -> None:
    schedule = WarmupCosine(1.0, 0.1, warmup=0.2)
    assert schedule(0.0) == 0.0
    assert schedule(0.1) == pytest.approx(0.5)
    assert schedule(0.2) == pytest.approx(1.0)
    assert schedule(0.6) == pytest.approx(0.55)
    assert schedule(1.0) == pytest.approx(0.1)


@pytest.mark.parametrize("total", [1, 2, 3, 7, 500])
@pytest.mark.parametrize("warmup_steps", [0, 1, 2])
def test_runs_of_any_length_have_a_schedule(total: int, warmup_steps: int) -> None:
    """Runs shorter than their warm-up crash elsewhere."""
    warmup = min(warmup_steps, total - 1) / total
    schedule = WarmupCosine(1.0, 0.0, warmup=warmup, step=1 / total)
    values = [schedule(i / total) for i in range(total)]
    assert all(math.isfinite(v) and 0.0 <= v <= 1.0 for v in values)


def test_decay_is_for_matrices_only() -> None:
    module = nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.LayerNorm(2)})
    module.pos_embed = nn.Parameter(torch.zeros(1, 4, 2))
    module.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    optimizer = build_optimizer(module)
    names = {id(p): name for name, p in module.named_parameters()}
    groups = [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]
    assert groups == [{"linear.weight", "pos_embed"}, {"linear.bias", "norm.weight", "norm.bias"}]
    set_hyperparameters(optimizer, lr=0.3, weight_decay=0.2)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.3, 0.2), (0.3, 0.0)]
    assert optimizer.defaults["fused"]
    other = build_optimizer(module, betas=(0.8, 0.95), eps=1e-6).defaults
    assert (other["betas"], other["eps"]) == ((0.8, 0.95), 1e-6)


def test_decay_reaches_the_1d_parameters_that_are_matrices_in_the_authors_code() -> None:
    encoder = create_encoder("vit_tiny_patch4_16", dim=24, depth=1, heads=2)
    method = METHODS["ibot"](encoder, IBOTOptions(norm_last_layer=False, head_hidden=8, head_bottleneck=4, head_out=16))
    decayed = build_optimizer(method).param_groups[0]["params"]
    assert any(p is method.mask_token for p in decayed) and any(p is method.head.lengths for p in decayed)  # type: ignore[union-attr]
    lengths = method.head.prototypes.detach().norm(dim=1)  # type: ignore[operator, union-attr]
    assert 0.3 < float(lengths.mean()) < 0.8  # that of nn.Linear's rows, 0.577 on average


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_muon_is_torchs_with_q_k_and_v_apart(autocast: torch.dtype | None) -> None:
    """torch's works in bf16, so the updates agree to about two digits."""
    torch.manual_seed(0)
    module = nn.Module()
    module.encoder = nn.Module()
    module.encoder.blocks = nn.ModuleList([nn.ModuleDict({"qkv": nn.Linear(16, 48), "fc1": nn.Linear(16, 64)})])
    module.head = nn.Linear(16, 8)
    qkv, fc1 = module.encoder.blocks[0]["qkv"].weight, module.encoder.blocks[0]["fc1"].weight  # type: ignore[index]
    parts = [nn.Parameter(part.clone()) for part in [*qkv.detach().chunk(3), fc1.detach()]]
    theirs = torch.optim.Muon(parts, lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    others = [p for p in module.parameters() if p is not qkv and p is not fc1]
    plain = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in others])
    adamw = torch.optim.AdamW(plain, lr=0.1, weight_decay=0.0)
    ours = build_optimizer(module, name="muon", autocast=autocast)
    for step in range(4):
        torch.manual_seed(step)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        assert qkv.grad is not None and fc1.grad is not None
        for part, gradient in zip(parts, [*qkv.grad.chunk(3), fc1.grad], strict=True):
            part.grad = gradient.clone()
        for twin, parameter in zip(plain, others, strict=True):
            assert parameter.grad is not None
            twin.grad = parameter.grad.clone()
        set_hyperparameters(ours, lr=0.1, weight_decay=0.2)
        ours.param_groups[0]["weight_decay"] = 0.0
        ours.step()
        theirs.step()
        adamw.step()
        if step == 1:  # a resumed run goes on with the same momentum
            state = copy.deepcopy(ours.state_dict())
            ours = build_optimizer(module, name="muon", autocast=autocast)
            ours.load_state_dict(state)
    expected = torch.cat([part.detach() for part in parts[:3]])
    torch.testing.assert_close(qkv.detach(), expected, rtol=0, atol=0.02)
    torch.testing.assert_close(fc1.detach(), parts[3].detach(), rtol=0, atol=0.02)
    assert float((fc1.detach() - parts[3].detach()).norm() / parts[3].detach().norm()) < (0.02 if autocast else 0.01)
    torch.testing.assert_close([p.detach() for p in others], [p.detach() for p in plain])


def test_muon_orthogonalizes_in_the_dtype_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    module, used = nn.Module(), []
    module.encoder = nn.Module()
    module.encoder.blocks = nn.Linear(8, 4, bias=False)

    def spy(matrices: Tensor, dtype: torch.dtype) -> Tensor:
        used.append(dtype)
        return matrices

    monkeypatch.setattr(optimizer_module, "orthogonalize", spy)
    for autocast in (None, torch.bfloat16):
        optimizer = build_optimizer(module, name="muon", autocast=autocast)
        module.encoder.blocks.weight.grad = torch.ones(4, 8)
        optimizer.step()
    assert used == [torch.float32, torch.bfloat16]


def test_checkpoints_keep_the_newest_and_last_points_to_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.last is None
    for step in (5, 10, 15):
        checkpoints.save({"step": step, "method": {"w": torch.full((2,), float(step))}}, step)
    assert sorted(p.name for p in tmp_path.glob("step-*.pt")) == ["step-000000010.pt", "step-000000015.pt"]
    assert load_checkpoint(tmp_path / "last")["step"] == 15
    assert checkpoints.last == tmp_path / "step-000000015.pt"
    assert not list(tmp_path.glob(".*"))


def test_checkpoints_need_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=PermissionError(1, "Operation not permitted")))  # exFAT
    for step in (5, 10):
        Checkpoints(tmp_path).save({"step": step, "method": {}}, step)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000010.pt"]


def test_a_run_that_goes_back_replaces_its_later_checkpoints(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        Checkpoints(tmp_path, keep=8).save({"step": step, "method": {}}, step)
    written = Checkpoints(tmp_path, keep=2).save({"step": 5, "method": {}}, 5)
    assert sorted(p.name for p in tmp_path.glob("step-*.pt")) == ["step-000000004.pt", "step-000000005.pt"]
    assert Checkpoints(tmp_path).last == written and load_checkpoint(tmp_path / "last")["step"] == 5


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail() -> None:
        with writing(path) as file:
            file.write(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


class Evil:
    def __reduce__(self):
        return (print, ("this must never run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a checkpoint"),
        (b"hello, I am text", "is not a checkpoint"),
        (pickle.dumps({"step": Evil()}), "is not a checkpoint"),
    ],
)
def test_bad_checkpoints_are_refused_in_one_line(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value)
    assert capsys.readouterr().out == ""


def test_a_truncated_checkpoint_and_a_foreign_one(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save({"step": 1, "method": {"w": torch.randn(1000)}}, whole)
    (tmp_path / "half.pt").write_bytes(whole.read_bytes()[:2000])
    with pytest.raises(ValueError, match="incomplete"):
        load_checkpoint(tmp_path / "half.pt")
    torch.save({"step": Evil(), "method": {}}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="holds more than tensors"):
        load_checkpoint(tmp_path / "evil.pt")
    torch.save({"state_dict": {}}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match="is not a patchmix checkpoint"):
        load_checkpoint(tmp_path / "foreign.pt")


def test_metrics_survive_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n{"kind": "tra')
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    forget_after(path, 1)
    assert path.read_text() == '{"kind": "train", "step": 1}\n'


@pytest.mark.parametrize("resumed_at", [0, 4])
def test_a_resumed_run_does_not_repeat_rows(tmp_path: Path, resumed_at: int) -> None:
    """Evaluations before the first step, and after the last one, are done again."""
    for step in (0, resumed_at):
        log = RunLog(tmp_path, step=step)
        for row in [("monitor", 0), ("train", 4), ("monitor", 4)] if step == 0 else [("monitor", 4)]:
            log.record(*row, {"rank": 1.0})
        log.close()
    rows = [(row["kind"], row["step"]) for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert rows == [("monitor", 0), ("train", 4), ("monitor", 4)]
    board = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in board.Scalars("monitor/rank")] == [0, 4]


def test_log_writes_json_lines_and_tensorboard(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.record("train", 3, {"loss": 1.5, "odd": math.nan})
    log.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {"kind": "train", "step": 3, "loss": 1.5, "odd": None}
    assert list(tmp_path.glob("events*"))


def test_a_full_disk_that_tensorboard_notices_is_told_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = RunLog(tmp_path)
    monkeypatch.setattr(log._board, "add_scalar", full)
    with pytest.raises(
        ValueError, match=r"No space left on device\); free some space, then repeat the call \(.*--resume auto\)"
    ):
        log.record("train", 1, {"loss": 1.0})
    log.close()


def test_a_silent_log_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(None)
    log.record("train", 1, {"loss": 1.0})
    log.say("nothing")
    log.show_progress(0.5, "nothing", remaining=1.0)
    log.close()
    assert capsys.readouterr().out == ""


def _see_broken_images(rank: int, folder: Path) -> None:
    group = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": 2}
    torch.distributed.init_process_group("gloo", **group)
    log = RunLog(None if rank else folder)
    said = log.say = Mock()  # type: ignore[method-assign]
    on_bad_sample = BadSamples(log, limit=3)
    on_bad_sample([["a: broken", "b: broken"], ["b: broken", "c: broken"]][rank])
    said.assert_not_called()
    log.record("train", 1, {})
    assert [call.args[0][9:18] for call in said.call_args_list] == ["a: broken", "b: broken", "c: broken"]
    log.record("train", 2, {})
    on_bad_sample(["d: broken"] if rank else [])
    with pytest.raises(ValueError, match=r"4 images can't be decoded, more than 1 %; the first is a: broken"):
        log.record("train", 3, {})
    log.close()
    torch.distributed.destroy_process_group()


def test_rank_0_names_the_broken_images_of_all_ranks(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(_see_broken_images, (tmp_path,), nprocs=2, start_method="spawn")


def test_one_process_names_broken_images_at_once() -> None:
    log = RunLog(None)
    said = log.say = Mock()  # type: ignore[method-assign]
    on_bad_sample = BadSamples(log, limit=1)
    on_bad_sample(["a: broken"])
    on_bad_sample(["a: broken"])
    said.assert_called_once_with("warning: a: broken (replaced by another image)", style="yellow")
    with pytest.raises(ValueError, match="2 images can't be decoded"):
        on_bad_sample(["b: broken"])


def test_health_of_known_features() -> None:
    axes = dict(health(torch.eye(6).repeat(10, 1)))
    assert axes["rank"] == pytest.approx(6.0, rel=1e-6)
    same = dict(health(torch.ones(20, 4)))
    assert same["rank"] == pytest.approx(1.0, abs=1e-6)
    assert same["mean_cosine"] == pytest.approx(1.0)
    assert same["feature_std"] == 0.0


def test_mean_cosine_against_all_pairs() -> None:
    features = torch.randn(30, 5) + 0.5
    unit = nn.functional.normalize(features.double(), dim=1)
    pairs = [float(unit[i] @ unit[j]) for i in range(30) for j in range(30) if i != j]
    assert dict(health(features))["mean_cosine"] == pytest.approx(sum(pairs) / len(pairs))


def test_effective_rank_is_the_exponential_of_an_entropy() -> None:
    features = torch.diag(torch.tensor([3.0, 1.0]))
    expected = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert effective_rank(features) == pytest.approx(expected, rel=1e-6)


def test_an_untrained_network_is_not_called_collapsed() -> None:
    assert _warning(None, 0, {"rank": 1.1}) is None
    assert "rank 1.1" in str(_warning(None, 10, {"rank": 1.1}))


def test_collapse_warning() -> None:
    assert collapse_warning({"rank": 40.0, "mean_cosine": 0.3}) is None
    assert "rank 1.1" in str(collapse_warning({"rank": 1.1, "mean_cosine": 0.3}))
    assert "mean cosine 0.999" in str(collapse_warning({"rank": 30.0, "mean_cosine": 0.999}))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_is_sent_everything_when_asked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[dict, int]] = []

    class Session:
        def log(self, values: dict, step: int) -> None:
            sent.append((values, step))

        def finish(self) -> None:
            sent.append(({}, -1))

    fake = types.ModuleType(name)
    fake.init = lambda **arguments: Session()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, fake)
    log = RunLog(tmp_path)
    log.track({name: "project", "mlflow": None}, {"a": 1})
    log.record("train", 3, {"loss": 1.5})
    log.close()
    assert sent == [({"train/loss": 1.5}, 3), ({}, -1)]


def test_mlflow_gets_parameters_and_names_with_one_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []
    fake = types.ModuleType("mlflow")
    for call in ("set_experiment", "start_run", "log_params", "log_metrics", "end_run"):
        setattr(fake, call, lambda *args, call=call, **keywords: calls.append((call, *args, keywords)))
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    log = RunLog(tmp_path / "run")
    log.track({"mlflow": "birds"}, {"recipe": "demo", "train": {"seed": 0}})
    log.record("train", 3, {"loss": 1.5, "oto/chance": 2.0, "odd": math.nan})
    log.close()
    assert calls == [
        ("set_experiment", "birds", {}),
        ("start_run", {"run_name": "run"}),
        ("log_params", {"train.seed": 0}, {}),
        ("log_metrics", {"train/loss": 1.5, "train/oto.chance": 2.0}, {"step": 3}),
        ("end_run", {}),
    ]


@pytest.mark.parametrize("name", TRACKERS)
def test_without_a_tracker_the_remedy_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    log = RunLog(tmp_path)
    with pytest.raises(ValueError, match=rf"pip install 'patchmix-ssl\[{name}\]'"):
        log.track({name: "project"}, {})
    log.close()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed."),
        ConnectionResetError(104, "Connection reset by peer"),  # it was handing over a batch
        EOFError(),
    ],
)
def test_a_dead_process_of_the_loader_is_named_in_one_line(error: Exception) -> None:
    with pytest.raises(ValueError, match=r"a data-loading worker died .*--resume auto"), name_dead_workers():
        raise error
    with pytest.raises(RuntimeError, match="another"), name_dead_workers():
        raise RuntimeError("another reason")


def test_a_closed_terminal_does_not_end_the_training(tmp_path: Path) -> None:
    """Nor a pipe that nobody reads any more, such as that of `| head`."""
    script = f"""
import os
from pathlib import Path
from patchmix.train.log import RunLog
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(reader)
log = RunLog(Path({str(tmp_path)!r}))
for step in (1, 2):
    log.say("a line")
    log.record("train", step, {{"loss": 1.0}})
log.close()
"""
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
