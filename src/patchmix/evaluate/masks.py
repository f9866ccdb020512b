"""Images with a mask of class indices each, for semantic segmentation: folders of images and masks, or COCO."""

import copy
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from patchmix.data.contract import Indices, Source
from patchmix.data.decode import decode, pixel_channels, shape_of
from patchmix.data.folder import FolderSource
from patchmix.evaluate.detection.coco import CocoImages, Dataset, mask_of, read_dataset
from patchmix.evaluate.labeled import HELD_OUT, Labeled, Part, held_out
from patchmix.progress import progress_bar

T = TypeVar("T")
Mask = npt.NDArray[np.int32]  # (H, W)
IGNORED = -1
_TRAIN, _TEST = ("train", "training"), ("val", "validation", "test")
_LAYOUTS = (  # images and masks of a split
    ("images/{}", "masks/{}"),
    ("images/{}", "annotations/{}"),  # ADE20K
    ("{}", "{}annot"),  # CamVid
    ("images", "annotations/trimaps"),  # Pets, divided by two lists
    ("images", "masks"),
)


class Masked(Part):
    """Images with masks; a `Source` for the loader, whose transforms ask for the masks."""

    classes: tuple[str, ...]

    def __init__(self, images: Source, read_mask: Callable[[int], Mask], origin: str = "") -> None:
        """read_mask: from a position among `images` to a mask as it is stored. origin: fingerprint of the masks."""
        super().__init__(images, np.arange(len(images)))
        self.images, self.read_mask, self._origin = images, read_mask, origin
        self.classes = images.classes or ()
        self.indices: tuple[int, ...] = ()  # as stored, increasing, one for each of `classes`; others are ignored

    def changed(self, **values: Any) -> "Masked":
        other = copy.copy(self)
        vars(other).update(values)
        return other

    def mask(self, index: int) -> Mask:
        """Classes 0 … K - 1 (H, W), IGNORED where a pixel does not count."""
        mask = self.read_mask(int(self.positions[index]))
        places = np.searchsorted(self.indices, mask).clip(max=len(self.indices) - 1).astype(np.int32)
        return np.where(np.array(self.indices)[places] == mask, places, np.int32(IGNORED))

    def fingerprint(self) -> str:
        text = repr((super().fingerprint(), self._origin, self.indices, self.classes))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def has_masks(data: Path) -> bool:
    """Whether `open_masks` finds something to open."""
    return _coco_kind(data) is not None or any(_folders(data, layout, _TRAIN) for layout in _LAYOUTS)


def open_masks(
    data: Path, *, ignored: Sequence[int], names: Path | None = None, test: str | None = None, in_chans: int = 3
) -> Labeled:
    """Training and test images with masks. Without a test split, a fifth of the training images is held out.

    ignored: indices that are neither learned nor counted. names: a file of class names. test: name of the test split.
    """
    if (coco := _coco_kind(data)) is None:
        train, held = _open_folders(data, test, pixel_channels(in_chans))
    elif in_chans not in (1, 3):
        raise ValueError(f"{data} is COCO's, whose images are RGB; the encoder takes {in_chans} channels")
    elif names:
        raise ValueError(f"{data} is COCO's, whose annotations have class names; leave out --class-names")
    else:
        train, held = _open_coco(data, coco, test or "val2017")
    tested_on = "test split" if held else "a fifth held out"
    if held is None:
        chosen = held_out(np.zeros(len(train), np.int64), HELD_OUT)
        train, held = [train.changed(positions=train.positions[part]) for part in (~chosen, chosen)]
    known = read_names(names) if names else dict(enumerate(train.classes))
    if not coco:
        found = _occurring(train, known, ignored)
        known = known or {index: f"class {index}" for index in found}
        if len(found) < 2 or not _occurring(held, known, ignored):
            raise ValueError(
                f"the masks of {train.name} have the classes {sorted(found)}, without the ignored {sorted(ignored)}; "
                "two are needed, and one in the test masks: check --ignore-index"
            )
    indices = tuple(sorted(known.keys() - set(ignored)))
    classes = tuple(known[index] for index in indices)
    train, held = [source.changed(indices=indices, classes=classes) for source in (train, held)]
    return Labeled(train=train, test=held, classes=len(classes), tested_on=tested_on)


def read_names(path: Path) -> dict[int, str]:
    """Class names by index: a name in each line, or INDEX NAME in each line."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    pairs = [line.split(maxsplit=1) for line in lines]
    if all(len(pair) == 2 and pair[0].isdecimal() for pair in pairs):
        return {int(index): name for index, name in pairs}
    return dict(enumerate(lines))


def _folders(data: Path, layout: Sequence[str], splits: Sequence[str]) -> dict[str, list[Path]]:
    """Those of the splits whose two folders, of images and of masks, exist."""
    pairs = {split: [data / part.format(split) for part in layout] for split in splits}
    return {split: pair for split, pair in pairs.items() if all(folder.is_dir() for folder in pair)}


def _open_folders(data: Path, test: str | None, channels: int) -> tuple[Masked, Masked | None]:
    for layout in _LAYOUTS:
        if not (found := [*_folders(data, layout, _TRAIN).values()]):
            continue
        train = _paired(*found[0], channels=channels)
        if "{}" not in layout[0]:
            if test:
                raise ValueError(f"{data} has no folders for splits, so no split {test!r}; leave out --test")
            if not (file := data / "annotations/test.txt").is_file():
                return train, None
            return _listed(train, file.with_name("trainval.txt")), _listed(train, file)
        held = _folders(data, layout, (test, *_TEST) if test else _TEST)
        if test and test not in held:
            raise ValueError(f"{data} has no split {test!r} with images and masks; it has {', '.join(held) or 'none'}")
        return train, _paired(*next(iter(held.values())), channels=channels) if held else None
    raise ValueError(
        f"{data} has no images with masks; expected images/train and masks/train, images/training and "
        "annotations/training (ADE20K), train and trainannot (CamVid), images and annotations/trimaps (Pets), or COCO"
    )


def _paired(images: Path, masks: Path, *, channels: int) -> Masked:
    """Each image with the mask of the same name below `masks`."""
    pictures = FolderSource(images, name=str(images))
    pictures.channels = channels
    try:
        drawn = FolderSource(masks, name=str(masks))
    except ValueError as error:
        raise ValueError(f"{masks} has no masks; put a PNG of class indices there for each image") from error
    numbers = {PurePath(drawn.key(i)).with_suffix(""): i for i in range(len(drawn))}
    wanted = [PurePath(pictures.key(i)).with_suffix("") for i in range(len(pictures))]
    if missing := next((stem for stem in wanted if stem not in numbers), None):
        raise ValueError(f"the image {images / missing} has no mask; expected {masks / missing}.png")
    read = partial(_read_mask, drawn, np.array([numbers[stem] for stem in wanted]))
    return Masked(pictures, read, drawn.fingerprint())


def _listed(source: Masked, file: Path) -> Masked:
    """The images whose names begin the lines of a file."""
    names = {line.split()[0] for line in file.read_text(encoding="utf-8").splitlines() if line.split()}
    return source.changed(
        positions=np.array([i for i in range(len(source)) if PurePath(source.key(i)).stem in names], np.int64)
    )


def _read_mask(drawn: FolderSource, numbers: Indices, index: int) -> Mask:
    number = int(numbers[index])
    try:
        with Image.open(io.BytesIO(drawn.encoded(number))) as image:
            if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
                raise ValueError(f"its mode is {image.mode}")
            return np.asarray(image).astype(np.int32)
    except (OSError, ValueError, SyntaxError) as error:  # Pillow's and ours
        path = f"{drawn.name}/{drawn.key(number)}"
        raise ValueError(f"{path} is not a mask ({error}); give a PNG with one channel of class indices") from error


def _occurring(source: Masked, known: Mapping[int, str], ignored: Sequence[int]) -> set[int]:
    """The indices in all masks; a ValueError where one is not `known` (if any are) or a mask has another size."""
    images = source.images
    assert isinstance(images, FolderSource)

    def indices_of(position: int) -> set[int]:
        mask, whose = source.read_mask(position), f"the mask of {images.name}/{images.key(position)}"
        height, width, *_ = shape_of(images.encoded(position), images.key(position), images.channels)
        if mask.shape != (height, width):
            sizes = f"{mask.shape[1]} × {mask.shape[0]} px, the image {width} × {height}"
            raise ValueError(f"{whose} is {sizes}; give masks of their images' size")
        found = set(np.flatnonzero(np.bincount(mask.ravel())).tolist()) - set(ignored)
        if known and (beyond := found - known.keys()):
            classes = f"there are {len(known)} classes, {min(known)} … {max(known)}"
            raise ValueError(f"{whose} has index {max(beyond)}, but {classes}; set --class-names or --ignore-index")
        return found

    return set().union(*in_threads(indices_of, source.positions, f"masks of {source.name}"))


def in_threads(function: Callable[[int], T], indices: Indices, title: str) -> Iterator[T]:
    """The function of each index, in order, computed by threads ahead of their use."""
    with ThreadPoolExecutor() as pool, progress_bar(title, len(indices)) as advance:
        for result in pool.map(function, indices.tolist()):
            yield result
            advance(1)


def _coco_kind(data: Path) -> str | None:
    kinds = ("panoptic", "instances")
    return next((kind for kind in kinds if (data / f"annotations/{kind}_train2017.json").is_file()), None)


def _open_coco(data: Path, kind: str, test: str) -> list[Masked]:
    """Panoptic segments, or instances on a background."""
    sources = []
    for split in ("train2017", test):
        file = data / "annotations" / f"{kind}_{split}.json"
        dataset = read_dataset(file)
        if kind == "panoptic":
            dataset["annotations"] = _segments(dataset)
        images = CocoImages(data / split, file, dataset)
        source = Masked(images, partial(_coco_mask, images, file.with_suffix("") if kind == "panoptic" else None))
        classes = images.classes if kind == "panoptic" else ("background", *images.classes)
        sources.append(source.changed(classes=classes))
    if sources[0].classes != sources[1].classes:
        raise ValueError(f"{kind}_{test}.json has other categories than {kind}_train2017.json; both must be the same")
    return sources


def _segments(dataset: Dataset) -> list[dict[str, Any]]:
    """Panoptic segments as annotations of their own, with a file and a color in it instead of run lengths."""
    sizes = {entry.get("id"): [entry.get("height"), entry.get("width")] for entry in dataset["images"]}
    segments: list[dict[str, Any]] = []
    for annotation in dataset["annotations"]:
        image = annotation.get("image_id")
        shape = {"size": sizes.get(image), "counts": "", "file": annotation.get("file_name")}
        for segment in annotation.get("segments_info", ()):
            own = {"id": len(segments), "image_id": image, "segmentation": {**shape, "color": segment.get("id")}}
            segments.append({"area": 0, **segment, **own})
    return segments


def _coco_mask(source: CocoImages, folder: Path | None, index: int) -> Mask:
    """Instances, small ones above large ones, on background 0; or the segments in a PNG of `folder`."""
    entry, annotations = source.entry(index), source.annotations(index)
    mask = np.full((entry["height"], entry["width"]), 0 if folder is None else IGNORED, np.int32)
    if folder is not None and annotations:
        path = folder / annotations[0]["segmentation"]["file"]
        pixels = decode(path.read_bytes() if path.is_file() else b"", str(path))
        if pixels.shape[:2] != mask.shape:
            raise ValueError(f"{path} has another size than {source.key(index)}; give the PNG made for this image")
        colors = pixels @ np.array([1, 256, 65536], np.int32)
    for annotation in sorted(annotations, key=lambda annotation: -float(annotation["area"])):
        if folder is None:
            mask[mask_of(annotation, *mask.shape) > 0] = source.label(annotation)
        else:
            mask[colors == annotation["segmentation"]["color"]] = source.label(annotation) - 1
    return mask
