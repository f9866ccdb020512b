"""From bytes to batches of views: where images come from, how they are augmented, in which order they arrive."""

from patchmix.data.contract import Source, Split
from patchmix.data.decode import DecodeError
from patchmix.data.device_views import Prepare
from patchmix.data.loader import Batch, Loader, one_pass
from patchmix.data.memory import InMemorySource, check_decodable, in_memory
from patchmix.data.sources import has_split, open_source
from patchmix.data.views import IMAGENET_MEAN, IMAGENET_STD, CenterCrop, Transform, View, Views, to_float, two_views

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Batch",
    "CenterCrop",
    "DecodeError",
    "InMemorySource",
    "Loader",
    "Prepare",
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
