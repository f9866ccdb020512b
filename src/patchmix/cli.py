"""The command `patchmix`: verb → settings → function. What a verb needs is imported when it runs."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_origin

import tyro

from patchmix import __version__
from patchmix import settings as s
from patchmix.config import Config, check_known, check_precision, flat, from_dict, to_dict, validate
from patchmix.progress import OUTPUT
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
    "detect": Verb(s.Detect, "patchmix.evaluate.detection.training:detect", _RESULT, compute=True),
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
    "show similarity": Verb(s.ShowSimilarity, "patchmix.report.similarity:show_similarity", alone=True),
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
    with _output(OUTPUT_OPTIONS.keys() & set(args)):
        try:
            if args[:1] == ["--version"]:
                print(version())
            elif args[:1] == ["--print-completion"]:
                print(completion(args[1] if len(args) > 1 else ""))
            else:
                _run(args, in_shell)
        except KeyboardInterrupt:
            _fail("interrupted", 130)
        except Exception as error:
            code = _exit_code(error)
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
    if getattr(settings, "devices", None) and "RANK" not in os.environ:
        from patchmix.launch import launch

        sys.exit(launch([name, *without_option(rest, "--devices")], settings.devices))
    as_json, main_process = "--json" in rest, os.environ.get("RANK", "0") == "0"
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        result = resolve(verb.run)(settings)
        if verb.show is not None and main_process:
            resolve(verb.show)(result)
    if as_json and main_process:
        print(json.dumps(plain(result), indent=1, ensure_ascii=False))


@contextlib.contextmanager
def _output(options: set[str]) -> Iterator[None]:
    """--quiet or --verbose for this command, and by the environment for the processes that it starts."""
    before = os.environ.get(OUTPUT)
    chosen = next((option[2:] for option in ("--verbose", "--quiet") if option in options), before)
    try:
        if chosen is not None:
            os.environ[OUTPUT] = chosen
        yield
    finally:
        os.environ.pop(OUTPUT, None)
        if before is not None:
            os.environ[OUTPUT] = before


def plain(value: Any) -> Any:
    """What JSON can hold of a result: dataclasses by field, paths and other objects by name."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"path": str(value.path)} if hasattr(value, "path") else str(value)


def version() -> str:
    """Our version and those that results depend on; torch is not imported, which would take seconds."""
    spec = importlib.util.find_spec("torch")
    names: dict[str, Any] = {"cuda": None}
    if spec is not None and spec.origin is not None:
        found = importlib.util.spec_from_file_location("torch_version", Path(spec.origin).with_name("version.py"))
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        names = vars(module)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchvision", "timm")]
    cuda = f"CUDA {names['cuda']}" if names["cuda"] else "no CUDA"
    return f"patchmix {__version__} ({', '.join([*versions, cuda])}, Python {platform.python_version()})"


def completion(shell: str) -> str:
    """A script that completes commands and options in bash, zsh or fish."""
    check_known(shell, ("bash", "zsh", "fish"), "shell")
    options = {}
    for name, verb in VERBS.items():
        own = [field.name for field in fields(verb.settings)]
        names = option_names(verb.settings, _defaults(verb.settings, start()) if "run" in own else None)
        options[name] = [f"--{each.replace('_', '-')}" for each in names if each not in ("run", "weights")]
        options[name] += OUTPUT_OPTIONS
    if shell == "fish":
        lines = [f"complete -c patchmix -n 'test (count (commandline -opc)) -eq 1' -f -a '{' '.join(first_words())}'"]
        lines += [f"complete -c patchmix -n '__fish_seen_subcommand_from show' -f -a '{' '.join(figure_words())}'"]
        for name, each in options.items():
            condition = " and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
            lines += [f"complete -c patchmix -n '{condition}' -l {option[2:]}" for option in each]
        return "\n".join(lines)
    cases = "\n".join(f"    '{name}') words='{' '.join(each)}' ;;" for name, each in options.items())
    script = f"""\
_patchmix() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" verb="${{COMP_WORDS[1]}}" words=''
  if [[ "$COMP_CWORD" == 1 ]]; then COMPREPLY=($(compgen -W '{" ".join(first_words())}' -- "$cur")); return; fi
  if [[ "$verb" == show ]]; then
    if [[ "$COMP_CWORD" == 2 ]]; then COMPREPLY=($(compgen -W '{" ".join(figure_words())}' -- "$cur")); return; fi
    verb="show ${{COMP_WORDS[2]}}"
  fi
  case "$verb" in
{cases}
  esac
  if [[ "$cur" == -* ]]; then COMPREPLY=($(compgen -W "$words" -- "$cur")); else COMPREPLY=($(compgen -f -- "$cur")); fi
}}
complete -o filenames -F _patchmix patchmix patchmix-ssl"""
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def first_words() -> list[str]:
    return list(dict.fromkeys(name.split()[0] for name in VERBS))


def figure_words() -> list[str]:
    return [name.split()[1] for name in VERBS if " " in name]


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
    everywhere = [f"  {option:<16} {text}" for option, text in OUTPUT_OPTIONS.items()]
    more = ["  --version        Print the versions of patchmix, torch, timm and CUDA."]
    more += ["  --print-completion {bash,zsh,fish}"]
    return "\n".join([usage, "", title, "", *shown, "", "options of every command:", *everywhere, "", "also:", *more])


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
    check_precision(_peek(args, "precision"))
    config = _start(cls, **peeked)
    return with_config(_tyro(cls[type(config.method.options)], args, prog, default=_defaults(cls, config)))


def from_keywords(cls: type[Any], *args: Any, **keywords: Any) -> Any:
    """The settings of a Python call: `pretrain("photos", "runs/a", num_mix=2)`, `knn("runs/a", data="cifar10")`."""
    names = [each.name for each in fields(cls)]
    if "run" not in names:
        return validate(cls, _with_named_data(_by_position(names, args) | keywords))
    order = [*{s.Ablate: ["ablation"], s.Adapt: ["weights"]}.get(cls, []), "data", "out"]
    keywords = _with_named_data(_by_position(order, args) | keywords)
    own = {name: keywords.pop(name) for name in names if name in keywords}
    decisive = {name: keywords.pop(name) for name in ("data", "model", "method", "epochs") if name in keywords}
    places = {name: own[name] for name in ("recipe", "config") if name in own}
    config = _start(cls, **places, **decisive).replace(**keywords)
    return validate(cls[type(config.method.options)], {**own, "run": to_dict(config)})


def _with_named_data(keywords: dict[str, Any]) -> dict[str, Any]:
    """Datasets, arrays and lists of files have names from here on; paths are text."""
    keywords = {k: str(v) if k in ("weights", "data") and isinstance(v, Path) else v for k, v in keywords.items()}
    if isinstance(keywords.get("data"), str | None):
        return keywords
    from patchmix.data.python import name_of

    return keywords | {"data": name_of(keywords["data"])}


def _by_position(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    if len(values) > len(names):
        raise TypeError(f"{len(values)} positional arguments; allowed are {', '.join(names)}")
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
    data = config.data if cls in (s.Bench, s.Plan) else replace(config.data, path=tyro.MISSING)
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
            about = f"{(get_origin(cls) or cls).__doc__}\n\nEvery command also takes {', '.join(OUTPUT_OPTIONS)}."
            return tyro.cli(cls, prog=prog, args=args, description=about, **options)
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
