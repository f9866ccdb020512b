"""`patchmix ablate`: trains and evaluates every row of an ablation, continues where it stopped, keeps the table."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from patchmix import distributed
from patchmix.config import Config, changes, check_known, differences, flat, from_yaml
from patchmix.data.sources import open_source
from patchmix.device import resolve_device
from patchmix.evaluate.features import LAYERS, usual_resize
from patchmix.evaluate.knn import HEADLINE_K, TEMPERATURE, fitting_ks
from patchmix.evaluate.labeled import Labeled, open_labeled
from patchmix.evaluate.results import Result, read_results
from patchmix.evaluate.sweep import usual_epochs
from patchmix.methods.options import METHOD_OPTIONS
from patchmix.recipes import start
from patchmix.report.ablation_table import AblationRun, AblationTable, print_table, write_table
from patchmix.run import Run, run_config
from patchmix.settings import Ablate
from patchmix.study.ablation import VARIED, AblationRow, choose_rows, masked_weights, rows_of
from patchmix.study.flops import config_flops
from patchmix.train.checkpoint import Checkpoints, load_checkpoint
from patchmix.train.log import read_metrics
from patchmix.train.watch import NonFiniteLoss


@dataclass(frozen=True)
class Planned:
    """A row with a seed, where it is kept, and what it is to be."""

    row: AblationRow
    seed: int
    folder: Path
    config: Config


def ablate(settings: Ablate, console: Console | None = None) -> AblationTable:
    """Trains every row × seed in its own run folder `out`/ROW-seedK, evaluates it, and keeps `out`/ablation.md.

    The same call continues: complete rows, also of plain `pretrain` with the same configuration, are not trained
    again, and are evaluated once. Raises NonFiniteLoss at the end if a row failed with one.
    """
    out, seeds, data = settings.out, settings.seeds, settings.run.data.path
    every_row = rows_of(settings.ablation, METHOD_OPTIONS)
    chosen = choose_rows(every_row, settings.rows)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds are {list(seeds)}; give at least one, each of them once")
    configs = row_configs(settings, every_row)  # every mistake is found before the long part
    planned = [
        Planned(row, seed, out / f"{row.name}-seed{seed}", configs[row.name].replace(seed=seed))
        for seed in seeds
        for row in chosen
    ]
    first = planned[0].config
    with distributed.process_group(resolve_device(first.runtime.device)):
        console = console or Console(quiet=not distributed.is_main())
        labeled = open_test_data(settings.test_data, data, console)
        fingerprint = open_source(data, "train", cache_bytes=0, progress=False).fingerprint()
        planned = [adopt(each, fingerprint) for each in planned]
        distributed.barrier()
        test_data = settings.test_data or data
        evaluated_on = None if labeled is None else test_data
        table = AblationTable(settings.ablation, chosen, seeds, data, evaluated_on, describe(first, chosen[0]), [])
        for i, each in enumerate(planned):
            console.rule(f"row {i + 1} of {len(planned)}: {each.row.name}, seed {each.seed}")
            trained = train_and_evaluate(each, labeled, test_data, console)
            table = dataclasses.replace(table, runs=[*table.runs, trained])
            if distributed.is_main():
                write_table(table, out)
            print_table(table, console)
        console.print(f"wrote {out / 'ablation.md'}, .csv, .json and .png", soft_wrap=True)
    failed = [run for run in table.runs if run.failure is not None]
    if failed:
        names = ", ".join(f"{run.row}-seed{run.seed}" for run in failed)
        raise NonFiniteLoss(f"{len(failed)} of {len(planned)} runs failed: {names}; the first: {failed[0].failure}")
    return table


# --------------------------------------------------------------------------------------------------- configuration


def row_configs(settings: Ablate, rows: Sequence[AblationRow]) -> dict[str, Config]:
    """What `patchmix pretrain` would be configured with for each row, by the row's name."""
    run = settings.run
    epochs = run.train.epochs
    plain = start(settings.recipe, config=settings.config, model=run.model.name, method=run.method.name, epochs=epochs)
    changed = changes(plain, run)  # what the user set
    varied = {"seed": "--seeds", **dict.fromkeys(VARIED[settings.ablation], "--rows")}
    for name, instead in varied.items():
        if name in changed:
            raise ValueError(f"{name} is what ablation {settings.ablation!r} varies; choose with {instead}")
    own = settings_by_row(settings.row_settings, rows, varied)
    if (
        run.train.budget is not None
        and epochs != start(settings.recipe, config=settings.config, model=run.model.name).train.epochs
    ):
        raise ValueError("--epochs gives every row the same data, --budget the same time; give one of them")
    configs = {}
    for row in rows:
        length = epochs * row.length if run.train.budget is None else epochs
        method = row.method or run.method.name
        config = start(settings.recipe, config=settings.config, model=run.model.name, method=method, epochs=length)
        # An option that this row's method does not have is meant for others.
        known = flat(config)
        config = config.replace(**{name: value for name, value in changed.items() if name in known})
        config = config.replace(**row.settings, **own.get(row.name, {}))
        if row.length != 1.0 and run.budget_minutes is not None:
            config = config.replace(budget=f"{run.budget_minutes * row.length:g}min")
        if row.terms is not None:
            if len(getattr(config.method.options, "weights", ())) != 3:
                raise ValueError(f"method {method} has no terms to leave out; use --method patchmix")
            config = config.replace(weights=masked_weights(config.method.options.weights, row.terms))
        configs[row.name] = config
    return configs


def settings_by_row(
    texts: Sequence[str], rows: Sequence[AblationRow], varied: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """`dino:clip_grad=3` → {"dino": {"clip_grad": 3}}."""
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        row, colon, name = key.strip().partition(":")
        if not equals or not colon:
            raise ValueError(f"--row-set {text!r} is not ROW:KEY=VALUE, such as dino:clip_grad=3")
        check_known(row, [each.name for each in rows], "row")
        if name in varied:
            raise ValueError(f"--row-set {text!r}: {name} is what the ablation varies; choose rows with --rows")
        settings.setdefault(row, {})[name] = yaml.safe_load(value)
    return settings


def describe(config: Config, row: AblationRow) -> str:
    """What all rows have in common."""
    epochs, minutes = config.train.epochs / row.length, (config.budget_minutes or 0.0) / row.length
    length = f"{minutes:g} min" if minutes else f"{epochs:g} epochs"
    return f"{config.model.name}, recipe {config.recipe}, batch {config.train.batch_size}, {length}"


# ------------------------------------------------------------------------------------------------- what is there


def adopt(planned: Planned, fingerprint: str) -> Planned:
    """The same, after checking that a run in its folder has the same configuration and data."""
    last = Checkpoints(planned.folder / "checkpoints").last
    path = planned.folder / "config.yaml"
    if not path.is_file() or not (last or (planned.folder / "encoder.safetensors").is_file()):
        return planned
    found = from_yaml(path.read_text(encoding="utf-8"))
    changed = differences(found, planned.config)
    if last is not None and load_checkpoint(last).get("data") != fingerprint:
        changed.append(f"data.path: {found.data.path} → {planned.config.data.path}, other images")
    elif last is None and found.data.path != planned.config.data.path:
        changed.append(f"data.path: {found.data.path} → {planned.config.data.path}")
    if changed:
        raise ValueError(
            f"{planned.folder} holds a run with another configuration ({'; '.join(changed)}); choose another --out, "
            "or move that run away"
        )
    return planned


def train_and_evaluate(planned: Planned, labeled: Labeled | None, data: str, console: Console) -> AblationRun:
    """Trains what is not trained, evaluates what is not evaluated, and reads the folder."""
    trained = AblationRun(planned.row.name, planned.seed, str(planned.folder))
    if not (planned.folder / "encoder.safetensors").is_file():
        try:
            run_config(planned.config, planned.folder, resume="auto")
        except NonFiniteLoss as error:
            console.print(f"failed: {error}", style="bold red", soft_wrap=True, markup=False)
            return dataclasses.replace(trained, failure=str(error))
    else:
        console.print(f"{planned.folder} is trained", soft_wrap=True)
    run = Run(planned.folder)
    metrics = read_metrics(planned.folder / "metrics.jsonl")
    steps = [row for row in metrics if row["kind"] == "train"]
    health: dict[str, Any] = next((row for row in reversed(metrics) if row["kind"] == "monitor"), {})
    return dataclasses.replace(
        trained,
        images_seen=steps[-1]["step"] * planned.config.train.batch_size if steps else None,
        seconds=steps[-1]["seconds"] if steps else None,
        flops_per_image=config_flops(planned.config),
        results={} if labeled is None else evaluate(run, labeled, data, planned.config),
        health={key: value for key, value in health.items() if key not in ("kind", "step", "epoch")},
    )


# ----------------------------------------------------------------------------------------------------------- evaluation


def open_test_data(test_data: str | Path | None, data: str | Path, console: Console) -> Labeled | None:
    """The labeled data, or None where there is none; data that was asked for must have labels."""
    try:
        labeled = open_labeled(data if test_data is None else test_data)
    except ValueError as error:
        if test_data is not None:
            raise
        console.print(f"rows are not evaluated, only their health is shown: {error}", soft_wrap=True, markup=False)
        return None
    test = "each by the others" if labeled.test is None else f"{len(labeled.test):,} test images"
    console.print(f"evaluated on {labeled.train.name}: {labeled.classes} classes, {test}", soft_wrap=True, markup=False)
    return labeled


def evaluate(run: Run, labeled: Labeled, data: str, config: Config) -> dict[str, Result]:
    """kNN and the fast linear protocol, from results.jsonl where they are there already."""
    file = run.load()
    common = {"layer": LAYERS["token"], "resize": usual_resize(file.architecture.image_size)}
    voters = len(labeled.train) - int(labeled.test is None)
    ks, tested = fitting_ks(voters), labeled.with_test()
    asked = {
        "knn": (
            labeled.fingerprint(),
            {"k": HEADLINE_K if HEADLINE_K in ks else ks[0], "temperature": TEMPERATURE, **common},
        ),
        "linear-fast": (
            tested.fingerprint(),
            {"epochs": float(usual_epochs(len(tested.train))), "seed": 0, **common},
        ),
    }
    results: dict[str, Result] = {}
    weights = file.digest()
    for found in read_results(run.path):
        if found.protocol in asked and found.weights == weights:
            fingerprint, settings = asked[found.protocol]
            if found.fingerprint == fingerprint and settings.items() <= found.settings.items():
                results[found.protocol] = found
    distributed.barrier()  # all have read before one writes
    options = {"device": config.runtime.device, "workers": config.runtime.workers}
    if "knn" not in results:
        results["knn"] = run.knn(data, **options)
    if "linear-fast" not in results:
        results["linear-fast"] = run.linear(data, protocol="fast", **options)
    return results
