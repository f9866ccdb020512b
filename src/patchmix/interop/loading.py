"""One way to any encoder: a run, a file of ours, a checkpoint of another project, or a model of timm or the hub."""

import dataclasses
import difflib
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
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

from patchmix.interop.backbone import Architecture, Backbone
from patchmix.interop.importing import import_checkpoint, is_own, normalization, read_entries, timm_encoder
from patchmix.interop.layouts import FROM_TORCHVISION, Which, rename
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
    path, unfinished = Path(source).expanduser(), False
    if not path.exists():
        near = difflib.get_close_matches(str(source).split(".")[0], timm.list_models("vit_*"), n=1, cutoff=0.8)
        hint = f"; for the timm model write timm:{near[0]}" if near else ""
        raise ValueError(f"{source} does not exist; give a run's folder, a checkpoint file or timm:NAME{hint}")
    name = _name_of(path)
    if path.is_dir():
        path, unfinished = _file_in(path, encoder)
    entries, metadata = read_entries(path)
    if is_own(entries, metadata):
        try:
            backbone = _own(entries, metadata, encoder, heads)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    else:
        backbone = import_checkpoint(path, entries=entries, encoder=encoder, heads=heads).backbone
    if encoder == "momentum":
        name += " (momentum)"
    if unfinished:
        name += f" (unfinished, step {backbone.origin.get('step')})"
    return dataclasses.replace(backbone, name=name)


def _name_of(path: Path) -> str:
    """A folder's name; of a run's files, which are all called alike, the run's."""
    if path.is_dir():
        return path.name if path.name not in ("", "..") else path.resolve().name
    folder = path.absolute().parent
    if path.name == "encoder.safetensors":
        return folder.name
    return f"{folder.parent.name}/{path.resolve().stem}" if folder.name == "checkpoints" else path.stem


def _file_in(folder: Path, encoder: Which | None) -> tuple[Path, bool]:
    """The file of a run or of an export that holds the encoder, and whether it is of an unfinished run."""
    finished = (folder / "encoder.safetensors").is_file()
    checkpoints = sorted(folder.glob("checkpoints/step-*.pt")) or list(folder.glob("checkpoints/last"))
    if checkpoints and (encoder == "momentum" or not finished):  # encoder.safetensors holds the base encoder only
        return checkpoints[-1], not finished
    for name in ("encoder.safetensors", WEIGHTS, "pytorch_model.bin"):
        if (folder / name).is_file():
            return folder / name, False
    if (folder / "config.yaml").is_file():
        raise ValueError(
            f"{folder} is a run without encoder or checkpoint yet; wait for its first checkpoint, or continue it with "
            "`patchmix pretrain … --resume auto`"
        )
    raise ValueError(f"{folder} holds no encoder; expected a run (encoder.safetensors) or an exported model")


def _own(entries: dict[str, Any], metadata: Mapping[str, str], encoder: Which | None, heads: int | None) -> Backbone:
    """From encoder.safetensors, an export, a fine-tuned model or a run's checkpoint."""
    if "patchmix" in metadata:
        # Exports for torchvision have its names, fine-tuned models a classifier.
        weights = {rename(name, FROM_TORCHVISION): w for name, w in entries.items() if not name.startswith("head.")}
        backbone = Backbone.from_metadata(metadata["patchmix"], weights)
        kept = backbone.origin.get("encoder", "base")
        if encoder not in (None, kept):
            raise ValueError(f"it holds only the {kept} encoder; for the {encoder} one, give the run's checkpoint")
    else:
        backbone = _from_run_checkpoint(entries, encoder or "base")
    if heads not in (None, backbone.architecture.heads):
        raise ValueError(f"its encoder has {backbone.architecture.heads} heads; leave heads={heads} out")
    return backbone


def _from_run_checkpoint(entries: Mapping[str, Any], encoder: Which) -> Backbone:
    prefix = {"base": "encoder.", "momentum": "momentum_copy.network.0."}[encoder]
    state = entries["method"].items()
    weights = {str(name).removeprefix(prefix): tensor for name, tensor in state if str(name).startswith(prefix)}
    if not weights:
        raise ValueError(f"there is no {encoder} encoder; this run's method keeps none; use the other one")
    config: Mapping[str, Any] = entries["config"]
    try:
        model, views = config["model"], config.get("views", {})
        sizes = {key: model.get(key) for key in ("image_size", "patch_size", "dim", "depth", "heads")}
        with torch.device("meta"):
            stem, in_chans = model.get("stem", "patch"), model.get("in_chans") or 3
            shell = create_encoder(model["name"], in_chans=in_chans, stem=stem, **sizes)
        architecture = Architecture.of(model["name"], shell)
        architecture.check(weights, "this is not the encoder that the configuration describes")
        origin = {"format": "patchmix", "recipe": config.get("recipe"), "step": entries.get("step"), "encoder": encoder}
        origin |= {"method": config.get("method", {}).get("name"), "data": config.get("data", {}).get("path")}
        return Backbone(architecture, weights, **normalization(views), origin=origin)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no usable configuration ({error}); it was not written by a run") from error


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
        hint = f"did you mean timm:{near[0]}?" if near else "timm.list_models() lists them"
        raise ValueError(f"timm has no model {architecture}; {hint}")
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
    path, source = fetch(repository, filename, revision)
    encoder, weights = timm_encoder(architecture, read_entries(path)[0], {})
    tagged = f"{architecture}.{cfg.tag}" if cfg.tag else architecture
    origin = {"format": "timm", "file": tagged, **source}
    return Backbone(encoder, weights, **normalization(vars(cfg)), origin=origin, name=tagged)


def _hub_model(source: str) -> Backbone:
    """hf://user/name or hf://user/name@revision: a timm model's repository, or one that `export` made."""
    repository, _, revision = source.strip("/").partition("@")
    _, config = fetch(repository, "config.json", revision)
    path, origin = fetch(repository, WEIGHTS, config["commit"])
    backbone = load_backbone(path.parent)
    return dataclasses.replace(backbone, origin=backbone.origin | origin, name=repository)


def fetch(repository: str, filename: str, revision: str) -> tuple[Path, dict[str, str]]:
    """Downloads a file of the Hugging Face Hub with a progress bar, or takes it from the cache, also offline.

    Returns its place, and what a backbone's `origin` says about it: repository, commit, SHA-256. A file whose SHA-256
    is not the one that the hub states is refused.
    """
    absent = (
        f"{filename} of {repository} is not on this machine, and the hub can't be reached; fetch it where there is a "
        f"connection with `hf download {repository} --local-dir DIR`, copy DIR here and give DIR instead"
    )
    try:
        endpoint = os.environ.get("HF_ENDPOINT")  # huggingface_hub itself looks at it once, when it is imported
        path = Path(hf_hub_download(repository, filename, revision=revision or None, endpoint=endpoint))
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = f" at {revision}" if revision else ""
        reason = "is gated; accept its terms on the hub and log in with `hf auth login`"
        reason = reason if isinstance(error, GatedRepoError) else f"is not on the hub{at}, or private; check its name"
        raise ValueError(f"{repository} {reason}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ValueError(absent) from error
    except EntryNotFoundError as error:
        raise ValueError(
            f"{repository} has no {filename}; only safetensors are fetched, as pickled weights could run code"
        ) from error
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is not the name of a repository; write hf://user/name") from error
    except Exception as error:  # of whichever HTTP library huggingface_hub uses
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"{absent} ({reason})") from error
    sha256 = hashlib.sha256(np.memmap(path, mode="r").data).hexdigest()  # mapped: it may be larger than the memory
    stated = path.resolve().name  # the cache names large files by the SHA-256 that the hub states
    if re.fullmatch(r"[0-9a-f]{64}", stated) and stated != sha256:
        raise ValueError(
            f"{filename} of {repository} is damaged: its SHA-256 is {sha256[:12]}…, the hub states {stated[:12]}…; "
            f"remove {path.resolve()} and try again"
        )
    return path, {"repository": repository, "commit": path.parent.name, "sha256": sha256}
