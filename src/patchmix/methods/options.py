"""The options of every method, with the papers' defaults: the comment behind a field is its help. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

Count = Annotated[int, Ge(1)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Temperature = Annotated[float, Interval(gt=0, le=1)]
MixName = Literal["patchmix", "mixup", "cutmix", "cutmix+mixup", "resizemix", "regionswap"]


@dataclass(frozen=True)
class PatchMixOptions:
    """PatchMix; docs/fidelity.md compares the paper with the authors' code, option by option."""

    mix: MixName = "patchmix"  # how images are mixed
    num_mix: int | tuple[int, ...] = 3  # M, images per mix of patchmix; of several values each step draws one
    temperature: Temperature = 0.2  # τ
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0)  # of origin-to-origin, mix-to-origin and mix-to-mix
    normalize_mix_to_mix: bool = False  # scale the rows of ω to sum to 1; as printed they sum to M
    mix_across: bool = False  # mix over the batch of all processes, not within each process's part
    label_smoothing: Fraction = 0.0  # of the origin-to-origin targets
    mixed_query: Literal[1, 2] = 1  # the view that is mixed to make the mixed query
    momentum_encoder: bool = True  # keys from a momentum encoder; otherwise from the encoder itself
    momentum: Fraction = 0.996  # μ at the start; rises to 1 by a cosine
    momentum_stages: Annotated[int, Ge(0)] = 0  # let μ rise in this many equal stages; 0: every step
    momentum_update: Literal["after_step", "before_keys"] = "after_step"  # when the momentum encoder is updated
    head_hidden: Count = 4096  # width of the heads' hidden layers
    head_out: Count = 256  # size of the projections and predictions

    def __post_init__(self) -> None:
        if not any(self.weights):
            raise ValueError(f"weights are {self.weights}; at least one of the three must not be 0")


@dataclass(frozen=True)
class MoCoV3Options:
    """MoCo v3: the paper's for ViT (Section 3 and Section 4.2, "Stability")."""

    temperature: Temperature = 0.2  # τ
    momentum: Fraction = 0.99  # m at the start; rises to 1 by a cosine
    frozen_patch_embed: bool = True  # keep the random patch projection (Section 4.2)
    head_hidden: Count = 4096  # width of the heads' hidden layers
    head_out: Count = 256  # size of the projections and predictions


@dataclass(frozen=True)
class SimCLROptions:
    """SimCLR: the paper's for ImageNet; for CIFAR-10 it takes τ = 0.5 (appendix B.9)."""

    temperature: Temperature = 0.1  # τ
    head_layers: Count = 2  # layers of the projection head
    head_hidden: Count = 2048  # width of its hidden layers
    head_out: Count = 128  # size of the projections


@dataclass(frozen=True)
class BYOLOptions:
    """BYOL: the paper's for 1000 epochs (Section 3.3)."""

    momentum: Fraction = 0.996  # τ_base; rises to 1 by a cosine
    head_hidden: Count = 4096  # width of the heads' hidden layers
    head_out: Count = 256  # size of the projections and predictions


@dataclass(frozen=True)
class SwAVOptions:
    """SwAV: the paper's (Section 4 and appendix A); epochs are fractions of the training here."""

    prototypes: Count = 3000  # how many
    temperature: Temperature = 0.1  # τ
    epsilon: Temperature = 0.05  # ε of the Sinkhorn iterations
    sinkhorn_iterations: Annotated[int, Ge(0)] = 3  # how many
    freeze_prototypes: Fraction = 0.01  # fraction of the training in which prototypes stay fixed
    queue_length: Annotated[int, Ge(0)] = 0  # embeddings of earlier steps that balance small batches; 0: no queue
    queue_start: Fraction = 0.04  # fraction of the training after which the queue is filled and used
    head_hidden: Count = 2048  # width of the head's hidden layer
    head_out: Count = 128  # size of the projections


@dataclass(frozen=True)
class DINOOptions:
    """DINO: the paper's for ViT (Section 3.2); epochs are fractions of the training here."""

    student_temperature: Temperature = 0.1  # τ_s
    teacher_temperature: tuple[Temperature, Temperature] = (0.04, 0.07)  # τ_t at the start and after its warm-up
    teacher_warmup: Fraction = 0.1  # fraction of the training in which τ_t rises
    center_momentum: Fraction = 0.9  # m of Eq. 4
    momentum: Fraction = 0.996  # λ at the start; rises to 1 by a cosine
    freeze_last_layer: Fraction = 0.01  # fraction of the training in which prototypes stay fixed
    norm_last_layer: bool = True  # keep prototypes at length 1
    head_hidden: Count = 2048  # width of the head's hidden layers
    head_bottleneck: Count = 256  # size of what is compared with the prototypes
    head_out: Count = 65536  # K, the number of prototypes


@dataclass(frozen=True)
class IBOTOptions:
    """iBOT: the paper's for ViT (Section 4 and appendix B); epochs are fractions of the training here."""

    weights: tuple[float, float] = (1.0, 1.0)  # of L_CLS and L_MIM
    mask_probability: Fraction = 0.5  # of a view to be masked at all
    mask_ratio: tuple[Fraction, Fraction] = (0.1, 0.5)  # fraction of its patches, drawn uniformly in between
    student_temperature: Temperature = 0.1  # τ_s
    teacher_temperature: tuple[Temperature, Temperature] = (0.04, 0.07)  # of class tokens: start, after the warm-up
    teacher_patch_temperature: tuple[Temperature, Temperature] = (0.04, 0.07)  # of patch tokens
    teacher_warmup: Fraction = 0.1  # fraction of the training in which both rise
    center_momentum: Fraction = 0.9  # m
    center_patch_momentum: Fraction = 0.9  # m′
    momentum: Fraction = 0.996  # l at the start; rises to 1 by a cosine
    freeze_last_layer: Fraction = 0.01  # fraction of the training in which prototypes stay fixed
    norm_last_layer: bool = True  # keep prototypes at length 1
    head_hidden: Count = 2048  # width of the head's hidden layers
    head_bottleneck: Count = 256  # size of what is compared with the prototypes
    head_out: Count = 8192  # K, the number of prototypes; one head serves class and patch tokens


@dataclass(frozen=True)
class SDMPOptions:
    """SDMP: the authors' for ViT."""

    mix: Literal["resizemix", "cutmix", "mixup", "all"] = "resizemix"  # "all" draws one of the three for each step
    weights: tuple[float, float, float] = (1.0, 0.5, 0.5)  # of source-to-source, mix-to-source and mix-to-mix
    temperature: Temperature = 0.2  # τ
    momentum: Fraction = 0.99  # m at the start; rises to 1 by a cosine
    frozen_patch_embed: bool = True  # keep the random patch projection, as MoCo v3
    head_hidden: Count = 4096  # width of the heads' hidden layers
    head_out: Count = 256  # size of the projections and predictions


@dataclass(frozen=True)
class RegionCLOptions:
    """RegionCL: regions and weights as in the paper; the rest is MoCo v3's (the paper has a ResNet)."""

    region_sides: tuple[float, float] = (1 / 7, 3 / 7)  # smallest and largest side of the region, of the image's side
    weights: tuple[float, float] = (1.0, 1.0)  # of the instance level and the region level
    temperature: Temperature = 0.2  # τ
    momentum: Fraction = 0.99  # m at the start; rises to 1 by a cosine
    head_hidden: Count = 4096  # width of the heads' hidden layers
    head_out: Count = 256  # size of the projections and predictions


METHOD_OPTIONS: dict[str, type[Any]] = {
    "patchmix": PatchMixOptions,
    "mocov3": MoCoV3Options,
    "simclr": SimCLROptions,
    "byol": BYOLOptions,
    "swav": SwAVOptions,
    "dino": DINOOptions,
    "ibot": IBOTOptions,
    "sdmp": SDMPOptions,
    "regioncl": RegionCLOptions,
}
RENAMED = {"centre_momentum": "center_momentum", "centre_patch_momentum": "center_patch_momentum"}  # since 0.1
