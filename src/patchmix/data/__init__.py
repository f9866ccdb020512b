"""From bytes to batches of views: where images come from, how they are augmented, in which order they arrive."""

from patchmix.data.loader import Batch, Loader, one_pass
from patchmix.data.sources import (
    DecodeError,
    InMemorySource,
    Source,
    Split,
    check_decodable,
    has_split,
    in_memory,
    open_source,
)
from patchmix.data.views import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    CenterCrop,
    Transform,
    View,
    Views,
    to_float,
    two_views,
)

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Batch",
    "CenterCrop",
    "DecodeError",
    "InMemorySource",
    "Loader",
    "Source",
    "Split",
    "Transform",
    "View",
    "Views",
    "check_decodable",
    "has_split",
    "in_memory",
    "one_pass",
    "open_source",
    "to_float",
    "two_views",
]
