"""patchmix import, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from patchmix.cli.arguments import Backbone, Count, Text, Which


def import_weights(
    checkpoint: Positional[Annotated[Path, arg(metavar="CHECKPOINT")]],
    /,
    out: Path,
    format: Text = None,
    encoder: Which = None,
    heads: Count = None,
    image_size: Count = None,
    overwrite: bool = False,
) -> None:
    """Bring in another project's encoder; afterwards every command works on OUT as on a run.

    Args:
        checkpoint: Of the authors' PatchMix, MoCo v3, DINO, iBOT, MAE, timm or torchvision.
        out: A folder for encoder.safetensors.
        format: patchmix-authors, mocov3, dino, ibot, mae, timm, torchvision or patchmix; by default found by its keys.
        heads: Attention heads, which the tensors do not tell; needed for unusual widths.
        image_size: Pixels per side; found from the position embedding if not given, interpolated if another.
        overwrite: Replace what OUT holds.
    """
    from patchmix.interop.importing import import_checkpoint

    imported = import_checkpoint(checkpoint, format=format, encoder=encoder, heads=heads, image_size=image_size)
    path = out / "encoder.safetensors"
    imported.backbone.save(path, overwrite=overwrite)
    print("\n".join([*imported.summary(), f"wrote    {path}"]))


def export_weights(
    run: Backbone,
    /,
    out: Path,
    format: Literal["timm", "torchvision", "huggingface", "onnx"] = "timm",
    encoder: Which = None,
    overwrite: bool = False,
) -> None:
    """Write an encoder for another program, and print the lines that open it there.

    Args:
        out: A file, or a folder for huggingface.
        format: What to write.
        overwrite: Replace what is there.
    """
    from patchmix.interop.exporting import export
    from patchmix.interop.loading import load_backbone

    exported = export(load_backbone(run, encoder=encoder), out, format, overwrite=overwrite)
    for path in exported.files:
        print(f"wrote {path}")
    print(f"\n{exported.usage}")
