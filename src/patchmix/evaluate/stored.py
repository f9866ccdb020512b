"""Features kept on disk: a second evaluation of the same weights on the same images does not run the encoder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from patchmix import distributed
from patchmix.data.contract import Source
from patchmix.evaluate.features import Features, Pool, check_finite, extract, labels_at, usual_resize
from patchmix.files import replacing
from patchmix.interop.backbone import Backbone

KEPT_BYTES = 10 * 2**30  # of all features together; beyond that, those unused for longest go
_VERSION = 1  # part of every key: raise it when the same arguments give other features


def cache_folder() -> Path:
    """$PATCHMIX_CACHE, else ~/.cache/patchmix/features. It may be deleted at any time."""
    chosen = os.environ.get("PATCHMIX_CACHE")
    return Path(chosen).expanduser() if chosen else Path("~/.cache/patchmix/features").expanduser()


class Reader:
    """Turns sources into features, by one encoder and in one way, or finds them where they were stored before."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        device: torch.device,
        pool: Pool = "token",
        resize: int | None = None,
        workers: int = 0,
        batch_size: int = 256,
        cache: bool = True,
    ) -> None:
        """`resize`: shorter side before the central crop; None takes `usual_resize` of the encoder's image size."""
        self.backbone = backbone
        self.digest = backbone.digest()
        self.image_size = backbone.architecture.image_size
        self.resize = usual_resize(self.image_size) if resize is None else resize
        self.pool = pool
        self.device = device
        self._workers = workers
        self._batch_size = batch_size
        self._cache = cache

    @property
    def encoder_name(self) -> str:
        """The architecture and, where the weights' origin says so, which of a pair of encoders."""
        return encoder_name(self.backbone)

    def settings(self) -> dict[str, Any]:
        """What a result has to say about how images became features."""
        return {"image_size": self.image_size, "resize": self.resize}

    def read(self, source: Source) -> Features:
        """(N, D) features with labels, in the source's order, on every process."""
        path = cache_folder() / f"{self._key(source)}.safetensors"
        if self._cache:
            stored = _load(path, source)
            # All processes read, or all compute: a home folder need not be shared between machines.
            if not distributed.any_process(stored is None, self.device):
                assert stored is not None
                return stored
        features = extract(
            self.backbone.encoder().to(self.device),
            source,
            image_size=self.image_size,
            resize=self.resize,
            mean=self.backbone.mean,
            std=self.backbone.std,
            device=self.device,
            pool=self.pool,
            batch_size=self._batch_size,
            workers=self._workers,
            progress=True,
        )
        check_finite(features.vectors, source.name)
        if self._cache and distributed.is_main():
            _store(path, features)
        return features

    def _key(self, source: Source) -> str:
        # The architecture is part of it: the number of heads changes features and shows in no weight.
        described = {
            "version": _VERSION,
            "weights": self.digest,
            "architecture": repr(self.backbone.architecture),
            "data": source.fingerprint(),
            "size": self.image_size,
            "resize": self.resize,
            "mean": self.backbone.mean,
            "std": self.backbone.std,
            "pool": self.pool,
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:40]


def encoder_name(backbone: Backbone) -> str:
    shape = backbone.architecture
    ours = "recipe" in backbone.origin  # a run keeps its base encoder
    which = backbone.origin.get("encoder") or ("base" if ours else None)
    return f"{shape.name} ({which} encoder)" if which else shape.name


def _store(path: Path, features: Features) -> None:
    tensors = {"vectors": features.vectors.contiguous(), "indices": features.indices.contiguous()}
    checks = {name: str(_checksum(tensor)) for name, tensor in tensors.items()}
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata=checks)
    except OSError as error:  # a full disk or a read-only home must not cost the evaluation
        warnings.warn(f"features are not kept: {path.parent} can't be written ({error.strerror})", stacklevel=2)
    else:
        with contextlib.suppress(OSError):  # another process may be doing the same
            _forget_unused(path)


def _forget_unused(newest: Path) -> None:
    """Removes the features unused for longest, but never the newest, until all are within KEPT_BYTES."""
    kept = [path for path in newest.parent.glob("*.safetensors") if re.fullmatch("[0-9a-f]{40}", path.stem)]
    total = 0
    for path in sorted(kept, key=lambda path: (path == newest, path.stat().st_mtime), reverse=True):
        total += path.stat().st_size
        if total > KEPT_BYTES and path != newest:
            path.unlink()


def _load(path: Path, source: Source) -> Features | None:
    """What `_store` wrote, or None where it is missing or damaged."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            checks: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("vectors", "indices")}
    except (SafetensorError, OSError):
        return None
    if any(checks.get(name) != str(_checksum(tensor)) for name, tensor in tensors.items()):
        return None
    with contextlib.suppress(OSError):  # a cache that others own
        os.utime(path)  # used now
    return Features(tensors["vectors"], labels_at(source, tensors["indices"]), tensors["indices"])


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.numpy().data)
