"""`patchmix ablate`: trains and evaluates every row of an ablation, and continues where it stopped."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from patchmix import distributed
from patchmix.config import Config, check_known, differences, flat, read_config
from patchmix.data.sources import open_source
from patchmix.data.views import usual_resize
from patchmix.device import resolve_device
from patchmix.evaluate.features import LAYERS
from patchmix.evaluate.knn import HEADLINE_K, TEMPERATURE, fitting_ks
from patchmix.evaluate.labeled import Labeled, open_labeled
from patchmix.evaluate.results import Result, known_result, read_results
from patchmix.evaluate.sweep import usual_epochs
from patchmix.methods.options import METHOD_OPTIONS
from patchmix.recipes import start
from patchmix.report.ablation_table import (
    VARIED,
    AblationRow,
    AblationRun,
    AblationTable,
    choose_rows,
    print_table,
    rows_of,
    write_table,
)
from patchmix.run import Run, completed, run_config
from patchmix.settings import Ablate
from patchmix.study.flops import config_flops
from patchmix.train.checkpoint import Checkpoints, load_checkpoint
from patchmix.train.log import read_metrics
from patchmix.train.watch import NonFiniteLoss


def ablate(settings: Ablate, console: Console | None = None) -> AblationTable:
    """Trains every row × seed in its own run folder `out`/ROW-seedK, evaluates it, and keeps `out`/ablation.md.

    The same call continues: complete rows, also of plain `pretrain` with the same configuration, are not trained
    again, and are evaluated once. Raises NonFiniteLoss at the end if a row failed with one.
    """
    out, seeds, data = settings.out, settings.seeds, settings.run.data.path
    every_row = rows_of(settings.ablation, METHOD_OPTIONS)
    chosen = choose_rows(every_row, settings.rows)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds are {list(seeds)}; give at least one, without repeats")
    configs = row_configs(settings, every_row)  # every mistake is found before the long part
    planned = [
        (AblationRun(row.name, seed, str(out / f"{row.name}-seed{seed}")), configs[row.name].replace(seed=seed))
        for seed in seeds
        for row in chosen
    ]
    first = configs[chosen[0].name]
    with distributed.process_group(resolve_device(first.runtime.device), first.runtime.timeout_minutes):
        console = console or Console(quiet=not distributed.is_main(), markup=False)
        labeled = open_test_data(settings.test_data, data, console, first.model.in_chans)
        fingerprint = open_source(data, "train", cache_bytes=0, in_chans=first.model.in_chans).fingerprint()
        for run, config in planned:
            check_found(Path(run.folder), config, fingerprint)
        distributed.barrier()
        test_data = settings.test_data or data
        evaluated_on = None if labeled is None else test_data
        table = AblationTable(settings.ablation, chosen, seeds, data, evaluated_on, describe(first, chosen[0]), [])
        for i, (run, config) in enumerate(planned):
            console.rule(f"row {i + 1} of {len(planned)}: {run.row}, seed {run.seed}")
            run = train_and_evaluate(run, config, labeled, test_data, console)
            table = dataclasses.replace(table, runs=[*table.runs, run])
            if distributed.is_main():
                write_table(table, out)
            print_table(table, console)
        console.print(f"wrote {out / 'ablation.md'}, .csv, .json and .png", soft_wrap=True)
    failed = [run for run in table.runs if run.failure is not None]
    if failed:
        names = ", ".join(f"{run.row}-seed{run.seed}" for run in failed)
        raise NonFiniteLoss(f"{len(failed)} of {len(planned)} runs failed: {names}; the first: {failed[0].failure}")
    return table


def row_configs(settings: Ablate, rows: Sequence[AblationRow]) -> dict[str, Config]:
    """What `patchmix pretrain` would be configured with for each chosen row, by the row's name."""
    run, epochs = settings.run, settings.run.train.epochs
    begin = partial(start, settings.recipe, config=settings.config, model=run.model.name)
    changed = {name: flat(run)[name][1] for name in settings.given if name != "epochs"}
    varied = {"seed": "--seeds", **dict.fromkeys(VARIED.get(settings.ablation, ()), "--rows")}
    for name, instead in varied.items():
        if name in changed:
            raise ValueError(f"{name} is what ablation {settings.ablation!r} varies; choose with {instead}")
    own = settings_by_row(settings.row_settings, rows, varied)
    configs, minutes = {}, run.budget_minutes
    for row in choose_rows(rows, settings.rows):
        method = row.method or run.method.name
        config = begin(method=method, epochs=epochs * row.length if minutes is None else epochs)
        # An option that this row's method does not have is meant for others.
        known = flat(config)
        config = config.replace(**{name: value for name, value in changed.items() if name in known})
        config = config.replace(**row.settings, **own.get(row.name, {}))
        if row.length != 1.0 and minutes is not None:
            config = config.replace(budget=f"{minutes * row.length:g}min")
        if settings.ablation == "terms":
            weights = getattr(config.method.options, "weights", ())
            if len(weights) != 3:
                raise ValueError(f"method {method} has no terms to leave out; use --method patchmix")
            kept = tuple(w * stays for w, stays in zip(weights, row.terms, strict=True))
            if any(stays and not w for w, stays in zip(kept, row.terms, strict=True)):
                raise ValueError(f"row {row.name} has a term of weight 0; give all three, such as --weights 1 1 1")
            config = config.replace(weights=kept, **({"region_weight": 0.0} if "region_weight" in known else {}))
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
        made_of = next(each.settings for each in rows if each.name == row)
        if name in varied or name in made_of:
            raise ValueError(f"--row-set {text!r}: {name} is what the ablation varies; choose rows with --rows")
        try:
            settings.setdefault(row, {})[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(
                f"--row-set {text!r}: {value!r} is no YAML value, such as 3, 0.1, cutmix or [1, 2]"
            ) from None
    return settings


def describe(config: Config, row: AblationRow) -> str:
    """What all rows have in common."""
    epochs, minutes = config.train.epochs / row.length, (config.budget_minutes or 0.0) / row.length
    length = f"{minutes:g} min" if minutes else f"{epochs:g} epochs"
    model = config.model.init_from if config.model.name == "same" else config.model.name
    return f"{model}, recipe {config.recipe}, batch {config.train.batch_size}, {length}"


def check_found(folder: Path, config: Config, fingerprint: str) -> None:
    """A ValueError if the folder holds a run with another configuration or other data."""
    last = Checkpoints(folder / "checkpoints").last
    if not (folder / "config.yaml").is_file() or not (last or (folder / "encoder.safetensors").is_file()):
        return
    found = read_config(folder)
    changed = differences(found, completed(config, found))
    other_images = last is not None and load_checkpoint(last).get("data") != fingerprint
    if other_images or (last is None and found.data.path != config.data.path):
        note = ", other images" if other_images else ""
        changed.append(f"data.path: {found.data.path} → {config.data.path}{note}")
    if changed:
        raise ValueError(
            f"{folder} holds a run with another configuration ({'; '.join(changed)}); choose another --out, "
            "or move that run away"
        )


def train_and_evaluate(
    run: AblationRun, config: Config, labeled: Labeled | None, data: str, console: Console
) -> AblationRun:
    """Trains what is not trained, evaluates what is not evaluated, and reads the folder."""
    folder = Path(run.folder)
    if (folder / "encoder.safetensors").is_file():
        console.print(f"{folder} is trained", soft_wrap=True)
    else:
        try:
            run_config(config, folder, resume="auto")
        except NonFiniteLoss as error:
            console.print(f"failed: {error}", style="bold red", soft_wrap=True)
            return dataclasses.replace(run, failure=str(error))
    last: dict[str, dict[str, Any]] = {row["kind"]: row for row in read_metrics(folder / "metrics.jsonl")}
    steps, health = last.get("train"), last.get("monitor", {})
    return dataclasses.replace(
        run,
        images_seen=None if steps is None else steps["step"] * config.train.batch_size,
        seconds=None if steps is None else steps["seconds"],
        flops_per_image=config_flops(read_config(folder)),
        results={} if labeled is None else evaluate(Run(folder), labeled, data, config),
        health={key: value for key, value in health.items() if key not in ("kind", "step", "epoch")},
    )


def open_test_data(test_data: str | Path | None, data: str | Path, console: Console, in_chans: int) -> Labeled | None:
    """The labeled data, or None where there is none; data that was asked for must have labels."""
    try:
        labeled = open_labeled(data if test_data is None else test_data, in_chans=in_chans)
    except ValueError as error:
        if test_data is not None:
            raise
        console.print(f"no evaluation, only rank and mean cosine: {error}", soft_wrap=True)
        return None
    test = "each image against all others" if labeled.test is None else f"{len(labeled.test):,} test images"
    console.print(f"evaluated on {labeled.train.name}: {labeled.classes} classes, {test}", soft_wrap=True)
    return labeled


def evaluate(run: Run, labeled: Labeled, data: str, config: Config) -> dict[str, Result]:
    """kNN and the fast linear protocol, from results.jsonl where they are stored already."""
    backbone, tested = run.load(), labeled.with_test()
    ks = fitting_ks(len(labeled.train) - int(labeled.test is None))
    common = {"layer": LAYERS["token"], "resize": usual_resize(backbone.architecture.image_size)}
    knn = {"k": HEADLINE_K if HEADLINE_K in ks else ks[0], "temperature": TEMPERATURE, **common}
    linear = {"epochs": float(usual_epochs(len(tested.train))), "seed": 0, **common}
    stored, weights = read_results(run.path), backbone.digest()
    known_knn = known_result(stored, "knn", labeled.fingerprint(), weights, knn)
    known_linear = known_result(stored, "linear-fast", tested.fingerprint(), weights, linear)
    distributed.barrier()  # all have read before one writes
    options = {"device": config.runtime.device, "workers": config.runtime.workers}
    return {
        "knn": known_knn or run.knn(data, **options),
        "linear-fast": known_linear or run.linear(data, protocol="fast", **options),
    }
