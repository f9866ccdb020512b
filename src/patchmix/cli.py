"""The command `patchmix`: verb → settings → function. What a verb needs is imported when it runs."""

import contextlib
import importlib
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_origin

import tyro

from patchmix import settings as s
from patchmix.config import Config, check_known, flat, from_dict, to_dict, validate
from patchmix.recipes import start


@dataclass(frozen=True)
class Verb:
    settings: type[Any]
    run: str  # module:function of the settings
    show: str | None = None  # module:function that prints what `run` returns
    compute: bool = False  # tensors on the CPU, for which the memory allocator is tuned
    alone: bool = False  # writes files that several processes would write twice


_RESULT = "patchmix.evaluate.results:print_result"
VERBS = {
    "pretrain": Verb(s.Pretrain, "patchmix.run:run_pretrain", compute=True),
    "adapt": Verb(s.Adapt, "patchmix.run:run_adapt", compute=True),
    "shards": Verb(s.Shards, "patchmix.data.write_shards:shards", alone=True),
    "knn": Verb(s.Knn, "patchmix.evaluate.knn:knn", _RESULT, compute=True),
    "linear": Verb(s.Linear, "patchmix.evaluate.linear:linear", _RESULT, compute=True),
    "finetune": Verb(s.Finetune, "patchmix.evaluate.finetune:finetune", _RESULT, compute=True),
    "detect": Verb(s.Detect, "patchmix.evaluate.detection.training:detect", _RESULT, compute=True),
    "segment": Verb(s.Segment, "patchmix.evaluate.segment:segment", _RESULT, compute=True),
    "evaluate": Verb(s.Evaluate, "patchmix.evaluation:evaluate", compute=True, alone=True),
    "embed": Verb(s.Embed, "patchmix.evaluate.features:embed", _RESULT, compute=True),
    "compare": Verb(s.Compare, "patchmix.study.compare:compare", compute=True),
    "ablate": Verb(s.Ablate, "patchmix.ablation:ablate", compute=True),
    "import": Verb(s.Import, "patchmix.interop.importing:import_weights", alone=True),
    "export": Verb(s.Export, "patchmix.interop.exporting:export_weights", alone=True),
    "show mix": Verb(s.ShowMix, "patchmix.report.figures:show_mix", alone=True),
    "show curves": Verb(s.ShowCurves, "patchmix.report.curves:show_curves", alone=True),
    "show similarity": Verb(s.ShowSimilarity, "patchmix.report.similarity:show_similarity", alone=True),
    "show attention": Verb(s.ShowAttention, "patchmix.report.attention:show_attention", alone=True),
    "show patches": Verb(s.ShowPatches, "patchmix.report.patches:show_patches", alone=True),
    "show neighbors": Verb(s.ShowNeighbors, "patchmix.report.neighbors:show_neighbors", alone=True),
    "show map": Verb(s.ShowMap, "patchmix.report.neighbors:show_map", alone=True),
    "report": Verb(s.Report, "patchmix.report.page:report", alone=True),
    "flops": Verb(s.Flops, "patchmix.study.flops:flops"),
    "bench": Verb(s.Bench, "patchmix.study.bench:bench", compute=True),
    "doctor": Verb(s.Doctor, "patchmix.study.doctor:doctor"),
    "recipes": Verb(s.Recipes, "patchmix.study.compare:recipes"),
    "demo": Verb(s.Demo, "patchmix.demo:demo", compute=True, alone=True),
}


def main(args: list[str] | None = None) -> None:
    """Runs one command; a user's mistake ends in one line and exit code 2."""
    in_shell = args is None
    args = sys.argv[1:] if args is None else args
    try:
        name, rest = split_verb(args)
        if name is None:
            print(overview(prefix="show " if args[:1] == ["show"] else ""))
            return
        verb = VERBS[name]
        if in_shell and verb.compute:
            from patchmix.train.allocator import keep_freed_memory, restart_with_huge_pages

            restart_with_huge_pages()
            keep_freed_memory()
        if "WORLD_SIZE" in os.environ and verb.alone:
            from patchmix.distributed import check_alone

            check_alone(f"patchmix {name}")
        settings = parse(verb.settings, rest, prog=f"patchmix {name}")
        if getattr(settings, "devices", None) and "RANK" not in os.environ:
            from patchmix.launch import launch

            sys.exit(launch([name, *without_option(rest, "--devices")], settings.devices))
        result = resolve(verb.run)(settings)
        if verb.show is not None and os.environ.get("RANK", "0") == "0":
            resolve(verb.show)(result)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        code = _exit_code(error)
        if code is None or os.environ.get("PATCHMIX_TRACEBACK"):
            raise
        _fail(str(error), code)


def split_verb(args: list[str]) -> tuple[str | None, list[str]]:
    """The verb, of one word or two (`show mix`), and what follows it; None where the overview is wanted."""
    words = 2 if args[:1] == ["show"] else 1
    if len(args) < words or args[words - 1] in ("-h", "--help"):
        return None, []
    name = " ".join(args[:words])
    check_known(name, VERBS, "command")
    return name, args[words:]


def overview(prefix: str = "") -> str:
    """The verbs, a line each."""
    lines = [f"  {name:<16} {(verb.settings.__doc__ or '').splitlines()[0]}" for name, verb in VERBS.items()]
    shown = [line for line in lines if line.strip().startswith(prefix)]
    title = "Self-supervised pre-training of Vision Transformers with PatchMix."
    usage = f"usage: patchmix {prefix}COMMAND [OPTIONS]     (patchmix {prefix}COMMAND --help lists the options)"
    return "\n".join([usage, "", title, "", *shown])


def python_function(name: str) -> Callable[..., Any]:
    """A verb for Python: `patchmix.knn(...)` takes the settings as keywords and returns what the verb computes."""
    verb = VERBS[name]

    def function(*args: Any, **keywords: Any) -> Any:
        return resolve(verb.run)(from_keywords(verb.settings, *args, **keywords))

    function.__name__, function.__doc__ = name, verb.settings.__doc__
    return function


def resolve(path: str) -> Any:
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)


# ------------------------------------------------------------------------------------------------------------ parsing


def parse(cls: type[Any], args: list[str], prog: str) -> Any:
    """The settings of a command line; a mistake is a ValueError of one line."""
    if "run" not in {each.name for each in fields(cls)}:
        parsed = _tyro(cls, args, prog)
        return validate(cls, {each.name: getattr(parsed, each.name) for each in fields(cls)})
    peeked = {name: _peek(args, name) for name in ("recipe", "config", "model", "method", "epochs")}
    config = _start(cls, **peeked)
    return with_config(_tyro(cls[type(config.method.options)], args, prog, default=_defaults(cls, config)))


def from_keywords(cls: type[Any], *args: Any, **keywords: Any) -> Any:
    """The settings of a Python call: `pretrain("photos", "runs/a", num_mix=2)`, `knn("runs/a", data="cifar10")`."""
    names = [each.name for each in fields(cls)]
    if "run" not in names:
        return validate(cls, {**_by_position(names, args), **keywords})
    order = [*{s.Ablate: ["ablation"], s.Adapt: ["weights"]}.get(cls, []), "data", "out"]
    keywords = {**_by_position(order, args), **keywords}
    own = {name: keywords.pop(name) for name in names if name in keywords}
    own |= {"weights": str(own["weights"])} if "weights" in own else {}
    decisive = {name: keywords.pop(name) for name in ("data", "model", "method", "epochs") if name in keywords}
    if "data" in decisive:
        decisive["data"] = str(decisive["data"])
    places = {name: own[name] for name in ("recipe", "config") if name in own}
    config = _start(cls, **places, **decisive).replace(**keywords)
    return validate(cls[type(config.method.options)], {**own, "run": to_dict(config)})


def _by_position(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    if len(values) > len(names):
        raise TypeError(f"{len(values)} positional arguments; these have a place: {', '.join(names)}")
    return dict(zip(names, values, strict=False))


def _start(cls: type[Any], **given: Any) -> Config:
    """The recipe or file; for `bench` with a batch that any machine has memory for."""
    config = start(**given | {"recipe": given.get("recipe") or cls.recipe})
    return config.replace(batch_size=min(64, config.train.batch_size)) if cls is s.Bench else config


def with_config(settings: Any) -> Any:
    """The same with its run configuration validated."""
    return replace(settings, run=from_dict(to_dict(settings.run)))


def _defaults(cls: type[Any], config: Config) -> Any:
    """An instance whose required options are missing, so that tyro asks for them."""
    data = config.data if cls is s.Bench else replace(config.data, path=tyro.MISSING)
    required = {each.name: tyro.MISSING for each in fields(cls) if each.name in ("out", "ablation", "weights")}
    return cls(run=replace(config, data=data), recipe=config.recipe, **required)


def _peek(args: list[str], name: str) -> Any:
    """The value of an option that decides the defaults of the others, before everything is parsed."""
    text = next((b for a, b in itertools.pairwise(args) if a == f"--{name}"), None)
    text = next((a.partition("=")[2] for a in args if a.startswith(f"--{name}=")), text)
    if name == "epochs" and text is not None:
        try:
            return float(text)
        except ValueError:
            return None  # tyro says what is wrong
    return Path(text) if name == "config" and text is not None else text


def _tyro(cls: Any, args: list[str], prog: str, **options: Any) -> Any:
    """tyro.cli, with its errors in one line."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(cls, prog=prog, args=args, **options)
    except SystemExit as stop:
        if not stop.code:
            raise
        title, _, text = re.sub(r"[─-╿]|-{5,}", " ", errors.getvalue()).strip().partition("\n")
        text = " ".join(text.split()) or title
        if unknown := re.search(r"Unrecognized options: --([\w-]+)", text):
            check_known(unknown[1].replace("-", "_"), option_names(cls, options.get("default")), "option")
        if missing := re.search(r"Missing from [^:]+: (\S+)", text):
            raise ValueError(f"{missing[1]} is missing; {prog} --help lists the options") from None
        reason = re.split(r"For full helptext|Argument helptext", text)[0].strip()
        raise ValueError(f"{reason} ({prog} --help)") from None


def option_names(cls: Any, default: Any) -> list[str]:
    """The options of a verb as Python names; with the settings of a run, where it has them."""
    own = [each.name for each in fields(get_origin(cls) or cls)]
    return own if default is None else [*own, *flat(default.run)]


def without_option(args: list[str], option: str) -> list[str]:
    """The words of a command without an option and its value."""
    kept, skip = [], False
    for word in args:
        if not skip and word != option and not word.startswith(f"{option}="):
            kept.append(word)
        skip = word == option
    return kept


# -------------------------------------------------------------------------------------------------------------- exits


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
