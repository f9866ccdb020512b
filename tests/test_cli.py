"""The command line as a user meets it: one line for a mistake, exit codes, no traceback."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import patchmix
from patchmix.cli import from_keywords, main, parse
from patchmix.config import Config, to_yaml
from patchmix.evaluate.results import read_results
from patchmix.files import write_text
from patchmix.settings import Adapt, Bench, Knn, Pretrain
from patchmix.train.watch import Interrupted
from tests.evaluate.conftest import write_image


def fails(capsys: pytest.CaptureFixture[str], *args: str, code: int = 2) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in args])
    assert stop.value.code == code
    error = capsys.readouterr().err
    assert error.startswith("patchmix: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


TINY = [
    *("--recipe", "demo", "--model", "vit_tiny_patch8_32", "--workers", "0", "--batch-size", "32"),
    *("--dim", "24", "--depth", "1", "--stem", "patch"),
    *("--head-hidden", "32", "--head-out", "16"),
    *("--monitor-bank", "64", "--monitor-queries", "32"),
]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere/at/all", "--out", "OUT"], "nowhere/at/all"),
        (["cifar1O", "--out", "OUT"], "cifar10"),
        (["--data", "shapes", "--out", "OUT"], "DATA is missing; it has no flag: patchmix pretrain DATA"),
        (["shapes", "--out", "OUT", "--std", "0", "0", "0"], "std is 0.0; it must be greater than 0"),
        (["shapes:64", "--out", "OUT", "--batch-size", "1"], "one image per pass is too few for batch norms"),
        (["shapes", "--out", "OUT", "--recipe", "papre"], "did you mean 'paper'"),
        (["shapes", "--out", "OUT", "--model", "vit_smal_patch16_224"], "did you mean vit_small_patch16_224"),
        (["shapes", "--out", "OUT", "--lr", "1"], "unknown option '--lr'; did you mean '--base-lr'"),
        (
            ["shapes", "--out", "OUT", "--tau", "1"],
            "unknown option '--tau'; patchmix pretrain --help lists the options",
        ),
        (["shapes", "--out", "OUT", "--gpus", "2"], "unknown option '--gpus'; patchmix pretrain --help lists"),
        (["shapes", "--out", "OUT", "--teacher", "a"], "unknown option '--teacher'; it belongs to method distill"),
        (["shapes", "--out", "OUT", "--method", "byol", "--epsilon", "1"], "'--epsilon'; it belongs to method swav"),
        (["shapes", "--out", "OUT", "--epochs", "-1"], "epochs is -1; it must be greater than 0"),
        (["shapes", "--out", "OUT", "--base-lr", "inf"], "base_lr is inf; it must be less than inf"),
        (["shapes", "--out", "OUT", "--monitor-every", "inf"], "monitor_every is inf; it must be less than inf"),
        (["shapes", "--out", "OUT", "--budget", "soon"], "write it as 45min"),
        (["shapes", "--out", "OUT", "--devices", "0"], "devices is 0; it must be greater than or equal to 1"),
        (["shapes:40", "--out", "OUT", "--recipe", "demo"], "fewer than the batch size"),
        (["shapes", "--out", "OUT", "--recipe", "demo", "--resume", "OUT/none.pt"], "there is no checkpoint"),
        (["shapes", "--out", "OUT", "--recipe", "demo", "--init-from", "OUT/none"], "does not exist"),
        (["shapes", "--out", "OUT", "--recipe", "demo", "--device", "cuda"], "torch sees no GPU"),
        (
            ["shapes", "--out", "OUT", "--recipe", "demo", "--views", "gpu"],
            "--views is 'gpu'; it must be one of cpu, device; ",
        ),
        (
            ["shapes", "--out", "OUT", "--mix", "patchmx"],
            "cutmix+mixup, resizemix, regionswap; did you mean 'patchmix'?",
        ),
    ],
)
def test_mistakes_end_in_one_line(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in args and __import__("torch").cuda.is_available():
        pytest.skip("needs a machine without a GPU: hide yours with CUDA_VISIBLE_DEVICES=")
    args = [a.replace("OUT", str(tmp_path / "run")) for a in args]
    assert message in fails(capsys, "pretrain", *args)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_unwritable_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert "choose another --out" in fails(capsys, "pretrain", "shapes:64", "--out", tmp_path / "file" / "run", *TINY)


def test_adapt_takes_its_weights_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["adapt", "weights", "shapes:64", "--out", str(tmp_path / "run"), "--init-from", "other"]
    assert "WEIGHTS and --init-from both give the weights to start from" in fails(capsys, *given)


def test_choices_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ablation is 'mx'; it must be one of mix, num-mix" in fails(capsys, "ablate", "mx", "shapes", "--out", "a")
    error = fails(capsys, "import", "a.pth", "--out", "a", "--encoder", "bas")
    assert "did you mean 'base'?" in error and "None" not in error


def test_pretrain_leaves_a_complete_run_and_its_config_runs_again(tmp_path: Path) -> None:
    import timm
    import torch
    from safetensors.torch import load_file

    import patchmix
    from patchmix.config import from_yaml
    from patchmix.run import run_config

    out = tmp_path / "run"
    main(["pretrain", "shapes:64", "--out", str(out), "--epochs", "1", *TINY])
    for name in ("config.yaml", "metrics.jsonl", "encoder.safetensors", "checkpoints/last"):
        assert (out / name).exists(), name
    assert list(out.glob("events*"))

    encoder = patchmix.Run(out).encoder()
    plain = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=4, num_classes=0
    )
    plain.load_state_dict(load_file(out / "encoder.safetensors"))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(plain.eval()(images), encoder(images))

    again = run_config(from_yaml((out / "config.yaml").read_text()), tmp_path / "again")
    left, right = load_file(out / "encoder.safetensors"), load_file(again.encoder_path)
    assert all(torch.equal(left[k], right[k]) for k in left)

    third = patchmix.pretrain(
        "shapes:64", tmp_path / "third", recipe="demo", model="vit_tiny_patch8_32", epochs=1, batch_size=32, workers=0,
        init_from=str(out), dim=24, depth=1, stem="patch", head_hidden=32, head_out=16, monitor_bank=64,
        monitor_queries=32,
    )  # fmt: skip
    assert third.encoder_path.exists()


def test_a_budget_too_short_for_one_step_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["pretrain", "shapes:64", "--out", str(tmp_path / "run"), "--budget", "0.001s", *TINY, "--quiet"])
    assert "warning: the budget ended before the first step: the encoder is untrained" in capsys.readouterr().out
    assert patchmix.load(tmp_path / "run").origin["epochs"] == 0.0  # of the training, not of the recipe


def test_init_from_a_model_of_another_size(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wider = [*TINY, "--dim", "48"]
    error = fails(capsys, "pretrain", "shapes:64", "--out", tmp_path / "b", *wider, "--init-from", trained_run)
    assert "do not fit the model" in error


def test_recipes_lists_every_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    main(["recipes"])
    text = capsys.readouterr().out
    for word in ("vit_tiny_patch2_32", "vit_base_patch16_224", "cifar100", "official", "demo", "77.4", "your images"):
        assert word in text


def test_help_needs_no_torch() -> None:
    """`patchmix --help` must be quick: the heavy imports wait until a command runs."""
    code = "import sys, patchmix.cli; assert not {'torch', 'timm', 'cv2'} & set(sys.modules), 'heavy imports'"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


@pytest.mark.parametrize("name", patchmix.__all__)
def test_names_of_the_package_are_not_names_of_modules(name: str) -> None:
    """Importing `patchmix.NAME` as a module would replace the function of that name."""
    assert getattr(patchmix, name)
    assert importlib.util.find_spec(f"patchmix.{name}") is None


def test_version_without_importing_torch() -> None:
    """In a process of its own, as `python -m patchmix`."""
    import timm
    import torch

    command = [sys.executable, "-X", "importtime", "-m", "patchmix", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    assert result.stdout.startswith(f"patchmix {patchmix.__version__} (torch {torch.__version__.split('+')[0]}")
    assert f"timm {timm.__version__}, {cuda}, Python 3." in result.stdout
    assert " torch\n" not in result.stderr


def test_recipes_and_help_need_no_torch() -> None:
    code = "import sys\nfrom patchmix.cli import main\nmain(['recipes', '--json'])\ntry: main(['knn', '--help'])\n"
    code += "except SystemExit: pass\nassert not {'torch', 'timm', 'cv2', 'numpy'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows, _ = json.JSONDecoder().raw_decode(result.stdout)
    assert {row["recipe"] for row in rows} >= {"paper", "official", "demo"} and rows[0]["knn"] == 73.3
    assert "--layers" in result.stdout and "--json, --quiet, --verbose" in result.stdout


def test_json_is_all_that_stdout_gets(own_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["knn", str(own_run), "--data", "shapes:80", "--device", "cpu", "--k", "5", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["protocol"] == "knn" and 0 <= result["metrics"]["top1"] <= 1
    main(["compare", str(own_run), "--json"])
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)
    assert row["result"]["metrics"] == result["metrics"] and row["config"]["recipe"] == "demo"
    assert "tiny" in printed.err  # the table for people
    main(["flops", "--model", "vit_tiny_patch2_32", "--method", "patchmix", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert round(row["linear"] / 1e9, 1) == 49.9


def test_names_that_are_not_utf8_are_printed_and_recorded(
    own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    try:
        for i in range(6):
            write_image(data / "ab"[i % 2] / f"{i}.png", np.full((8, 8, 3), 40 * i, np.uint8))
    except OSError:
        pytest.skip("needs a file system that takes any bytes in names, such as ext4: choose it with --basetemp")
    printed = io.BytesIO()
    screen = io.TextIOWrapper(printed, encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", screen)
        main(["knn", str(own_run), "--data", str(data), "--device", "cpu", "--k", "1"])
    assert b"caf\\udce9" in printed.getvalue()
    assert read_results(own_run)[-1].data == str(data)
    write_text(tmp_path / "list.json", json.dumps([str(data)], ensure_ascii=False))
    assert json.loads((tmp_path / "list.json").read_text()) == [str(data)]


def test_quiet_and_verbose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(name: str, *options: str) -> str:
        main(
            [
                "pretrain",
                "shapes:64",
                "--out",
                str(tmp_path / name),
                "--epochs",
                "2",
                *TINY,
                "--log-every",
                "1",
                *options,
            ]
        )
        return "".join(capsys.readouterr())

    assert printed("a", "--quiet") == ""
    assert printed("b", "--verbose").count(" %  epoch") >= 4  # a line for each step
    with pytest.raises(ValueError, match="nowhere"):  # the traceback
        main(["pretrain", "nowhere", "--out", str(tmp_path / "d"), "--verbose"])
    assert "PATCHMIX_OUTPUT" not in os.environ


def test_an_interrupted_demo_is_continued_by_the_call_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: Config, out: Path, *, resume: str | None = None) -> None:
        assert (config.recipe, resume) == ("demo", "auto")
        raise Interrupted(signal.SIGINT, "stopped at step 3; its checkpoint is written")

    monkeypatch.setattr("patchmix.demo.run_config", interrupted)
    error = fails(capsys, "demo", "--out", str(tmp_path), "--budget", "9s", code=128 + signal.SIGINT)
    assert error.endswith(f"its checkpoint is written; continue with patchmix demo --out {tmp_path} --budget 9s\n")


def test_no_color(own_run: Path) -> None:
    """Colors come with FORCE_COLOR, as at a terminal, and go with NO_COLOR."""
    command = [sys.executable, "-m", "patchmix", "recipes"]
    for settings, colored in (
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({}, False),
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **settings})
        assert bool(re.search(r"\x1b\[[\d;]*3\dm", result.stdout)) == colored, settings


def test_completion(tmp_path: Path) -> None:
    def complete(*words: str) -> list[str]:
        """What bash offers for the last word."""
        script = f"source {tmp_path / 'bash'}; COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; "
        result = subprocess.run(
            ["bash", "-c", script + "_patchmix; echo ${COMPREPLY[@]}"], capture_output=True, text=True
        )
        assert not result.stderr
        return result.stdout.split()

    code = "from patchmix.cli import completion; print(completion('bash'))"
    (tmp_path / "bash").write_text(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert complete("patchmix", "kn") == ["knn"]
    assert complete("patchmix", "show", "m") == ["mix", "map"]
    assert complete("patchmix", "knn", "--lay") == ["--layers"]
    assert complete("patchmix", "pretrain", "photos", "--num-m") == ["--num-mix", "--num-mix-stages"]
    assert complete("patchmix", "show", "mix", "--js") == ["--json"]
    assert complete("patchmix", "pretrain", "photos", "--dat") == complete("patchmix", "ablate", "--abl") == []
    assert complete("patchmix", "knn", "--dat") == ["--data"]
    assert complete("patchmix", "ablate", "--row") == ["--rows", "--row-set"]


def test_a_run_is_repeated_from_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from safetensors.torch import load_file

    main(
        [
            "pretrain",
            "shapes:64",
            "--out",
            str(tmp_path / "a"),
            "--epochs",
            "1",
            *TINY,
            "--mix",
            "cutmix",
            "--region-weight",
            "0",
        ]
    )
    main(["pretrain", "shapes:64", "--out", str(tmp_path / "b"), "--config", str(tmp_path / "a")])
    left, right = (load_file(tmp_path / name / "encoder.safetensors") for name in "ab")
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert "mix: cutmix" in (tmp_path / "b" / "config.yaml").read_text()
    capsys.readouterr()
    error = fails(capsys, "pretrain", "shapes:64", "--out", tmp_path / "c", "--config", tmp_path / "none.yaml")
    assert "there is no configuration" in error
    continued = ["pretrain", "shapes:64", "--out", str(tmp_path / "a"), "--resume", "auto"]
    assert "resume with the same one (--config RUN)" in fails(capsys, *continued)
    main([*continued, "--config", str(tmp_path / "a")])


def test_evaluate_compare_embed(own_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as pq

    from patchmix.data.sources import open_source
    from patchmix.evaluate.results import read_results

    run, set_up = str(own_run), ["--data", "shapes:80", "--device", "cpu"]
    main(["knn", run, *set_up, "--k", "5", "10"])
    main(["linear", run, *set_up, "--protocol", "fast", "--epochs", "1"])
    assert [result.protocol for result in read_results(own_run)] == ["knn", "linear-fast"]
    assert read_results(own_run)[0].settings["k"] == 5
    knn = read_results(own_run)[0].metrics["top1"]
    capsys.readouterr()
    main(["compare", run])
    out = capsys.readouterr().out
    assert "tiny" in out and f"{100 * knn:.2f}" in out

    main(["embed", run, "--data", "shapes:80", "--out", str(tmp_path / "e.parquet"), "--device", "cpu"])
    table = pq.read_table(tmp_path / "e.parquet")
    assert table.column_names == ["path", "label", "vector"]
    first = table.slice(0, 1).to_pylist()[0]
    assert len(table) == 80 and (first["path"], first["label"]) == ("shapes-train#0", 0)
    features = patchmix.load(run).embed([open_source("shapes:80").load(0)], device="cpu")
    assert first["vector"] == pytest.approx(features[0].tolist(), abs=1e-4)
    assert "must end in .parquet" in fails(capsys, "embed", run, "--data", "shapes:80", "--out", tmp_path / "e.txt")


@pytest.mark.parametrize("verb", ["knn", "import", "export", "finetune"])
@pytest.mark.parametrize("kind", ["text", "truncated", "pickle", "nan", "missing", "resnet"])
def test_hostile_checkpoints(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, kind: str
) -> None:
    import pickle

    import torch
    from safetensors.torch import load_file

    path = tmp_path / "bad.pth"
    weights = load_file(trained_run / "encoder.safetensors")
    if kind == "text":
        path.write_text("these are not weights")
    elif kind == "truncated":
        torch.save(weights, path)
        path.write_bytes(path.read_bytes()[:3000])
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(print))
    elif kind == "nan":
        torch.save(weights | {"norm.weight": torch.full_like(weights["norm.weight"], float("nan"))}, path)
    elif kind == "resnet":
        torch.save({"conv1.weight": torch.zeros(4, 3, 7, 7), "layer1.0.conv1.weight": torch.zeros(4, 4, 3, 3)}, path)
    more = {"knn": ["--data", "shapes:80"], "finetune": ["--data", "shapes:80"]}
    out = ["--out", tmp_path / "out"]
    error = fails(capsys, verb, path, *more.get(verb, []), *out)
    assert "bad.pth" in error
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").rglob("*.safetensors"))


def test_what_is_missing_in_a_python_call_is_named() -> None:
    with pytest.raises(ValueError, match="out is missing; give it as out=…"):
        patchmix.pretrain("shapes")
    with pytest.raises(ValueError, match="data is missing"):
        patchmix.knn("runs/a")


def test_a_number_that_decides_other_defaults_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, "pretrain", "shapes", "--out", "nowhere", "--epochs", "many")
    assert "--epochs" in error and "'many'" in error


def test_python_functions_say_where_their_keywords_are_listed() -> None:
    doc = patchmix.knn.__doc__
    assert doc.startswith("Evaluate an encoder") and "`patchmix knn --help`" in doc and "batch_size" in doc


def test_python_calls_take_no_more_values_than_have_a_place() -> None:
    with pytest.raises(TypeError, match="3 positional arguments; allowed are data, out"):
        from_keywords(Pretrain, "shapes", "runs/a", "paper")


def test_python_calls_take_what_the_command_line_takes(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(from_keywords(Pretrain, "shapes", "a", recipe="fast", dim=24).run))
    again = from_keywords(Pretrain, "shapes", "b", config=str(tmp_path), resume=Path("c.pt"), init_from=Path("d"))
    assert (again.run.model.dim, again.resume, again.run.model.init_from) == (24, "c.pt", "d")
    adapted = from_keywords(Adapt, "timm:vit", "shapes", "a", weights=(1, 0.5, 0.5))
    assert (adapted.weights, adapted.run.method.options.weights) == ("timm:vit", (1, 0.5, 0.5))
    with pytest.raises(TypeError, match="out is given twice"):
        from_keywords(Pretrain, "shapes", "a", out="b")
    with pytest.raises(TypeError, match="weights is given twice"):
        from_keywords(Knn, "a", "shapes", weights="b")
    with pytest.raises(ValueError, match="devices starts processes of the command line"):
        from_keywords(Pretrain, "shapes", "a", devices=2)


def test_what_is_given_beside_a_config_wins_or_is_refused(tmp_path: Path) -> None:
    run = from_keywords(Pretrain, "shapes", "a", recipe="fast", dim=24, depth=1, budget="2h").run
    (tmp_path / "config.yaml").write_text(to_yaml(run))

    def parsed(*args: str) -> Config:
        config: Config = parse(Pretrain, ["shapes", "--out", "a", *args], "patchmix pretrain").run
        return config

    with_epochs = parsed("--config", str(tmp_path), "--epochs", "10")
    assert (with_epochs.train.epochs, with_epochs.train.budget, with_epochs.model.dim) == (10, None, 24)
    other = parsed("--config", str(tmp_path), "--model", "vit_small_patch16_224", "--depth", "3").model
    assert (other.name, other.dim, other.depth) == ("vit_small_patch16_224", None, 3)
    with pytest.raises(ValueError, match="epochs 1 and budget 6s both give the length"):
        parsed("--epochs", "1", "--budget", "6s")
    with pytest.raises(ValueError, match="epochs 1 and budget 6s both give the length"):
        from_keywords(Pretrain, "shapes", "a", epochs=1, budget="6s")
    with pytest.raises(ValueError, match="a recipe and a config both give all settings"):
        parsed("--config", str(tmp_path), "--recipe", "fast")
    (tmp_path / "config.yaml").write_text(to_yaml(run).replace("dim: 24", "dim: 0"))
    with pytest.raises(ValueError, match=r"config\.yaml: model\.dim is 0; it must be greater than or equal to 1"):
        parsed("--config", str(tmp_path))


def test_devices_beside_a_launcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    line = fails(capsys, "pretrain", "shapes", "--out", "a", "--devices", "2")
    assert "devices is 2, but a launcher has started 4 processes; leave --devices out" in line
    assert parse(Pretrain, ["shapes", "--out", "a", "--devices", "4"], "patchmix pretrain").devices == 4


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ("--mix cutmix --num-mix 2", "num_mix has no effect, because mix is cutmix"),
        ("--no-momentum-encoder --momentum 0.9", "momentum has no effect, because momentum_encoder is False"),
        ("--local-size 16", "local_size has no effect, because local_crops is 0"),
        ("--method sdmp --mix mixup --pasted-area 0 1", "pasted_area has no effect, because mix is mixup"),
        ("--method swav --queue-start 0.5", "queue_start has no effect, because queue_length is 0"),
        (
            "--init-from a --initialization mocov3",
            "initialization has no effect, because init_from is a",
        ),  # the default
        ("--init-from a --model same --stem conv", "stem has no effect, because model is same"),
        ("--local-size 96", "local_size has no effect, because local_crops is 0"),  # the default
        ("--weights 0 1 1 --plain-share 0.5", "plain_share has no effect, because weights is (0.0, 1.0, 1.0)"),
        (
            "--weights 1 0 0 --mixed-ramp 0.5",
            "mixed_ramp has no effect, because weights is (1.0, 0.0, 0.0) and region_weight is 0.0",
        ),
        ("--weights 1 0 0 --region-weight 1 --mixed-ramp 0.5 --image-sizes 32 --no-author-positions", None),
        (
            "--method ibot --mask-probability 0 --mask-ratio 0 1",
            "mask_ratio has no effect, because mask_probability is 0.0",
        ),
        ("--method mocov3 --momentum 0.9 --local-crops 2 --local-size 16", None),
        ("--recipe fast --mix cutmix", None),  # fast's own M was not asked for
        ("--local-size 16 --devices 2", None),  # the first of the two processes tells it
    ],
)
def test_options_without_effect_are_named(
    options: str, unused: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = f"patchmix: warning: {unused}\n" if unused else ""
    parse(Pretrain, ["shapes", "--out", "a", *options.split()], "patchmix pretrain")
    assert capsys.readouterr().err == expected
    monkeypatch.setenv("RANK", "1")
    parse(Pretrain, ["shapes", "--out", "a", *options.split()], "patchmix pretrain")
    assert not capsys.readouterr().err


def test_options_without_effect_are_named_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    from_keywords(Pretrain, "shapes", "a", mix="mixup", mix_blocks=(2, 1))
    assert "mix_blocks has no effect, because mix is mixup" in capsys.readouterr().err
    from_keywords(Adapt, "timm:weights", "shapes", "a", initialization="mimetic")
    assert "initialization has no effect, because init_from is timm:weights" in capsys.readouterr().err


def test_bench_needs_no_data_but_takes_it(tmp_path: Path) -> None:
    def data(*args: str) -> str:
        return parse(Bench, list(args), "patchmix bench").run.data.path

    (tmp_path / "config.yaml").write_text(to_yaml(from_keywords(Bench, "photos", recipe="fast").run))
    assert data("--recipe", "fast") == data() == from_keywords(Bench).run.data.path == "shapes"
    assert data("photos", "--recipe", "fast") == data("--config", str(tmp_path)) == "photos"


@pytest.mark.parametrize("args", [["--version"], ["pretrain", "--help"]])
def test_a_reader_that_has_enough_is_no_error(args: list[str]) -> None:
    command = [sys.executable, "-m", "patchmix", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
