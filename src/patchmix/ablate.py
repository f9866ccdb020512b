"""`patchmix ablate`: trains and judges every row of an ablation, goes on where it stopped, and keeps the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from patchmix import build, distributed
from patchmix.config import Config, check_known, differences, from_yaml
from patchmix.data.sources import open_source
from patchmix.device import resolve_device
from patchmix.evaluate.features import LAYERS, usual_resize
from patchmix.evaluate.knn import HEADLINE_K, TEMPERATURE, fitting_ks
from patchmix.evaluate.labelled import Labelled, open_labelled
from patchmix.evaluate.results import Result, read_results
from patchmix.evaluate.sweep import usual_epochs
from patchmix.run import Run, configure, run_config
from patchmix.study.ablation_rows import (
    AblationRow,
    check_settings,
    choose_rows,
    masked_weights,
    option_of,
    rows_of,
    settings_for,
)
from patchmix.study.ablation_table import Ablated, Trained, print_table, write_table
from patchmix.study.recipe_table import step_flops_per_image
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


def ablate(
    ablation: str,
    data: str | Path,
    out: str | Path,
    *,
    seeds: Sequence[int] = (0,),
    rows: Sequence[str] = (),
    epochs: float | None = None,
    budget: str | float | None = None,
    test_data: str | Path | None = None,
    recipe: str = "paper",
    config: str | Path | None = None,
    model: str | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    device: str | None = None,
    settings: Sequence[str] = (),
    console: Console | None = None,
) -> Ablated:
    """Trains every row × seed in its own run folder `out`/ROW-seedK, judges it, and keeps `out`/ablation.md; see
    docs/ablations.md.

    ablation: mix, num-mix, terms, epochs or method; rows: some of its rows by name, all by default.
    epochs, budget: the same data or the same wall-clock time for every row, by default the recipe's epochs; rows of
        `epochs` are trained for a share of it.
    test_data: labelled data to judge on; by default `data`, where it has labels.
    settings: as in `pretrain`. An option of the method goes to the rows whose method has it; "dino:optim.clip_grad=3"
        is for one row only.
    The same call goes on where it stopped: complete rows, also of plain `pretrain` with the same configuration, are
    not trained again, and are judged once. Raises NonFiniteLoss at the end if a row failed with one.
    """
    out = Path(out)
    every_row = rows_of(ablation, build.METHODS)
    chosen = choose_rows(every_row, rows)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds are {list(seeds)}; give at least one, each of them once")
    if epochs is not None and budget is not None:
        raise ValueError("--epochs gives every row the same data, --budget the same time; give one of them")
    check_settings(ablation, settings, every_row)
    arguments: dict[str, Any] = {
        "recipe": recipe,
        "config": config,
        "model": model,
        "epochs": epochs,
        "budget": budget,
        "batch_size": batch_size,
        "workers": workers,
        "device": device,
    }
    check_options(every_row, data, arguments, settings)
    planned = [
        Planned(row, seed, out / f"{row.name}-seed{seed}", row_config(row, data, arguments, settings, seed))
        for seed in seeds
        for row in chosen
    ]
    first = planned[0].config
    with distributed.process_group(resolve_device(first.runtime.device)):
        console = console or Console(quiet=not distributed.is_main())
        labelled = open_judge(test_data, data, console)
        fingerprint = open_source(data, "train", cache_bytes=0, progress=False).fingerprint()
        planned = [adopt(each, fingerprint) for each in planned]  # every mistake is found before the long part
        distributed.barrier()
        judge_data = str(test_data or data)
        judged_on = None if labelled is None else judge_data
        table = Ablated(ablation, chosen, seeds, str(data), judged_on, describe(first, chosen[0]), [])
        for i, each in enumerate(planned):
            console.rule(f"row {i + 1} of {len(planned)}: {each.row.name}, seed {each.seed}")
            trained = train_and_judge(each, labelled, judge_data, console)
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


def row_config(
    row: AblationRow, data: str | Path, arguments: Mapping[str, Any], settings: Sequence[str], seed: int
) -> Config:
    """What `patchmix pretrain` would make of the row's settings."""
    given = settings_for(row, settings)
    plain = _without_options(row, data, arguments, settings)
    known = build.option_defaults(plain.method.name)
    # An option that this row's method does not have is meant for others.
    fitting = [setting for setting in given if option_of(setting) is None or option_of(setting) in known]
    arguments = {**arguments, "method": row.method, "seed": seed}
    if row.length != 1.0 and plain.train.budget_minutes is not None:
        arguments["budget"] = plain.train.budget_minutes * row.length
    elif row.length != 1.0:
        arguments["epochs"] = plain.train.epochs * row.length
        if arguments["config"] is not None:  # recipes shorten the warm-up by themselves
            fitting.insert(0, f"optim.warmup_epochs={plain.optim.warmup_epochs * row.length}")
    own = list(row.settings)
    if row.terms is not None:
        if "weights" not in known:
            raise ValueError(f"method {plain.method.name} has no terms to leave out; take --set method.name=patchmix")
        options = configure(data, **arguments, settings=fitting).method.options
        weights = build.method_options(plain.method.name, options).weights
        own.append(f"method.weights={masked_weights(weights, row.terms)}")
    complete = configure(data, **arguments, settings=[*fitting, *own])
    build.method_options(complete.method.name, complete.method.options)
    return complete


def check_options(
    rows: Sequence[AblationRow], data: str | Path, arguments: Mapping[str, Any], settings: Sequence[str]
) -> None:
    """A ValueError for an option that no row's method has."""
    for setting in settings:
        takers = [row for row in rows if settings_for(row, [setting])]
        option = option_of(settings_for(takers[0], [setting])[0])
        if option is not None:
            names = {_without_options(row, data, arguments, settings).method.name: None for row in takers}
            known = {option: None for name in names for option in build.option_defaults(name)}
            check_known(option, known, f"option of {'any method here' if len(names) > 1 else f'method {min(names)}'}:")


def _without_options(
    row: AblationRow, data: str | Path, arguments: Mapping[str, Any], settings: Sequence[str]
) -> Config:
    general = [setting for setting in settings_for(row, settings) if option_of(setting) is None]
    return configure(data, **arguments, method=row.method, settings=general)


def describe(config: Config, row: AblationRow) -> str:
    """What all rows have in common."""
    train = config.train
    epochs, minutes = train.epochs / row.length, (train.budget_minutes or 0.0) / row.length
    length = f"{minutes:g} min" if minutes else f"{epochs:g} epochs"
    return f"{config.model.name}, recipe {config.recipe}, batch {train.batch_size}, {length}"


# ------------------------------------------------------------------------------------------------- what is there


def adopt(planned: Planned, fingerprint: str) -> Planned:
    """The same, or, where its folder holds a run, continued in that run's own words; a ValueError if it is another.

    Options that are written out and options that are left at the same default make no difference.
    """
    last = Checkpoints(planned.folder / "checkpoints").last
    path = planned.folder / "config.yaml"
    if not path.is_file() or not (last or (planned.folder / "encoder.safetensors").is_file()):
        return planned
    found = from_yaml(path.read_text(encoding="utf-8"))
    changed = differences(_written_out(found), _written_out(planned.config))
    if last is not None and load_checkpoint(last).get("data") != fingerprint:
        changed.append(f"data.path: {found.data.path} → {planned.config.data.path}, other images")
    elif last is None and found.data.path != planned.config.data.path:
        changed.append(f"data.path: {found.data.path} → {planned.config.data.path}")
    if changed:
        raise ValueError(
            f"{planned.folder} holds a run with another configuration ({'; '.join(changed)}); choose another --out, "
            "or move that run away"
        )
    return dataclasses.replace(planned, config=dataclasses.replace(planned.config, method=found.method))


def _written_out(config: Config) -> Config:
    """With every option of the method."""
    name = config.method.name
    options = dataclasses.asdict(build.method_options(name, config.method.options))
    return dataclasses.replace(config, method=dataclasses.replace(config.method, options=options))


def train_and_judge(planned: Planned, labelled: Labelled | None, data: str, console: Console) -> Trained:
    """Trains what is not trained, judges what is not judged, and reads the folder."""
    trained = Trained(planned.row.name, planned.seed, str(planned.folder))
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
        flops_per_image=step_flops_per_image(planned.config),
        results={} if labelled is None else judge(run, labelled, data, planned.config),
        health={key: value for key, value in health.items() if key not in ("kind", "step", "epoch")},
    )


# ----------------------------------------------------------------------------------------------------------- judging


def open_judge(test_data: str | Path | None, data: str | Path, console: Console) -> Labelled | None:
    """The labelled data, or None where there is none; data that was asked for must have labels."""
    try:
        labelled = open_labelled(data if test_data is None else test_data)
    except ValueError as error:
        if test_data is not None:
            raise
        console.print(f"rows are not judged, only their health is shown: {error}", soft_wrap=True, markup=False)
        return None
    test = "each by the others" if labelled.test is None else f"{len(labelled.test):,} test images"
    console.print(f"judged on {labelled.train.name}: {labelled.classes} classes, {test}", soft_wrap=True, markup=False)
    return labelled


def judge(run: Run, labelled: Labelled, data: str, config: Config) -> dict[str, Result]:
    """kNN and the fast linear protocol, from results.jsonl where they are there already."""
    file = run.load()
    common = {"layer": LAYERS["token"], "resize": usual_resize(file.architecture.image_size)}
    voters = len(labelled.train) - int(labelled.test is None)
    ks, tested = fitting_ks(voters), labelled.with_test()
    asked = {
        "knn": (
            labelled.fingerprint(),
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
