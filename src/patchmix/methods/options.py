"""The options of every method, with the papers' defaults: the comment behind a field is its help. No torch here."""

from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval, Lt, MinLen

from patchmix.schedules import stage

Count = Annotated[int, Ge(1)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Temperature = Annotated[float, Interval(gt=0, le=1)]
NonNegative = Annotated[float, Ge(0), Lt(inf)]
MixName = Literal["patchmix", "mixup", "cutmix", "cutmix+mixup", "resizemix", "regionswap"]


@dataclass(frozen=True)
class PatchMixOptions:
    """PatchMix, with the paper's defaults; docs/fidelity.md lists where the authors' code differs."""

    mix: MixName = "patchmix"  # How images are mixed.
    num_mix: int | Annotated[tuple[int, ...], MinLen(1)] = 3
    """M, images per mix of patchmix; each step draws one of several values."""
    num_mix_stages: bool = False  # Take the values of num_mix in turn, each for an equal part of the training.
    mix_blocks: Annotated[tuple[Count, ...], MinLen(1)] = (1,)
    """Side of the mixed blocks in patches; several values, such as 4 2 1, take equal parts of the training."""
    temperature: Temperature = 0.2  # Temperature τ.
    weights: tuple[NonNegative, NonNegative, NonNegative] = (1.0, 1.0, 1.0)
    """Weights of origin-to-origin, mix-to-origin and mix-to-mix; 0 also leaves out the local crops of the first two."""
    region_weight: NonNegative = 0.0
    """Weight of region-to-origin: in a mixed image, each original has a class token of its own, a query for its key."""
    mixed_ramp: Fraction = 0.0  # Fraction of the training over which the weights of the mixed terms rise from 0.
    directions: Literal["paper", "shared", "symmetric"] = "paper"
    """Queries: mixed of view 1, plain of view 2 (paper); all of view 1, a pass less (shared); both ways (symmetric)."""
    plain_share: Annotated[float, Interval(gt=0, le=1)] = 1.0  # Fraction of the batch whose plain images are queries.
    mixed_share: Annotated[float, Interval(gt=0, le=1)] = 1.0  # Fraction of the batch whose mixed images are queries.
    normalize_mix_to_mix: bool = False  # Scale the rows of ω to sum to 1; in the paper they sum to M.
    mix_across: bool = False  # Mix over the batch of all processes, not per process.
    label_smoothing: Fraction = 0.0  # Label smoothing of origin-to-origin.
    mixed_query: Literal[1, 2] = 1  # The view that is mixed to make the query.
    momentum_encoder: bool = True  # Compute keys with a momentum encoder; otherwise with the encoder itself.
    momentum: Fraction = 0.996  # Momentum μ at the start; it rises to 1 by a cosine.
    momentum_stages: Annotated[int, Ge(0)] = 0  # Raise μ in this many equal stages; 0 raises it every step.
    momentum_update: Literal["after_step", "before_keys"] = "after_step"  # When the momentum encoder is updated.
    head_hidden: Count = 4096  # Width of the heads' hidden layers.
    head_out: Count = 256  # Size of the projections and predictions.

    def num_mix_at(self, progress: float) -> tuple[int, ...]:
        """The values of M that a step draws from."""
        values = (self.num_mix,) if isinstance(self.num_mix, int) else self.num_mix
        return (stage(values, progress),) if self.num_mix_stages else values


@dataclass(frozen=True)
class MoCoV3Options:
    """MoCo v3, with the paper's defaults for ViT (Sections 3 and 4.2)."""

    temperature: Temperature = 0.2  # Temperature τ.
    momentum: Fraction = 0.99  # Momentum m at the start; it rises to 1 by a cosine.
    frozen_patch_embed: bool = True  # Keep the random patch projection fixed (MoCo v3, Section 4.2).
    head_hidden: Count = 4096  # Width of the heads' hidden layers.
    head_out: Count = 256  # Size of the projections and predictions.


@dataclass(frozen=True)
class SimCLROptions:
    """SimCLR, with the paper's defaults for ImageNet; for CIFAR-10 it uses τ = 0.5 (appendix B.9)."""

    temperature: Temperature = 0.1  # Temperature τ.
    head_layers: Count = 2  # Layers of the projection head.
    head_hidden: Count = 2048  # Width of the head's hidden layers.
    head_out: Count = 128  # Size of the projections.


@dataclass(frozen=True)
class BYOLOptions:
    """BYOL, with the paper's defaults for 1000 epochs (Section 3.3)."""

    momentum: Fraction = 0.996  # Momentum τ_base at the start; it rises to 1 by a cosine.
    head_hidden: Count = 4096  # Width of the heads' hidden layers.
    head_out: Count = 256  # Size of the projections and predictions.


@dataclass(frozen=True)
class SwAVOptions:
    """SwAV, with the paper's defaults (Section 4 and appendix A); epochs became fractions of the training."""

    prototypes: Count = 3000  # Number of prototypes.
    temperature: Temperature = 0.1  # Temperature τ.
    epsilon: Temperature = 0.05  # Regularization ε of the Sinkhorn iterations.
    sinkhorn_iterations: Count = 3  # Number of Sinkhorn iterations.
    freeze_prototypes: Fraction = 0.01  # Fraction of the training with fixed prototypes.
    queue_length: Annotated[int, Ge(0)] = 0  # Embeddings kept from earlier steps, for small batches; 0 is off.
    queue_start: Fraction = 0.04  # Fraction of the training after which the queue is used.
    head_hidden: Count = 2048  # Width of the head's hidden layer.
    head_out: Count = 128  # Size of the projections.


@dataclass(frozen=True)
class DINOOptions:
    """DINO, with the paper's defaults for ViT (Section 3.2); epochs became fractions of the training."""

    student_temperature: Temperature = 0.1  # Temperature of the student, τ_s.
    teacher_temperature: tuple[Temperature, Temperature] = (0.04, 0.07)
    """Temperature τ_t of the teacher's class tokens, at the start and at the end of its warm-up."""
    teacher_warmup: Fraction = 0.1  # Fraction of the training in which τ_t rises.
    center_momentum: Fraction = 0.9  # Momentum of the center of class tokens, m in DINO's Eq. 4.
    momentum: Fraction = 0.996  # Momentum of the teacher at the start; it rises to 1 by a cosine.
    freeze_last_layer: Fraction = 0.01  # Fraction of the training with fixed prototypes.
    norm_last_layer: bool = True  # Keep prototypes at unit length.
    head_hidden: Count = 2048  # Width of the head's hidden layers.
    head_bottleneck: Count = 256  # Size of the vectors that are compared with the prototypes.
    head_out: Count = 65536  # K, the number of prototypes.


@dataclass(frozen=True)
class IBOTOptions(DINOOptions):
    """iBOT, with the paper's defaults for ViT (Section 4 and appendix B); epochs became fractions of the training."""

    weights: tuple[NonNegative, NonNegative] = (1.0, 1.0)  # Weights of L_CLS and L_MIM.
    mask_probability: Fraction = 0.5  # Probability that a view is masked.
    mask_ratio: tuple[Fraction, Fraction] = (0.1, 0.5)  # Range of the fraction of masked patches.
    teacher_patch_temperature: tuple[Temperature, Temperature] = (0.04, 0.07)  # Teacher τ_t of patch tokens, likewise.
    center_patch_momentum: Fraction = 0.9  # Momentum of the center of patch tokens, m′.
    head_out: Count = 8192  # K, the number of prototypes; one head serves class and patch tokens.


@dataclass(frozen=True)
class SDMPOptions(MoCoV3Options):
    """SDMP on MoCo v3, with the authors' defaults for ViT."""

    mix: Literal["resizemix", "cutmix", "mixup", "all"] = "resizemix"  # The mix; all draws one of the three per step.
    pasted_area: tuple[Fraction, Fraction] = (0.1, 0.9)  # Range of the fraction of an image that ResizeMix pastes over.
    weights: tuple[NonNegative, NonNegative, NonNegative] = (1.0, 0.5, 0.5)
    """Weights of source-to-source, mix-to-source and mix-to-mix."""


@dataclass(frozen=True)
class RegionCLOptions:
    """RegionCL: regions as in the authors' configuration, weights as in the paper; heads and momentum are MoCo v3's."""

    region_sides: tuple[float, float] = (3 / 7, 5 / 7)  # Range of the region's side, as a fraction of the image's.
    weights: tuple[NonNegative, NonNegative] = (1.0, 1.0)  # Weights of the instance level and the region level.
    temperature: Temperature = 0.2  # Temperature τ.
    momentum: Fraction = 0.99  # Momentum m at the start; it rises to 1 by a cosine.
    head_hidden: Count = 4096  # Width of the heads' hidden layers.
    head_out: Count = 256  # Size of the projections and predictions.


@dataclass(frozen=True)
class DistillOptions:
    """Distillation of a larger encoder into a small one."""

    teacher: str = ""  # The encoder to learn from: a run, a file, timm:NAME or hf://USER/NAME.
    distance: Literal["cosine", "mse"] = "cosine"  # How the features of student and teacher are compared.
    weights: tuple[NonNegative, NonNegative] = (1.0, 1.0)  # Weights of the class token and of the patch tokens.


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
DISTILLATION: dict[str, type[Any]] = {"distill": DistillOptions}  # also a method, but it needs a teacher
RENAMED = {"centre_momentum": "center_momentum", "centre_patch_momentum": "center_patch_momentum"}  # since 0.1
