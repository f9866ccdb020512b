"""The encoder as an ONNX graph, checked before it is given out."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from patchmix.interop.backbone import Backbone

TOLERANCE = 1e-4


def write_onnx(file: Backbone, path: Path) -> None:
    """One file: `images` (N, C, S, S), normalised → `features` (N, dim); N is free. Agrees with torch to 1e-4."""
    absent = [name for name in ("onnx", "onnxruntime", "onnxscript") if importlib.util.find_spec(name) is None]
    if absent:
        raise ValueError(f"ONNX export needs {' and '.join(absent)}; pip install 'patchmix-ssl[onnx]'")
    import onnx

    if sum(tensor.numel() * tensor.element_size() for tensor in file.weights.values()) >= 2**31:
        raise ValueError("the weights are above 2 GB, the limit of one ONNX file; export to timm or huggingface")
    shape = file.architecture
    encoder = file.encoder()
    images = torch.randn(
        2, shape.in_chans, shape.image_size, shape.image_size, generator=torch.Generator().manual_seed(0)
    )
    with _quiet():
        program = torch.onnx.export(
            encoder,
            (images,),
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("N", min=1)},),
            dynamo=True,
        )
    assert program is not None
    model = program.model_proto
    entries = {
        "mean": json.dumps(file.mean),
        "std": json.dumps(file.std),
        "input": "RGB / 255, minus mean, over std",
        "architecture": json.dumps(vars(shape)),
    }
    for part in (model.graph, *model.graph.node, *model.graph.input, *model.graph.output, *model.graph.value_info):
        part.ClearField("metadata_props")  # the exporter's notes: stack traces with this machine's paths
    onnx.helper.set_model_props(model, entries)
    onnx.checker.check_model(model)
    _check_against_torch(model.SerializeToString(), encoder, images)
    path.write_bytes(model.SerializeToString())


def _check_against_torch(graph: bytes, encoder: torch.nn.Module, images: torch.Tensor) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    for count in (1, 2):  # the number of images must not be frozen into the graph
        with torch.inference_mode():
            expected = encoder(images[:count]).numpy()
        (found,) = session.run(["features"], {"images": images[:count].numpy()})
        worst = float(np.abs(found - expected).max())
        if not worst <= TOLERANCE:
            raise ValueError(
                f"the ONNX graph differs from torch by {worst:.1e}, more than {TOLERANCE:.0e}; not written"
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints its progress and warns of its own internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
