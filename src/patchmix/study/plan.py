"""`patchmix plan`: what a training would take on given hardware, before anything runs.

Closed forms. FLOPs are exactly torch's count, memory in fp32 is within 10 % of a step's measured peak, and bytes
between processes are those of a run with two (tests). What concerns GPUs is reasoned from published peak numbers:
nothing here was measured on one. n images per device, K keys over all devices, t tokens of width d.
"""

import bisect
import dataclasses
import functools
import os
import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from patchmix import distributed
from patchmix.build import build_weightless
from patchmix.config import Config, check_known
from patchmix.device import autocast_dtype, resolve_device
from patchmix.recipes import PAPER_ROWS
from patchmix.settings import Plan
from patchmix.study.flops import config_flops, iteration, shape_of


@dataclass(frozen=True)
class Hardware:
    """One device; peak numbers as its maker publishes them."""

    name: str
    tflops: float  # dense matrix products in bf16
    memory_gb: float
    link_gb_s: float  # to the other devices of a machine, one direction
    network_gb_s: float  # to other machines, per device
    watts: float
    per_machine: int
    source: str


_DATASHEET = "NVIDIA {} datasheet"
HARDWARE = {
    "A100-40GB": Hardware("A100-40GB", 312, 40, 300, 25, 400, 8, _DATASHEET.format("A100 and DGX A100")),
    "A100-80GB": Hardware("A100-80GB", 312, 80, 300, 25, 400, 8, _DATASHEET.format("A100 and DGX A100")),
    "H100-80GB": Hardware("H100-80GB", 989, 80, 450, 50, 700, 8, _DATASHEET.format("H100 SXM and DGX H100")),
    "H200-141GB": Hardware("H200-141GB", 989, 141, 450, 50, 700, 8, _DATASHEET.format("H200 and DGX H200")),
    "L4-24GB": Hardware("L4-24GB", 121, 24, 32, 3, 72, 8, _DATASHEET.format("L4")),
    "RTX4090-24GB": Hardware("RTX4090-24GB", 165, 24, 32, 3, 450, 8, "NVIDIA Ada architecture white paper"),
    "RTX3090-24GB": Hardware("RTX3090-24GB", 71, 24, 32, 3, 350, 8, "NVIDIA GA102 architecture white paper"),
}

IMAGES = {row.data: row.images for row in PAPER_ROWS} | {"shapes": 10_000}
IMAGE_BYTES = {"imagenet": 108_000, "cifar10": 2_200, "cifar100": 2_200}  # ImageNet's training files: 138 GB
# CPU time of an image's views, measured on one core of an AMD EPYC (AVX-512): per view and per pixel of it, and the
# decoding of a JPEG per byte of the file; two views at 32 and 224 px and ten at 224 and 96 px within a third.
VIEW_SECONDS, PIXEL_SECONDS, BYTE_SECONDS = 6.0e-5, 1.2e-8, 2.1e-8
HOST_COPY_GB_S = 10.0  # device to host memory, over PCIe 4 without pinned pages
COUNTED = 8  # images in the step whose traffic is counted
USABLE = 0.9  # of the memory: the rest is for fragments, the CUDA context and NCCL


def plan(settings: Plan[Any], console: Console | None = None) -> dict[str, Any]:
    """Prints what the run would take on the hardware."""
    found = estimate(settings)

    def gb(size: float) -> str:
        return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"

    def parts(sizes: dict[str, int]) -> str:
        return ", ".join(f"{name} {gb(size)}" for name, size in sizes.items() if size)

    plain, recomputing = found["memory"], found["memory_recomputing"]
    speed = "the measured speed" if settings.here else f"{100 * found['utilization']:.0f} % of the peak"
    time = f"{found['hours']:,.1f} h" if found["hours"] >= 1 else f"{60 * found['hours']:.2g} min"
    title = f"{found['method']}, {found['model']}: {found['devices']} × {found['hardware']}"
    table = Table(title=title, box=None, show_header=False)
    rows = {
        "training": f"{found['images']:,} images × {found['epochs']:g} epochs, batch {found['batch_size']}",
        "FLOPs": f"{found['flops']:.3g} ({found['flops_per_image'] / 1e9:.1f} G per image)",
        "time": f"{time} at {speed}",
        "energy": f"{found['kwh']:,.0f} kWh at full power" if found["kwh"] else "–",
        "memory per device": f"{gb(sum(plain.values()))} ({parts(plain)})",
        "with --recompute": f"{gb(sum(recomputing.values()))} ({parts(recomputing)})",
        "largest batch per device": f"{found['largest_batch']}; with --recompute {found['largest_batch_recomputing']}",
        "loader": f"{found['images_per_second']:,.0f} images/s, {found['loader_cores']:.1f} cores",
        "data": f"{found['disk_gb']:,.1f} GB, read at {found['read_mb_s']:,.0f} MB/s",
        "traffic per step": parts(found["traffic"]) or "–",
        "traffic ÷ compute": f"{found['traffic_share']:.2f}, if nothing overlaps" if found["traffic_share"] else "–",
        "checkpoint": f"{found['checkpoint_gb']:.2f} GB, the loop stops for {found['checkpoint_stall_s']:.2f} s",
        "peak numbers": found["source"],
    }
    for name, text in rows.items():
        table.add_row(name, text)
    (console or Console()).print(table)
    return found


def estimate(settings: Plan[Any]) -> dict[str, Any]:
    """All that `patchmix plan` says."""
    config = settings.run
    check_model(config)
    devices, device = hardware_of(settings)
    generated = re.fullmatch(r"shapes:(\d+)", config.data.path)
    images = settings.images or (int(generated[1]) if generated else IMAGES.get(config.data.path))
    if images is None:
        raise ValueError(f"the number of images of {config.data.path!r} is not known here; add --images 1000000")
    if config.train.batch_size % (parts := devices * config.train.accumulate):
        nearest = max(1, round(config.train.batch_size / parts)) * parts
        raise ValueError(f"batch size {config.train.batch_size} does not divide among {devices} devices and "
                         f"{config.train.accumulate} micro-batches; use --batch-size {nearest}")  # fmt: skip
    per_image = config_flops(config)
    if per_image is None:
        raise ValueError(f"no closed form is known for {config.method.name} with {config.model.name}")
    batch, n = config.train.batch_size, config.train.batch_size // devices // config.train.accumulate
    # By default 20 % of the peak: DeiT-B's 300 epochs took 53 h on 8 V100s (Touvron et al. 2021), where 4.05e19 FLOPs
    # of 1.9e20 at 125 TFLOP/s are 21 %.
    flops_per_second = devices * device.tflops * 1e12 * settings.utilization
    epochs, minutes = config.train.epochs, config.budget_minutes
    if minutes is not None:  # as many epochs as fit
        epochs = 60 * minutes * flops_per_second / (per_image * images)
    total = per_image * images * epochs
    hours = total / flops_per_second / 3600
    rate = images * epochs / hours / 3600
    size = settings.image_kb * 1000 if settings.image_kb else IMAGE_BYTES.get(config.data.path, 108_000)
    crops, side = config.views.local_crops, shape_of(config.model).image_size
    pixels = 2 * side**2 + crops * config.views.local_size**2
    view_seconds = BYTE_SECONDS * size + VIEW_SECONDS * (2 + crops) + PIXEL_SECONDS * pixels  # of one image
    precision = config.train.precision
    if settings.here:
        low = autocast_dtype(resolve_device(config.runtime.device), precision) is not None
    else:
        low = precision == "bf16" or (precision == "auto" and bool(settings.gpus))
    plain: dict[str, Any] = {"low": low, "recompute": False, "several": devices > 1}
    recomputing, room = plain | {"recompute": True}, USABLE * device.memory_gb * 1e9
    traffic = traffic_of(config, n, devices, low=low)
    speed = device.link_gb_s if devices <= device.per_machine else device.network_gb_s
    exchange_seconds, step_seconds = sum(traffic.values()) / (speed * 1e9), batch * per_image / flops_per_second
    encoder, heads, _, copy = parameters(config)
    checkpoint_gb = (4 * (encoder + heads + copy) + 8 * (encoder + heads)) / 1e9  # weights, and two moments
    return {
        "model": config.model.name,
        "method": config.method.name,
        "hardware": device.name,
        "source": device.source,
        "devices": devices,
        "images": images,
        "epochs": epochs,
        "batch_size": batch,
        "flops_per_image": per_image,
        "flops": total,
        "utilization": settings.utilization,
        "hours": hours,
        "kwh": hours * devices * device.watts / 1000,
        "memory": memory(config, n, **plain),
        "memory_recomputing": memory(config, n, **recomputing),
        "largest_batch": largest_batch(config, room, **plain),  # per device
        "largest_batch_recomputing": largest_batch(config, room, **recomputing),
        "images_per_second": rate,
        "loader_cores": rate * view_seconds,
        "disk_gb": images * size / 1e9,
        "read_mb_s": rate * size / 1e6,
        "traffic": traffic,
        "traffic_share": exchange_seconds / step_seconds if devices > 1 else None,  # if nothing overlaps
        "checkpoint_gb": checkpoint_gb,
        "checkpoint_stall_s": checkpoint_gb / HOST_COPY_GB_S,
    }


def check_model(config: Config) -> None:
    """A ValueError where the model is that of weights, as in recipe adapt: here are none."""
    if config.model.name == "same":
        raise ValueError("recipe adapt takes its model from the weights; add --model, such as vit_small_patch16_224")


def hardware_of(settings: Plan[Any]) -> tuple[int, Hardware]:
    """The number of devices and what they are: `8xA100-80GB`, this machine as it was measured, or given numbers."""
    count, name = 1, settings.gpus
    if name and (found := re.fullmatch(r"(\d+)\s*[x×*]\s*(.+)", name)):
        count, name = int(found[1]), found[2]
    other = "--gpus" if name else "--tflops" if settings.tflops else ""
    if other and settings.here:
        raise ValueError(f"{other} and --here both give the hardware; give one of them")
    if count < 1:
        raise ValueError(f"--gpus {settings.gpus} are none; give at least one, such as 1x{name}")
    if name:
        check_known(name, HARDWARE, "GPU")
        device = HARDWARE[name]
    elif settings.here:
        device = this_machine(settings)
    elif settings.tflops and settings.memory:
        device = Hardware("given", settings.tflops, settings.memory, 10, 1, 0, 8, "--tflops and --memory")
    else:
        raise ValueError("which hardware? use --gpus 8xA100-80GB, --here, or --tflops and --memory")
    tflops, memory = settings.tflops or device.tflops, settings.memory or device.memory_gb
    return count, dataclasses.replace(device, tflops=tflops, memory_gb=memory)


def this_machine(settings: Plan[Any]) -> Hardware:
    """The rate of a few steps of the configuration here, as `patchmix bench` measures it."""
    from patchmix.study.bench import PROGRESS, measure_speed

    batch = min(16, settings.run.train.batch_size)
    config = settings.run.replace(batch_size=batch, accumulate=1, data="shapes:64", in_chans=3)  # shapes are RGB
    speed, flops = measure_speed(config, steps=1), config_flops(config, at=PROGRESS)
    assert flops is not None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    if speed["device"] != "cpu":
        memory = torch.cuda.get_device_properties(0).total_memory / 1e9
    rate = speed["images_per_second"] * flops / settings.utilization / 1e12  # what is measured is what is reached
    return Hardware(f"here ({speed['device']})", rate, memory, 10, 1, 0, 8, "measured by a step on this machine")


def memory(config: Config, n: int, *, low: bool, recompute: bool, several: bool = False) -> dict[str, int]:
    """Bytes at the peak of a training step of n images on one device: the backward pass of the heads.

    low: bf16 autocast; the stream of tokens between blocks, weights and moments stay fp32. several: gradients have
    buckets that stay, as in DistributedDataParallel.
    """
    shape = shape_of(config.model)
    encoder, head, largest, copy = parameters(config)
    trained = encoder + head
    weights = 4 * (trained + copy) + (2 * (trained + copy) if low else 0)  # autocast keeps casts of the weights
    wide, narrow = 4, 2 if low else 4
    # Of a block: its input, queries' input, q, k, v, attention's output, the MLP's input and hidden layer.
    block = 2 * wide + (1 + 3 + 1 + 4) * narrow
    last = wide + (1 + 2) * narrow  # of the class token alone
    whole = 2 * wide + (1 + 3 + 1 + 1 + 8) * narrow  # without what `_lean_mlp` recomputes

    def of(side: int) -> int:
        tokens = (side // shape.patch_size) ** 2 + 1
        kept = (shape.depth - 1) * wide + last if recompute else (shape.depth - 1) * block + last
        return tokens * shape.dim * kept + 3 * side**2 * 4 + stem(side)  # and the image itself

    def stem(side: int) -> int:
        halvings = shape.patch_size.bit_length() - 1 if shape.stem == "conv" else 0
        pixels = [(side >> i + 1) ** 2 * (shape.dim >> halvings - 1 - i) for i in range(halvings)]
        return 2 * sum(pixels) * narrow  # what batch norms and ReLUs keep

    steps = iteration(config.method.name, shape, asdict(config.method.options), config.views.local_crops)
    crops = config.views.local_crops * steps.local_views
    options, rows = config.method.options, steps.online_views + crops + steps.regions
    vectors = rows * (6 * options.head_hidden + 4 * options.head_out) * narrow
    images = 2 * 3 * shape.image_size**2 * 4 if config.method.name in ("patchmix", "sdmp") else 0  # mixed ones
    views = steps.online_views * of(shape.image_size) + crops * of(config.views.local_size)
    saved = int(n * (views + vectors + images))
    if recompute:
        saved += n * (shape.patches + 1) * shape.dim * whole
    gradients = 4 * trained if several else 4 * head
    saved += 2 * largest * 4  # two more of the largest layer's gradients, while those of both views are added
    if not several and saved + gradients < 4 * trained:
        saved, gradients = 0, 4 * trained  # the end of the backward pass, when only gradients are left
    return {"weights": weights, "gradients": gradients, "optimizer": 8 * trained, "activations": saved}


@functools.cache
def parameters(config: Config) -> tuple[int, int, int, int]:
    """Of the encoder, of the heads, of the heads' largest layer, and of the momentum copy."""
    method, _ = build_weightless(config.model, config.method, batch=1)
    encoder = sum(p.numel() for p in method.encoder.parameters())
    trained = {name: p.numel() for name, p in method.named_parameters() if not name.startswith("momentum_copy.")}
    heads = {name: count for name, count in trained.items() if not name.startswith("encoder.")}
    everything = sum(p.numel() for p in method.parameters())
    return encoder, sum(heads.values()), max(heads.values()), everything - sum(trained.values())


def largest_batch(config: Config, room: float, **how: Any) -> int:
    """Images per device whose step fits into `room` bytes; 0 if not even two do."""
    most = bisect.bisect_right(range(1 << 20), room, key=lambda n: sum(memory(config, n, **how).values())) - 1
    return most if most >= 2 else 0


def traffic_of(config: Config, n: int, devices: int, *, low: bool) -> dict[str, int]:
    """Bytes that one device sends and receives in a step, n images a pass: gradients, keys (and scores), statistics (of
    batch norms, and centers) and mixing, counted in the method's own calls; nothing is computed.

    Gathering receives what the others have; a ring's sum sends and receives 2 (D − 1)/D of its tensor.
    """
    counted = {"keys": 0, "statistics": 0, "mixing": 0}

    def gather(out: Tensor, x: Tensor) -> None:
        counted["mixing" if x.ndim == 4 else "keys"] += out.nbytes - x.nbytes

    def reduce(x: Tensor) -> None:
        counted["statistics" if x.ndim == 1 else "keys"] += x.nbytes

    model = dataclasses.replace(config.model, depth=1, freeze_blocks=0)  # blocks exchange nothing
    crops = {"local_crops": config.views.local_crops, "local_size": config.views.local_size}
    method, views = build_weightless(model, config.method, batch=COUNTED, **crops)
    with distributed.pretended(2, gather, reduce):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = method(views)["loss"]
        loss.backward()
        counted = {name: config.train.accumulate * count for name, count in counted.items()}
        method.after_step(0.5)
    encoder, head, _, _ = parameters(config)
    others, ring = devices - 1, 2 * (devices - 1) / devices
    return {
        "gradients": int(ring * 4 * (encoder + head)),
        "keys": others * n * counted["keys"] // COUNTED,
        "statistics": int(ring * counted["statistics"]),
        "mixing": others * n * counted["mixing"] // COUNTED,
    }
