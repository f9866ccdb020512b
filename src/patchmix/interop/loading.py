"""One way to any encoder: a run, a file of ours, a checkpoint of another project, or a model of timm or the hub."""

import dataclasses
import difflib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from timm.models import eva, vision_transformer
from timm.models.eva import Eva
from torch import Tensor

from patchmix.data.views import IMAGENET_MEAN, IMAGENET_STD
from patchmix.interop.backbone import Architecture, Backbone, first_of
from patchmix.interop.importing import import_checkpoint, is_own, read_entries
from patchmix.interop.layouts import Which
from patchmix.nn.vit import create_encoder

WEIGHTS = "model.safetensors"


def load_backbone(source: str | Path, *, encoder: Which | None = None, heads: int | None = None) -> Backbone:
    """The encoder that `source` names.

    `source` is a run's folder (its encoder.safetensors; during training, or for encoder="momentum", its newest
    checkpoint), a folder or file made by import or export, a checkpoint of another project (imported on the fly,
    see `import_checkpoint`, also for `encoder` and `heads`), or one of these names: `timm:NAME` and `timm:NAME.TAG` are
    timm's pretrained weights, `hf://user/name` a repository of the Hugging Face Hub in timm's layout (both fetched on
    first use, safetensors only), `random:NAME` a network with random weights.

    Examples:
        >>> import torch
        >>> load_backbone("random:vit_tiny_patch16_224").embed(torch.rand(2, 3, 224, 224)).shape
        torch.Size([2, 192])
    """
    if encoder not in (None, "base", "momentum"):
        raise ValueError(f"encoder {encoder!r} is unknown; it must be base or momentum")
    for prefix, named in (("timm:", _timm_model), ("random:", _random), ("hf://", _hub_model)):
        if str(source).startswith(prefix):
            if encoder or heads:
                raise ValueError(f"{source} takes no encoder and no heads; the name is enough")
            return named(str(source).removeprefix(prefix))
    path = Path(source)
    if not path.exists():
        known = timm.list_models("vit_*")
        near = difflib.get_close_matches(str(source).split(".")[0], known, n=1, cutoff=0.8)
        hint = f"; for the timm model write timm:{source if str(source) in known else near[0]}" if near else ""
        raise ValueError(f"{source} does not exist; give a run's folder, a checkpoint file or timm:NAME{hint}")
    if path.is_dir():
        name = path.name if path.name not in ("", "..") else path.resolve().name
        path, unfinished = _file_in(path, encoder)
    else:
        name, unfinished = _name_of(path.absolute()), False
    entries, metadata = read_entries(path)
    if is_own(entries, metadata):
        try:
            backbone = _own(entries, metadata, encoder, heads)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    else:
        timm_model = None if encoder or heads else _beside_config(path, entries)
        backbone = timm_model or import_checkpoint(path, entries=entries, encoder=encoder, heads=heads).backbone
    if encoder == "momentum":
        name += " (momentum)"
    if unfinished:
        name += f" (unfinished, step {backbone.origin.get('step')})"
    return dataclasses.replace(backbone, name=name)


def _name_of(file: Path) -> str:
    """A run's files are all called alike: the run says more."""
    if file.name == "encoder.safetensors":
        return file.parent.name
    if file.parent.name == "checkpoints":
        return f"{file.parent.parent.name}/{file.resolve().stem}"
    return file.stem


def _file_in(folder: Path, encoder: Which | None) -> tuple[Path, bool]:
    """The file of a run or of an export that holds the encoder, and whether it is of an unfinished run."""
    finished = folder / "encoder.safetensors"
    checkpoints = sorted(folder.glob("checkpoints/step-*.pt")) or list(folder.glob("checkpoints/last"))
    if encoder == "momentum" and checkpoints:  # encoder.safetensors holds the base encoder only
        return checkpoints[-1], not finished.is_file()
    if finished.is_file():
        return finished, False
    if checkpoints:
        return checkpoints[-1], True
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return folder / name, False
    if (folder / "config.yaml").is_file():
        raise ValueError(
            f"{folder} is a run without encoder or checkpoint yet; wait for its first checkpoint, or continue it with "
            "`patchmix pretrain … --resume auto`"
        )
    raise ValueError(f"{folder} holds no encoder; expected a run (encoder.safetensors) or an exported model")


def _own(entries: dict[str, Any], metadata: Mapping[str, str], encoder: Which | None, heads: int | None) -> Backbone:
    """From encoder.safetensors or from a run's checkpoint."""
    if "patchmix" in metadata:
        backbone = Backbone.from_metadata(metadata["patchmix"], entries)
        kept = backbone.origin.get("encoder", "base")
        if encoder not in (None, kept):
            raise ValueError(f"it holds only the {kept} encoder; for the {encoder} one, give the run's checkpoint")
    else:
        backbone = _from_run_checkpoint(entries, encoder or "base")
    if heads not in (None, backbone.architecture.heads):
        raise ValueError(f"its encoder has {backbone.architecture.heads} heads; leave heads={heads} out")
    return backbone


def _from_run_checkpoint(entries: Mapping[str, Any], encoder: Which) -> Backbone:
    state: dict[str, Tensor] = {str(name): value for name, value in entries["method"].items()}
    prefix = {"base": "encoder.", "momentum": "momentum_copy.network.0."}[encoder]
    weights = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    if not weights:
        raise ValueError(f"there is no {encoder} encoder; this run's method keeps none; use the other one")
    config: Mapping[str, Any] = entries["config"]
    try:
        model = config["model"]
        sizes = {key: model.get(key) for key in ("image_size", "patch_size", "dim", "depth", "heads")}
        with torch.device("meta"):
            stem, in_chans = model.get("stem", "patch"), model.get("in_chans") or 3
            shell = create_encoder(model["name"], in_chans=in_chans, stem=stem, **sizes)
        architecture = Architecture.of(model["name"], shell)
        architecture.check(weights, "this is not the encoder that the configuration describes")
        views = config.get("views", {})
        return Backbone(
            architecture,
            weights,
            mean=tuple(views.get("mean", IMAGENET_MEAN)),
            std=tuple(views.get("std", IMAGENET_STD)),
            origin={
                "format": "patchmix",
                "recipe": config.get("recipe"),
                "method": dict(config.get("method") or {}).get("name"),
                "data": dict(config.get("data") or {}).get("path"),
                "step": entries.get("step"),
                "encoder": encoder,
            },
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no usable configuration ({error}); it was not written by a run") from error


# ------------------------------------------------------------------------------------------- timm models and the hub


def _random(name: str) -> Backbone:
    """A network that has learned nothing, for comparison: the same one each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = create_encoder(name)
    origin = {"format": "timm", "random": True}
    return Backbone(Architecture.of(name, encoder), encoder.state_dict(), origin=origin, name=f"{name} (random)")


def _timm_model(name: str) -> Backbone:
    """The pretrained weights that timm itself would fetch; without a tag, those of its default tag."""
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=1)
        hint = f"did you mean timm:{near[0]}? " if near else ""
        raise ValueError(f"timm has no model {architecture}; {hint}A random network is random:{architecture}")
    try:
        cfg = timm.get_pretrained_cfg(name)
    except RuntimeError:
        cfg = None
    if cfg is None or not cfg.hf_hub_id:
        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
        raise ValueError(
            f"timm has no weights {name}; it has {architecture} with {', '.join(tags) or 'no pretrained weights'} "
            f"(random:{architecture} is a random network)"
        )
    repository, _, revision = cfg.hf_hub_id.partition("@")
    filename = (cfg.hf_hub_filename or WEIGHTS).replace("open_clip_pytorch_model.bin", "open_clip_model.safetensors")
    fetched = fetch(repository, filename, revision=revision or None)
    entries, _ = read_entries(fetched.path)
    backbone = _with_timm_names(architecture, fetched.path, entries, {}, vars(cfg))
    tagged = f"{architecture}.{cfg.tag}" if cfg.tag else architecture
    return dataclasses.replace(backbone, origin={"format": "timm", "file": tagged, **fetched.origin()}, name=tagged)


def _hub_model(source: str) -> Backbone:
    """hf://user/name or hf://user/name@revision: a timm model's repository, or one that `export` made."""
    repository, _, revision = source.strip("/").partition("@")
    config = fetch(repository, "config.json", revision=revision or None)
    fetched = fetch(repository, revision=config.commit)
    backbone = load_backbone(fetched.path.parent)
    return dataclasses.replace(backbone, origin=backbone.origin | fetched.origin(), name=repository)


def _beside_config(file: Path, entries: Mapping[str, Any]) -> Backbone | None:
    """The weights of a file with timm's config.json next to it, as in its folders for the hub; else None."""
    try:
        config = json.loads((file.parent / "config.json").read_text())
        name, arguments = config["architecture"], dict(config.get("model_args") or {})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not timm.is_model(name):
        return None
    return _with_timm_names(name, file, entries, arguments, config.get("pretrained_cfg") or config)


_ARGUMENTS = {
    "img_size": "image_size",
    "patch_size": "patch_size",
    "in_chans": "in_chans",
    "embed_dim": "dim",
    "depth": "depth",
    "num_heads": "heads",
}
_HARMLESS_ARGUMENTS = ("num_classes", "dynamic_img_size", "dynamic_img_pad", "drop_path_rate")


def _with_timm_names(
    name: str, file: Path, entries: Mapping[str, Any], arguments: Mapping[str, Any], cfg: Mapping[str, Any]
) -> Backbone:
    """The encoder in a file as timm publishes them, without its classifier.

    arguments: of `timm.create_model`, besides the name. cfg: timm's description, for mean and std.
    """
    if strange := [key for key in arguments if key not in (*_ARGUMENTS, *_HARMLESS_ARGUMENTS)]:
        raise ValueError(f"{file.parent}: model_args has {first_of(strange)}, which an encoder here does not keep")
    sizes = {_ARGUMENTS[key]: value for key, value in arguments.items() if key in _ARGUMENTS}
    sizes |= {key: value[0] for key, value in sizes.items() if isinstance(value, list)}  # squares
    with torch.device("meta"):
        shell = create_encoder(name, **sizes)
    if isinstance(shell, Eva):
        renamed = eva.checkpoint_filter_fn(dict(entries), shell)
    else:
        renamed = vision_transformer.checkpoint_filter_fn(dict(entries), shell, adapt_layer_scale=True)
    wanted = shell.state_dict()
    weights = {key: tensor.float() for key, tensor in renamed.items() if key in wanted or not key.startswith("head")}
    shape = Architecture.of(name, shell)
    shape.check(weights, f"{file} does not fit {name} as timm builds it")
    mean, std = tuple(cfg.get("mean") or IMAGENET_MEAN), tuple(cfg.get("std") or IMAGENET_STD)
    return Backbone(shape, weights, mean=mean, std=std, origin={"format": "timm", "file": name}, name=name)


# ------------------------------------------------------------------------------------ files of the Hugging Face Hub


class Fetched(NamedTuple):
    """A file of a repository at one commit, in the local cache."""

    path: Path
    repository: str
    commit: str
    sha256: str

    def origin(self) -> dict[str, str]:
        """What a backbone's `origin` says about it."""
        return {"repository": self.repository, "commit": self.commit, "sha256": self.sha256}


def fetch(repository: str, filename: str = WEIGHTS, *, revision: str | None = None) -> Fetched:
    """Downloads a file with a progress bar, or takes it from the cache, also where there is no connection.

    A file whose SHA-256 is not the one that the hub states is refused.
    """
    try:
        endpoint = os.environ.get("HF_ENDPOINT")  # huggingface_hub itself looks at it once, when it is imported
        path = Path(hf_hub_download(repository, filename, revision=revision, endpoint=endpoint))
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = f" at {revision}" if revision else ""
        reason = "is gated; accept its terms on the hub and log in with `hf auth login`"
        reason = reason if isinstance(error, GatedRepoError) else f"is not on the hub{at}, or private; check its name"
        raise ValueError(f"{repository} {reason}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ValueError(_no_connection(repository, filename)) from error
    except EntryNotFoundError as error:
        raise ValueError(
            f"{repository} has no {filename}; only safetensors are fetched, as pickled weights could run code"
        ) from error
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is not the name of a repository; write hf://user/name") from error
    except Exception as error:  # of whichever HTTP library huggingface_hub uses
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"{_no_connection(repository, filename)} ({reason})") from error
    sha256 = _sha256(path)
    stated = path.resolve().name  # the cache names large files by the SHA-256 that the hub states
    if re.fullmatch(r"[0-9a-f]{64}", stated) and stated != sha256:
        raise ValueError(
            f"{filename} of {repository} is damaged: its SHA-256 is {sha256[:12]}…, the hub states {stated[:12]}…; "
            f"remove {path.resolve()} and try again"
        )
    return Fetched(path, repository, path.parent.name, sha256)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _no_connection(repository: str, filename: str) -> str:
    return (
        f"{filename} of {repository} is not on this machine, and the hub can't be reached; fetch it where there is a "
        f"connection with `hf download {repository} --local-dir DIR`, copy DIR here and give DIR instead"
    )
