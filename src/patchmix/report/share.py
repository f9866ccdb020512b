"""Weights for others: `patchmix export`, the model card, and `patchmix push` to the Hugging Face Hub."""

import contextlib
import io
import re
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from patchmix.data.views import usual_resize
from patchmix.evaluate.results import read_results
from patchmix.files import check_absent, write_text
from patchmix.interop.backbone import Backbone
from patchmix.interop.exporting import Exported, export, normalization
from patchmix.interop.loading import load_backbone
from patchmix.report.ablation_table import markdown_table
from patchmix.report.curves import read_history
from patchmix.settings import Export, Push

FACTS = {"data": "trained on", "images": "training images", "recipe": "recipe", "method": "method"}
FACTS |= {"epochs": "epochs", "step": "optimizer steps", "seed": "seed", "file": "converted from"}


def export_weights(settings: Export) -> Exported:
    """Writes an encoder for another program, with a model card for the Hub; prints the code that opens it."""
    if settings.format != "huggingface" and settings.license:
        raise ValueError("--license is for the model card; add --format huggingface, or leave it out")
    if settings.format == "huggingface" and not settings.overwrite:
        check_absent(settings.out / "README.md")
    backbone = load_backbone(settings.weights, encoder=settings.encoder)
    exported = export(backbone, settings.out, settings.format, overwrite=settings.overwrite)
    if settings.format == "huggingface":
        path, repo = settings.out / "README.md", f"USER/{settings.out.resolve().name}"
        write_text(path, model_card(backbone, settings.weights, repo, settings.license))
        exported.files.append(path)
    print("\n".join([*(f"wrote {path}" for path in exported.files), "", exported.usage]))
    return exported


def push(settings: Push) -> dict[str, Any]:
    """Uploads what `export --format huggingface` writes; without `send` it only prints what it would upload."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", settings.repo):
        raise ValueError(f"{settings.repo!r} is not a repository on the Hub; write it as user/name")
    backbone = load_backbone(settings.weights, encoder=settings.encoder)
    card = model_card(backbone, settings.weights, settings.repo, settings.license)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        export(backbone, out, "huggingface")
        (out / "README.md").write_text(card, "utf-8")
        sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
        listed = "\n".join(f"  {name:<20} {size / 1e6:8.2f} MB" for name, size in sizes.items())
        print(f"for {settings.repo}:\n{listed}\n\n{card}")
        url = _upload(out, settings) if settings.send else None
    print(f"uploaded: {url}" if url else "nothing was sent; upload it with --send")
    return {"repo": settings.repo, "files": sizes, "card": card, "url": url}


def _upload(folder: Path, settings: Push) -> str:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    api = huggingface_hub.HfApi()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            api.create_repo(settings.repo, private=settings.private, exist_ok=True)
            commit = api.upload_folder(repo_id=settings.repo, folder_path=folder, commit_message="Upload with patchmix")
    except Exception as error:  # the library has a type of its own for each cause, and passes on those of its client
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            remedy = "log in with `hf auth login`, and check that you may write there"
        else:
            remedy = "check the connection, then repeat the command"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"can't upload to {settings.repo} ({reason}); {remedy}") from error
    return str(commit.commit_url)


def model_card(backbone: Backbone, weights: str, repo: str, license: str | None = None) -> str:
    """The README.md of a repository on the Hub; `weights` is a run's folder, if cost and results are to be listed."""
    shape, origin = backbone.architecture, backbone.origin
    millions = sum(tensor.numel() for tensor in backbone.weights.values()) / 1e6
    size = f"patches of {shape.patch_size} px, width {shape.dim}, {shape.depth} blocks, {shape.heads} heads"
    rows = {"architecture": f"{shape.name}, {millions:.1f} M parameters: {size}"}
    for key, name in FACTS.items():
        if key in origin:
            rows[name] = f"{origin[key]:,}" if key in ("images", "step") else str(origin[key])
    if source := origin.get("start", {}).get("weights", {}).get("source"):
        rows["continued from"] = source
    history, step = read_history(weights), int(origin.get("step", 0))
    seconds = history.last("seconds")
    if history.flops_per_image and history.batch_size and step:
        rows["training FLOPs"] = f"{step * history.batch_size * history.flops_per_image:.2g}"
    if seconds is not None:
        rows["training time"] = f"{seconds / 3600:.2g} hours"
    rows |= {"license of the weights": license or "not stated", "SHA-256 of the weights": backbone.digest()[:16]}
    values, mean, std = normalization(backbone)
    template = files("patchmix.report") / "templates" / "card.md"
    return template.read_text(encoding="utf-8").format(
        license=f"license: {license}\n" if license else "",
        name=repo.split("/")[1],
        repo=repo,
        how=f"pre-trained without labels by {origin['method']}" if "method" in origin else "converted by patchmix",
        dim=shape.dim,
        facts="\n".join(markdown_table(["", ""], rows.items())),
        results=_evaluations(Path(weights), backbone.digest()),
        size=shape.image_size,
        resize=usual_resize(shape.image_size),
        values=values,
        mean=[float(f"{value:.3g}") for value in mean],
        std=[float(f"{value:.3g}") for value in std],
    )


def _evaluations(run: Path, digest: str) -> str:
    """The latest result of these weights by each protocol and its options on each dataset."""
    found = [result for result in read_results(run) if digest.startswith(result.weights) and "top1" in result.metrics]
    latest = {(result.title, result.data): result for result in found}.values()
    if not latest:
        return "Not evaluated yet."
    rows = [
        (each.title, Path(each.data).name, f"{each.images:,}", each.headline, each.headline_interval) for each in latest
    ]
    return "\n".join(markdown_table(["protocol", "data", "test images", "top-1 in %", "95 % interval"], rows))
