"""The command `patchmix`: verb → settings → function. What a verb needs is imported when it runs."""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import re
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_origin

import tyro

from patchmix import __version__
from patchmix import settings as s
from patchmix.config import (
    Config,
    check_known,
    check_precision,
    did_you_mean,
    flat,
    from_dict,
    to_dict,
    validate,
)
from patchmix.progress import OUTPUT, warn
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
    "shards": Verb(s.Shards, "patchmix.data.write_shards:write_shards", alone=True),
    "knn": Verb(s.Knn, "patchmix.evaluate.knn:knn", _RESULT, compute=True),
    "linear": Verb(s.Linear, "patchmix.evaluate.linear:linear", _RESULT, compute=True),
    "finetune": Verb(s.Finetune, "patchmix.evaluate.finetune:finetune", _RESULT, compute=True),
    "detect": Verb(s.Detect, "patchmix.evaluate.detection.detect:detect", _RESULT, compute=True),
    "segment": Verb(s.Segment, "patchmix.evaluate.segment:segment", _RESULT, compute=True),
    "evaluate": Verb(s.Evaluate, "patchmix.evaluation:evaluate", compute=True, alone=True),
    "embed": Verb(s.Embed, "patchmix.evaluate.features:embed", _RESULT, compute=True),
    "compare": Verb(s.Compare, "patchmix.study.compare:compare", compute=True),
    "ablate": Verb(s.Ablate, "patchmix.ablation:ablate", compute=True),
    "import": Verb(s.Import, "patchmix.interop.importing:import_weights", alone=True),
    "export": Verb(s.Export, "patchmix.report.share:export_weights", alone=True),
    "push": Verb(s.Push, "patchmix.report.share:push", alone=True),
    "show mix": Verb(s.ShowMix, "patchmix.report.figures:show_mix", alone=True),
    "show curves": Verb(s.ShowCurves, "patchmix.report.curves:show_curves", alone=True),
    "show similarity": Verb(s.ShowSimilarity, "patchmix.report.neighbors:show_similarity", alone=True),
    "show attention": Verb(s.ShowAttention, "patchmix.report.attention:show_attention", alone=True),
    "show patches": Verb(s.ShowPatches, "patchmix.report.attention:show_patches", alone=True),
    "show neighbors": Verb(s.ShowNeighbors, "patchmix.report.neighbors:show_neighbors", alone=True),
    "show map": Verb(s.ShowMap, "patchmix.report.neighbors:show_map", alone=True),
    "report": Verb(s.Report, "patchmix.report.page:report", alone=True),
    "flops": Verb(s.Flops, "patchmix.study.flops:flops"),
    "plan": Verb(s.Plan, "patchmix.study.plan:plan"),
    "bench": Verb(s.Bench, "patchmix.study.bench:bench", compute=True),
    "doctor": Verb(s.Doctor, "patchmix.study.doctor:doctor"),
    "recipes": Verb(s.Recipes, "patchmix.recipes:recipes"),
    "demo": Verb(s.Demo, "patchmix.demo:demo", compute=True, alone=True),
}


# Options of a run → others of which one must have certain values for them to have an effect.
NEEDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "num_mix num_mix_stages mix_blocks": {"mix": lambda mix: mix == "patchmix"},
    "pasted_area": {"mix": lambda mix: mix in ("resizemix", "all")},
    "momentum momentum_stages momentum_update": {"momentum_encoder": bool},
    "plain_share label_smoothing": {"weights": lambda weights: weights[0] > 0},
    "mixed_share mixed_ramp": {"weights": lambda weights: any(weights[1:]), "region_weight": bool},
    "normalize_mix_to_mix": {"weights": lambda weights: weights[2] > 0},
    "teacher_patch_temperature center_patch_momentum": {"weights": lambda weights: weights[1] > 0},
    "mask_ratio": {"mask_probability": bool},
    "queue_start": {"queue_length": bool},
    "local_size local_area": {"local_crops": bool},
    "author_positions": {"local_crops": bool, "image_sizes": bool},
    "brightness contrast saturation hue": {"jitter": bool},
    "sigma": {"blur": any, "local_crops": bool},
    "initialization": {"init_from": lambda weights: weights is None},
    "stem": {"model": lambda name: name != "same"},
}

# What every command takes.
OUTPUT_OPTIONS = {
    "--json": "Print the result as JSON. Everything else goes to stderr.",
    "--quiet": "Print results, warnings and errors only.",
    "--verbose": "Print every logged step, and the traceback of an error.",
}


def main(args: list[str] | None = None) -> None:
    """Runs one command; a user's mistake ends in one line and exit code 2."""
    in_shell = args is None
    args = sys.argv[1:] if args is None else args
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name need not be UTF-8
    with _output(args):
        try:
            if args[:1] == ["--version"]:
                print(version())
            elif args[:1] == ["--print-completion"]:
                print(completion(args[1] if len(args) > 1 else ""))
            else:
                _run(args, in_shell)
            sys.stdout.flush()
        except KeyboardInterrupt:
            _fail("interrupted", 130)
        except BrokenPipeError:  # who reads the output, such as head, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        except Exception as error:
            # Besides mistakes: a lost process, a loss that is not finite, a signal.
            code = getattr(error, "exit_code", 2 if isinstance(error, (ValueError, OSError)) else None)
            if code is None or os.environ.get("PATCHMIX_TRACEBACK") or os.environ.get(OUTPUT) == "verbose":
                raise
            _fail(str(error), code)


def _run(args: list[str], in_shell: bool) -> None:
    name, rest = split_verb(args)
    if name is None:
        print(overview(prefix="show " if args[:1] == ["show"] else ""))
        return
    verb = VERBS[name]
    if in_shell and verb.compute and not {"-h", "--help"} & set(rest):
        from patchmix.train.allocator import keep_freed_memory, restart_with_huge_pages

        restart_with_huge_pages()
        keep_freed_memory()
    if "WORLD_SIZE" in os.environ and verb.alone:
        from patchmix.distributed import check_alone

        check_alone(f"patchmix {name}")
    settings = parse(verb.settings, [word for word in rest if word not in OUTPUT_OPTIONS], prog=f"patchmix {name}")
    if _starts_processes(settings):
        from patchmix.launch import launch

        sys.exit(launch(args, settings.devices))
    as_json, main_process = "--json" in rest, os.environ.get("RANK", "0") == "0"
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        result = resolve_name(verb.run)(settings)
        if verb.show is not None and main_process:
            resolve_name(verb.show)(result)
    if as_json and main_process:
        from pydantic_core import to_json

        def named(value: Any) -> Any:  # what is no plain data: a run by its path, others as text
            return {"path": str(value.path)} if hasattr(value, "path") else str(value)

        print(to_json(result, indent=1, inf_nan_mode="null", fallback=named).decode())


@contextlib.contextmanager
def _output(args: list[str]) -> Iterator[None]:
    """--quiet or --verbose for this command, and by the environment for the processes that it starts."""
    before = os.environ.get(OUTPUT)
    for option in ("--quiet", "--verbose"):
        if option in args:
            os.environ[OUTPUT] = option[2:]
    try:
        yield
    finally:
        os.environ.pop(OUTPUT, None)
        if before is not None:
            os.environ[OUTPUT] = before


def version() -> str:
    """Our version and those that results depend on; torch is not imported, which would take seconds."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    cuda = runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchvision", "timm")]
    versions += [f"CUDA {cuda}" if cuda else "no CUDA", f"Python {platform.python_version()}"]
    return f"patchmix {__version__} ({', '.join(versions)})"


def completion(shell: str) -> str:
    """A script that completes commands and options in bash, zsh or fish."""
    check_known(shell, ("bash", "zsh", "fish"), "shell")
    commands = " ".join(dict.fromkeys(name.split()[0] for name in VERBS))
    figures = " ".join(name.split()[1] for name in VERBS if " " in name)
    options = {}
    for name, verb in VERBS.items():
        known = [f"--{each.replace('_', '-')}" for each in option_names(verb.settings, start())]
        options[name] = [*known, *OUTPUT_OPTIONS]
    if shell == "fish":
        lines = [f"complete -c patchmix -n 'test (count (commandline -opc)) -eq 1' -f -a '{commands}'"]
        lines += [f"complete -c patchmix -n '__fish_seen_subcommand_from show' -f -a '{figures}'"]
        for name, each in options.items():
            condition = " and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
            lines += [f"complete -c patchmix -n '{condition}' -l {option[2:]}" for option in each]
        return "\n".join(lines)
    cases = "\n".join(f"    '{name}') words='{' '.join(each)}' ;;" for name, each in options.items())
    script = f"""\
_patchmix() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" verb="${{COMP_WORDS[1]}}" words=''
  if [[ "$COMP_CWORD" == 1 ]]; then COMPREPLY=($(compgen -W '{commands}' -- "$cur")); return; fi
  if [[ "$verb" == show ]]; then
    if [[ "$COMP_CWORD" == 2 ]]; then COMPREPLY=($(compgen -W '{figures}' -- "$cur")); return; fi
    verb="show ${{COMP_WORDS[2]}}"
  fi
  case "$verb" in
{cases}
  esac
  if [[ "$cur" == -* ]]; then COMPREPLY=($(compgen -W "$words" -- "$cur")); else COMPREPLY=($(compgen -f -- "$cur")); fi
}}
complete -o filenames -F _patchmix patchmix patchmix-ssl"""
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


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
    chosen = [line for line in lines if line.strip().startswith(prefix)]
    title = "Self-supervised pre-training of Vision Transformers with PatchMix."
    usage = f"usage: patchmix {prefix}COMMAND [OPTIONS]     (patchmix {prefix}COMMAND --help lists the options)"
    everywhere = [f"  {option:<16} {text}" for option, text in OUTPUT_OPTIONS.items()]
    more = ["  --version        Print the versions of patchmix, torch, timm and CUDA."]
    more += ["  --print-completion {bash,zsh,fish}  Print a script that completes commands and options."]
    return "\n".join([usage, "", title, "", *chosen, "", "options of every command:", *everywhere, "", "also:", *more])


def python_function(name: str) -> Callable[..., Any]:
    """A verb for Python: `patchmix.knn(...)` takes the settings as keywords and returns what the verb computes."""
    verb = VERBS[name]

    def function(*args: Any, **keywords: Any) -> Any:
        return resolve_name(verb.run)(from_keywords(verb.settings, *args, **keywords))

    keywords = f"Takes the options of `patchmix {name} --help` as keywords: --batch-size is batch_size."
    function.__name__, function.__doc__ = name, f"{verb.settings.__doc__}\n\n{keywords}"
    return function


def parse(cls: type[Any], args: list[str], prog: str) -> Any:
    """The settings of a command line; a mistake is a ValueError of one line."""
    if not takes_run_settings(cls):
        return validate(cls, vars(_tyro(cls, args, prog)))
    decisive = _peek(args, prog)
    check_precision(decisive.pop("precision"))
    config = _start(cls, **decisive)
    data = config.data if cls in (s.Bench, s.Plan) else replace(config.data, path=tyro.MISSING)
    required = {each.name: tyro.MISSING for each in fields(cls) if each.name in ("out", "ablation", "weights")}
    default = cls(run=replace(config, data=data), recipe=config.recipe, **required)
    parsed = _tyro(cls[type(config.method.options)], args, prog, default)
    run = from_dict(to_dict(parsed.run))
    words = {re.sub("^--(no-)?", "", word.partition("=")[0]).replace("-", "_") for word in args if word[:2] == "--"}
    return _with_run(cls, vars(parsed), run, flat(run).keys() & {*words, "data"})


def from_keywords(cls: type[Any], *args: Any, **keywords: Any) -> Any:
    """The settings of a Python call: `pretrain("photos", "runs/a", num_mix=2)`, `knn("runs/a", data="cifar10")`."""
    names = order = [each.name for each in fields(cls)]
    if takes_run_settings(cls):
        order = [*{s.Ablate: ["ablation"], s.Adapt: ["weights"]}.get(cls, []), "data", "out"]
    if len(args) > len(order):
        raise TypeError(f"{len(args)} positional arguments; allowed are {', '.join(order)}")
    given = dict(zip(order, args, strict=False))
    both = cls is s.Adapt and "weights" in given and "weights" in keywords
    options = {"weights": keywords.pop("weights")} if both else {}  # of the loss
    if twice := given.keys() & keywords.keys():
        raise TypeError(f"{min(twice)} is given twice, by its position and by its name")
    keywords = {name: str(value) if isinstance(value, Path) else value for name, value in (given | keywords).items()}
    if keywords.get("data") is not None:
        from patchmix.data.python import name_of

        keywords["data"] = name_of(keywords["data"])
    if not takes_run_settings(cls):
        return validate(cls, keywords)
    if keywords.get("devices"):
        raise ValueError("devices starts processes of the command line; in Python use torchrun, or patchmix pretrain")
    own = {name: keywords.pop(name) for name in names if name in keywords}
    decisive = {name: keywords.pop(name) for name in ("data", "model", "method", "epochs") if name in keywords}
    places = {"recipe": own.get("recipe"), "config": Path(own["config"]) if own.get("config") else None}
    config = _start(cls, **places, **decisive, budget=keywords.get("budget"))
    return _with_run(cls, own, config.replace(**keywords, **options), {*decisive, *keywords})


def _starts_processes(settings: Any) -> bool:
    devices = getattr(settings, "devices", None)
    if devices is None or "RANK" not in os.environ:
        return devices is not None
    if (processes := os.environ.get("WORLD_SIZE", str(devices))) != str(devices):  # not those that `launch` starts
        raise ValueError(f"devices is {devices}, but a launcher has started {processes} processes; leave --devices out")
    return False


def _with_run(cls: type[Any], own: dict[str, Any], run: Config, given: set[str]) -> Any:
    """The settings of a verb with those of its run; names the given ones that others leave without effect."""
    if cls is s.Ablate:  # whose rows have options of their own
        return validate(cls, {**own, "run": run, "given": tuple(given)})
    settings = validate(cls, {**own, "run": run})
    if os.environ.get("RANK", "0") != "0" or _starts_processes(settings):  # rank 0 says it
        return settings
    values = {name: value for name, (_, value) in flat(run).items()}
    values["init_from"] = own.get("weights", values["init_from"])  # of adapt
    for names, needs in NEEDS.items():
        for name in given & {*names.split()}:
            others = {other: values[other] for other in needs if other in values}
            if others and not any(needs[other](value) for other, value in others.items()):
                why = " and ".join(f"{other} is {value}" for other, value in others.items())
                warn(f"{name} has no effect, because {why}")
    return settings


def takes_run_settings(cls: type[Any]) -> bool:
    return "run" in {each.name for each in fields(cls)}


def _peek(args: list[str], prog: str) -> dict[str, Any]:
    """The options that decide the defaults of the others, before everything is parsed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    kinds: dict[str, type[Any]] = {"config": Path, "epochs": float}
    for name in ("recipe", "config", "model", "method", "epochs", "budget", "precision"):
        parser.add_argument(f"--{name}", type=kinds.get(name, str))
    try:
        return vars(parser.parse_known_args(args)[0])
    except argparse.ArgumentError as error:
        raise ValueError(f"{error} ({prog} --help)") from None


def _start(cls: type[Any], *, budget: str | None, **given: Any) -> Config:
    """The recipe or file; `bench` takes a batch that any machine has memory for, and generated images."""
    if given.get("recipe") and given.get("config"):
        raise ValueError("a recipe and a config both give all settings; give one of them")
    if (epochs := given.get("epochs")) is not None and budget is not None:
        raise ValueError(f"epochs {epochs:g} and budget {budget} both give the length; give one of them")
    config = start(**given | {"recipe": given.get("recipe") or cls.recipe})
    if cls is not s.Bench:
        return config
    data = config.data.path if given.get("data") or given.get("config") else "shapes"
    return config.replace(batch_size=min(64, config.train.batch_size), data=data)


def _tyro(cls: Any, args: list[str], prog: str, default: Any = None) -> Any:
    """tyro.cli, with its errors in one line."""
    errors = io.StringIO()
    plain = get_origin(cls) or cls
    about = f"{plain.__doc__}\n\nEvery command also takes {', '.join(OUTPUT_OPTIONS)}."
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(cls, prog=prog, args=args, description=about, default=default)
    except SystemExit as stop:
        if not stop.code:
            raise
        title, _, text = re.sub(r"[─-╿]|-{5,}", " ", errors.getvalue()).strip().partition("\n")
        text = " ".join(text.split()) or title
        if unknown := re.search(r"Unrecognized options: (--[\w-]+)", text):
            names = option_names(plain, None if default is None else default.run)
            known = [f"--{name.replace('_', '-')}" for name in names]
            check_known(unknown[1], known, "option", otherwise=f"{prog} --help lists the options")
        if missing := re.search(r"Missing from [^:]+: (\S+)", text):
            raise ValueError(f"{missing[1]} is missing; {prog} --help lists the options") from None
        if "'run.data.path'" in text:
            raise ValueError(f"DATA is missing; it has no flag: {prog} DATA … ({prog} --help)") from None
        reason = re.split(r"For full helptext|Argument helptext", text)[0].strip()
        if choice := re.match(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\)", reason):
            known = [name for name in re.findall(r"'([^']+)'", choice[3]) if name != "None"]
            reason = f"{choice[2]} is {choice[1]!r}; it must be one of {', '.join(known)}"
            reason += f"; {hint}" if (hint := did_you_mean(choice[1], known)) else ""
        raise ValueError(f"{reason} ({prog} --help)") from None


def option_names(cls: type[Any], run: Config | None) -> list[str]:
    """The options of a verb as Python names, without positional ones; with those of a run, where it takes them."""
    own = []
    for each in fields(cls):
        marks = getattr(each.type, "__metadata__", ())
        if each.name not in ("run", "given") and tyro.conf.Positional not in marks:
            own.append(next((mark.name.replace("-", "_") for mark in marks if getattr(mark, "name", None)), each.name))
    if run is not None and takes_run_settings(cls):
        own += [name for name in flat(run) if name != "data"]
    return list(dict.fromkeys(own))


def _fail(message: str, code: int) -> None:
    print(f"patchmix: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(code)
