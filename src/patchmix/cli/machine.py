"""patchmix bench, doctor: what this machine can do."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from patchmix.cli.arguments import Count, Set, Text

AsJson = Annotated[bool, arg(name="json", help="JSON instead of a table.")]


def doctor(runs: Path = Path("runs"), as_json: AsJson = False) -> None:
    """Say what is active on this machine, and what would make runs faster.

    Args:
        runs: Where runs are going to be written.
    """
    from patchmix.settings import Doctor
    from patchmix.study.doctor import doctor

    doctor(Doctor(runs, as_json))


def bench(
    data: str = "shapes",
    recipe: str = "paper",
    model: Text = None,
    method: Text = None,
    batch_size: int = 64,
    workers: Count = None,
    device: Text = None,
    compile: bool = False,
    steps: int = 5,
    as_json: AsJson = False,
    settings: Set = (),
) -> None:
    """Measure how fast a model trains here: images a second, share of the machine's best, phases, memory.

    Args:
        data: As for pretrain; by default generated images.
        recipe: paper, official or demo.
        model: vit_{tiny,small,base}_patchP_S, or any timm ViT.
        method: As for pretrain.
        batch_size: Images per step.
        workers: Processes that prepare images.
        device: auto, cpu or cuda.
        compile: As for pretrain; what compiling takes is told apart.
        steps: Steps to measure, after one to warm up.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1")
    from timm.models.vision_transformer import VisionTransformer

    from patchmix import build
    from patchmix.device import resolve_device
    from patchmix.interop.backbone import Architecture
    from patchmix.run import configure
    from patchmix.study.bench import measure_speed, print_speed
    from patchmix.study.flops import METHODS, Sizes, method_flops
    from patchmix.train.allocator import keep_freed_memory, return_freed_memory

    config = configure(
        data,
        recipe=recipe,
        model=model,
        method=method,
        batch_size=batch_size,
        workers=workers,
        device=device,
        compile=compile or None,
        settings=settings,
    )
    target = resolve_device(config.runtime.device)
    if target.type == "cpu":
        (return_freed_memory if config.runtime.recompute else keep_freed_memory)()
    source = build.build_source(config)
    made = build.build_method(config).to(target).train()
    encoder = made.encoder
    assert isinstance(encoder, VisionTransformer)
    shape = Architecture.of(config.model.name, encoder)
    loader = build.build_loader(config, source, shape.image_size, pin_memory=target.type == "cuda")
    flops = None
    if config.method.name in METHODS:
        heads = {key: config.method.options[key] for key in ("head_hidden", "head_out") if key in config.method.options}
        sizes = Sizes(
            shape.image_size, shape.patch_size, encoder.embed_dim, len(encoder.blocks), config.model.in_chans, **heads
        )
        views = config.views
        flops = method_flops(
            config.method.name,
            sizes,
            batch=loader.micro_batch_size,
            attention=True,
            local_crops=views.local_crops,
            local_size=views.local_size,
        )
    speed = measure_speed(
        made,
        loader.batches(),
        build.build_prepare(views=config.views, in_chans=config.model.in_chans),
        build.build_plan(config, loader.steps_per_epoch, target),
        device=target,
        flops=flops,
        steps=steps,
    )
    if as_json:
        print(json.dumps(asdict(speed), indent=1))
    else:
        print_speed(speed, f"{config.method.name}, {config.model.name}")
