"""Kinds of argument that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

Text = Annotated[str | None, arg(metavar="TEXT")]
Number = Annotated[float | None, arg(metavar="NUMBER")]
Count = Annotated[int | None, arg(metavar="N")]
File = Annotated[Path | None, arg(metavar="PATH")]
Data = Positional[Annotated[str, arg(metavar="DATA")]]
Backbone = Positional[
    Annotated[
        str,
        arg(
            metavar="RUN",
            help="A run's folder, an encoder.safetensors, another project's checkpoint, or timm:NAME.",
        ),
    ]
]
Which = Annotated[
    Literal["base", "momentum"] | None,
    arg(metavar="{base,momentum}", help="Which encoder of a checkpoint; by default what its project evaluates."),
]
Pool = Annotated[Literal["token", "mean"], arg(help="The class token, or the mean over patch tokens.")]
Set = UseAppendAction[
    Annotated[
        tuple[str, ...],
        arg(name="set", metavar="KEY=VALUE", help="Override a setting, e.g. optim.base_lr=1e-3; may be repeated."),
    ]
]
