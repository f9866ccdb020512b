"""Names and numbers → objects. The only place where configuration meets classes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from patchmix import distributed
from patchmix.config import Config, MethodConfig, ModelConfig, ViewsConfig
from patchmix.data.contract import Source
from patchmix.data.device_views import Crops, Prepare
from patchmix.data.loader import Loader
from patchmix.data.memory import check_decodable
from patchmix.data.sources import has_split, open_source
from patchmix.data.views import View, Views
from patchmix.device import autocast_dtype, cpp_compiler
from patchmix.evaluate.monitor import LIDAR_IMAGES, Guard, lidar_monitor, monitor
from patchmix.interop.backbone import check_weights, fitted
from patchmix.interop.loading import load_backbone
from patchmix.methods.byol import BYOL
from patchmix.methods.dino import DINO
from patchmix.methods.distill import Distill, Teacher
from patchmix.methods.ibot import IBOT
from patchmix.methods.method import Method
from patchmix.methods.mocov3 import MoCoV3
from patchmix.methods.patchmix import PatchMixMethod
from patchmix.methods.regioncl import RegionCL
from patchmix.methods.sdmp import SDMP
from patchmix.methods.simclr import SimCLR
from patchmix.methods.swav import SwAV
from patchmix.nn import TokenDropout, patch_size_of
from patchmix.nn.vit import (
    create_encoder,
    freeze_blocks,
    initialize_as_mocov3,
    initialize_attention_as_mimetic,
    set_sincos_positions,
)
from patchmix.schedules import Cosine, Linear, WarmupCosine, stage
from patchmix.train import optimizer
from patchmix.train.loop import Evaluator, Plan

METHODS: dict[str, Callable[..., Method]] = {
    "patchmix": PatchMixMethod,
    "mocov3": MoCoV3,
    "simclr": SimCLR,
    "byol": BYOL,
    "swav": SwAV,
    "dino": DINO,
    "ibot": IBOT,
    "sdmp": SDMP,
    "regioncl": RegionCL,
}


def build_encoder(model: ModelConfig, *, any_image_size: bool = False) -> VisionTransformer:
    names = ("image_size", "patch_size", "in_chans", "dim", "depth", "heads", "stem", "drop_path")
    shape: dict[str, Any] = {name: getattr(model, name) for name in names}
    encoder = create_encoder(model.name, any_image_size=any_image_size, **shape)
    if model.initialization != "timm":
        initialize_as_mocov3(encoder)
    if model.initialization == "mimetic":
        initialize_attention_as_mimetic(encoder)
    if model.positions not in (None, "learned"):
        set_sincos_positions(encoder, fixed=model.positions == "fixed-sincos")
    one = encoder.num_prefix_tokens == 1 and not getattr(encoder, "no_embed_class", False)  # the class token's
    encoder.author_positions = model.author_positions and one  # type: ignore[assignment]
    if model.freeze_blocks:
        freeze_blocks(encoder, model.freeze_blocks)
    return encoder


def encoder_config(config: Config) -> ModelConfig:
    """The model of a run, with the method's own positions where none are chosen."""
    if config.model.positions is None and config.method.name in ("mocov3", "sdmp"):
        return replace(config.model, positions="fixed-sincos")
    return config.model


def build_method(config: Config, encoder_weights: dict[str, Tensor] | None = None) -> Method:
    """The method with its encoder, initialized from the seed (the same on every process) or from given weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        sizes = bool(config.views.local_crops or config.train.image_sizes)
        encoder = build_encoder(encoder_config(config), any_image_size=sizes)
        if encoder_weights is not None:
            encoder_weights = fitted(encoder_weights, encoder)
            check_weights(encoder_weights, encoder.state_dict(), "the weights to start from do not fit the model")
            encoder.load_state_dict(encoder_weights)
        if any(config.train.token_dropout):
            if not isinstance(dropout := getattr(encoder, "patch_drop", None), TokenDropout):
                raise ValueError(f"token_dropout: {config.model.name} cannot drop tokens; leave --token-dropout out")
            if len(set(config.train.token_dropout)) > 1:  # how many stay changes, which torch.compile can't trace
                dropout.draw = torch.compiler.disable(dropout.draw)  # type: ignore[method-assign, no-untyped-call]
        check_sizes(config, encoder)
        encoder.set_grad_checkpointing(config.runtime.recompute)
        if config.method.name == "distill":
            if config.views.local_crops:
                raise ValueError("method distill has no use for local crops; use --local-crops 0")
            return Distill(encoder, build_teacher(config), config.method.options)
        return METHODS[config.method.name](encoder, config.method.options)


def check_sizes(config: Config, encoder: VisionTransformer) -> None:
    """A ValueError if the images of any stage do not fit the patches, or what PatchMix makes of them."""
    patch, side, options = patch_size_of(encoder), encoder.patch_embed.img_size[0], config.method.options
    sizes, crops = config.train.sides(side, patch), [config.views.local_size] * min(1, config.views.local_crops)
    for size in (side, *sizes, *crops):
        if size % patch:
            raise ValueError(f"images of {size} px do not divide into patches of {patch} px; use multiples of {patch}")
    if max(sizes) > side:
        raise ValueError(f"image_sizes has {max(sizes)}; the model takes images of {side} px at most")
    swaps = config.method.name == "regioncl"  # in the two views only
    if (swaps and min(sizes) == patch) or (getattr(options, "mix", "") == "regionswap" and patch in (*sizes, *crops)):
        raise ValueError(f"images of {patch} px are one patch, which has no regions to swap; use smaller patches")
    if getattr(options, "mix_blocks", None) is None or options.mix != "patchmix":
        return
    num_mix = 1 if isinstance(options.num_mix, int) else len(options.num_mix)
    for progress in sorted({i / n for n in (len(sizes), len(options.mix_blocks), num_mix) for i in range(n)}):
        block, most = stage(options.mix_blocks, progress), max(options.num_mix_at(progress), default=1)
        for size in (stage(sizes, progress), *crops):
            rows = size // patch
            if rows % block:
                raise ValueError(f"mix_blocks has {block}; the {rows} × {rows} patches of images of {size} px do not "
                                 "divide into such blocks")  # fmt: skip
            if (rows // block) ** 2 < most:
                raise ValueError(f"num_mix has {most}; images of {size} px have {(rows // block) ** 2} blocks to mix")


def build_teacher(config: Config) -> Teacher:
    if not config.method.options.teacher:
        raise ValueError("method distill learns from another encoder; give it with --teacher WEIGHTS")
    backbone, in_chans = load_backbone(config.method.options.teacher), config.model.in_chans
    if backbone.architecture.in_chans != in_chans:
        raise ValueError(
            f"the teacher takes {backbone.architecture.in_chans} channels, the student {in_chans}; give --in-chans "
            f"{backbone.architecture.in_chans}, or another teacher"
        )
    student = {"student_mean": config.views.mean, "student_std": config.views.std}
    return Teacher(backbone.encoder(), mean=backbone.mean, std=backbone.std, **student)


def build_weightless(
    model: ModelConfig, named: MethodConfig[Any], *, batch: int, local_crops: int = 0, local_size: int = 96
) -> tuple[Method, list[Tensor]]:
    """A method and views for it, on a CPU that computes shapes only: what FLOPs and bytes are counted on."""
    with torch.device("meta"):
        model = replace(model, initialization="timm", positions="learned")
        encoder = build_encoder(model, any_image_size=local_crops > 0)
        method = METHODS[named.name](encoder, named.options)
        side, _ = encoder.patch_embed.img_size or (0, 0)
    mode, cpu = FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu")
    method._apply(lambda tensor: FakeTensor(mode, tensor.data, cpu))  # type: ignore[no-untyped-call]
    with mode:
        sizes = [side] * 2 + [local_size] * local_crops
        views = [torch.empty(batch, model.in_chans, size, size) for size in sizes]
    method.before_step(0.5)  # nothing is fixed any more
    return method.train(), views


def build_views(views: ViewsConfig, image_size: int) -> list[View]:
    """T1, T2 and the local crops."""
    names = ("ratio", "flip", "jitter", "brightness", "contrast", "saturation", "hue", "gray", "sigma")
    same: dict[str, Any] = {name: getattr(views, name) for name in names}
    two = [View(image_size, views.area, blur=views.blur[i], solarize=views.solarize[i], **same) for i in (0, 1)]
    try:
        local = View(views.local_size, views.local_area, blur=0.5, solarize=0.0, **same)
    except ValueError as error:  # its area: the rest is that of both views
        raise ValueError(f"local_{error}") from None
    return [*two, *[local] * views.local_crops]


def build_source(config: Config) -> Source:
    cache_bytes, in_chans = round(config.data.cache_gb * 2**30), config.model.in_chans
    source = open_source(config.data.path, "train", cache_bytes=cache_bytes, in_chans=in_chans)
    check_decodable(source)
    return source


def build_loader(config: Config, source: Source, image_size: int, *, pin_memory: bool = False) -> Loader:
    if config.train.batch_size == config.train.accumulate:
        raise ValueError("one image per pass is too few for batch norms; use a larger --batch-size")
    views = build_views(config.views, image_size)
    create = Views if config.runtime.views == "cpu" else Crops
    return Loader(
        source,
        create(views, seed=config.train.seed),
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        workers=config.runtime.workers,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        accumulate=config.train.accumulate,
        pin_memory=pin_memory,
        timeout_minutes=config.runtime.timeout_minutes,
    )


def build_prepare(views: ViewsConfig, in_chans: int) -> Prepare:
    return Prepare(mean=views.mean, std=views.std, in_chans=in_chans, max_sigma=views.sigma[1])


def build_plan(config: Config, encoder: nn.Module, steps_per_epoch: int, device: torch.device) -> Plan:
    train, optim, vit = config.train, config.optim, cast("VisionTransformer", encoder)
    if config.runtime.compile and device.type == "cpu" and cpp_compiler() is None:
        raise ValueError("--compile needs a C++ compiler on the CPU; install g++, or leave --compile out")
    names = ("log_every", "monitor_every", "checkpoint_epochs", "checkpoint_minutes")
    minutes = config.budget_minutes
    step = 1.0 / max(1, round(train.epochs * steps_per_epoch)) if minutes is None else 0.0
    return Plan(
        lr=WarmupCosine(config.lr, optim.min_lr, warmup=config.warmup, step=step),
        weight_decay=Cosine(optim.weight_decay, optim.weight_decay_end),
        token_dropout=Linear(*train.token_dropout, duration=1.0),
        image_sizes=train.sides(vit.patch_embed.img_size[0], patch_size_of(vit)) if train.image_sizes else (),
        batch_size=train.batch_size,
        epochs=train.epochs,
        budget_seconds=None if minutes is None else minutes * 60,
        accumulate=train.accumulate,
        clip_grad=optim.clip_grad,
        autocast=autocast_dtype(device, train.precision),
        compile=config.runtime.compile,
        seed=train.seed,
        **{name: getattr(config.runtime, name) for name in names},
    )


def build_optimizer(config: Config, method: Method, autocast: torch.dtype | None) -> torch.optim.AdamW:
    names = ("name", "betas", "eps", "encoder_lr", "layer_decay", "head_warmup")
    settings = {name: getattr(config.optim, name) for name in names}
    return optimizer.build_optimizer(method, encoder=method.encoder, autocast=autocast, **settings)


def build_evaluators(
    config: Config, method: Method, source: Source, image_size: int, device: torch.device, guard: Guard | None = None
) -> list[Evaluator]:
    """Health of the features of some training images, kNN where they have labels, and LiDAR of the embeddings."""
    has_test = source.labels is not None and has_split(config.data.path, "test")
    how: dict[str, Any] = {"cache_bytes": round(config.data.cache_gb * 2**30), "in_chans": config.model.in_chans}
    test = open_source(config.data.path, "test", **how) if has_test else None
    bank, queries = config.runtime.monitor_bank, config.runtime.monitor_queries
    common: dict[str, Any] = {"mean": config.views.mean, "std": config.views.std, "device": device}
    two_views, few = build_views(config.views, image_size)[:2], min(LIDAR_IMAGES, bank)
    return [
        monitor(source, test, bank=bank, queries=queries, image_size=image_size, guard=guard, **common),
        lidar_monitor(source, two_views, method.embed, images=few, seed=config.train.seed, **common),
    ]
