"""Data from a Python program gives the same batches, runs and results as the same images in a folder."""

from __future__ import annotations

import itertools
import pickle
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset
from torchvision.datasets import ImageFolder

import patchmix
from benchmarks.plain_views import two_views
from patchmix.data.decode import DecodeError
from patchmix.data.loader import Loader
from patchmix.data.python import name_of, pixels_of
from patchmix.data.sources import has_split, open_source
from patchmix.data.views import Views
from tests.conftest import SMALL_RUN

PIXELS = np.random.default_rng(0).integers(0, 256, (48, 20, 24, 3), dtype=np.uint8)
LABELS = np.arange(48) % 3


class Pictures(Dataset[Any]):
    def __init__(self, labeled: bool = True) -> None:
        self.labeled = labeled

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> Any:
        picture = Image.fromarray(PIXELS[index])
        return (picture, int(LABELS[index])) if self.labeled else picture


class HuggingFace:
    """What is used of a `datasets.Dataset`."""

    class Image:
        pass

    class ClassLabel:
        names = ("a", "b", "c")

    features: dict[str, Any] = {"photo": Image(), "kind": ClassLabel()}  # noqa: RUF012
    column_names = ["photo", "kind"]  # noqa: RUF012
    _fingerprint = "0123456789abcdef"

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, key: Any) -> Any:
        return LABELS.tolist() if key == "kind" else {"photo": Image.fromarray(PIXELS[key]), "kind": int(LABELS[key])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for i, image in enumerate(PIXELS):
        cv2.imwrite(str(root / f"{i:02}.png"), image[:, :, ::-1])
    return root


def forms(folder: Path) -> dict[str, Any]:
    planes = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    return {
        "array": PIXELS,
        "array with labels": (PIXELS, LABELS),
        "tensor": planes,
        "float tensor": planes / 255,
        "data set": Pictures(),
        "data set without labels": Pictures(labeled=False),
        "tensor data set": TensorDataset(planes, torch.from_numpy(LABELS)),
        "hugging face": HuggingFace(),
        "files": sorted(folder.iterdir()),
    }


def batches(data: Any, *, cache: int = 0, workers: int = 0, start: int = 0) -> list[torch.Tensor]:
    source = open_source(name_of(data), cache_bytes=cache)
    loader = Loader(source, Views(two_views(16), seed=1), batch_size=8, seed=1, workers=workers)
    found = loader.batches(start)
    eight = itertools.islice(found, 8)
    return [torch.cat([batch.indices.float(), batch.views[0].float().flatten()]) for batch in eight]


@pytest.mark.parametrize("form", forms(Path("/")))
def test_same_batches_as_from_a_folder(form: str, folder: Path) -> None:
    data = forms(folder)[form]
    expected = batches(folder)
    found = batches(data)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(batches(data, cache=1 << 20), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(batches(data, start=3)[:5], expected[3:], strict=True))  # a resume
    source = open_source(name_of(data), cache_bytes=0)
    spawned = pickle.loads(pickle.dumps(source))  # as workers get it on macOS
    assert np.array_equal(spawned.load(5), source.load(5))
    labeled = form in ("array with labels", "data set", "tensor data set", "hugging face")
    assert (source.labels is not None) == labeled
    if labeled:
        assert source.labels is not None and np.array_equal(source.labels, LABELS)
    assert source.classes == (("a", "b", "c") if form == "hugging face" else None)


def test_the_real_hugging_face_library(folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets: make test-extras")
    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["a", "b", "c"]),
            "image": datasets.Image(),
            "note": datasets.Value("string"),
        }
    )
    columns = {"image": [str(file) for file in sorted(folder.iterdir())], "label": LABELS, "note": ["x"] * len(LABELS)}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "set")
    data = datasets.load_from_disk(tmp_path / "set")
    for form in (data, data.with_format("torch")):
        assert all(torch.equal(a, b) for a, b in zip(batches(form, workers=2), batches(folder), strict=True))
    source = open_source(name_of(data), cache_bytes=0)
    assert source.labels is not None and np.array_equal(source.labels, LABELS) and source.classes == ("a", "b", "c")
    assert name_of(data) == name_of(datasets.load_from_disk(tmp_path / "set")) != name_of(data.select(range(9)))


def test_in_workers(folder: Path) -> None:
    assert all(torch.equal(a, b) for a, b in zip(batches(Pictures(), workers=2), batches(folder), strict=True))


def test_names_say_whether_the_data_is_the_same() -> None:
    changed = PIXELS.copy()
    changed[7, 3, 3, 1] ^= 1
    assert name_of(PIXELS) == name_of(PIXELS.copy()) != name_of(changed)
    assert name_of(Pictures()) == name_of(Pictures()) != name_of(Pictures(labeled=False))
    assert name_of("cifar10") == "cifar10" and name_of(Path("photos")) == "photos"
    both = name_of({"train": PIXELS, "test": PIXELS[:5]})
    assert has_split(both, "test") and len(open_source(both, "test")) == 5 and not has_split(name_of(PIXELS), "test")


def test_pretrain_resume_and_evaluate(tmp_path: Path) -> None:
    data = {"train": (PIXELS, LABELS), "test": (PIXELS[:9], LABELS[:9])}
    settings: dict[str, Any] = {**SMALL_RUN, "recipe": "demo", "model": "vit_tiny_patch8_32", "epochs": 2}
    settings |= {"batch_size": 16, "workers": 0, "device": "cpu", "keep_checkpoints": 9}
    run = patchmix.pretrain(data, tmp_path / "a", **settings)
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    shutil.copy(run.path / "checkpoints" / "step-000000003.pt", tmp_path / "b" / "checkpoints")
    again = patchmix.pretrain(data=data, out=tmp_path / "b", resume="auto", **settings)
    assert again.load().digest() == run.load().digest()
    (tmp_path / "c" / "checkpoints").mkdir(parents=True)
    shutil.copy(run.path / "checkpoints" / "step-000000003.pt", tmp_path / "c" / "checkpoints")
    with pytest.raises(ValueError, match="is not the data that the checkpoint was trained on"):
        patchmix.pretrain((PIXELS[::-1].copy(), LABELS), tmp_path / "c", resume="auto", **settings)
    result = patchmix.knn(run.path, data=data, k=(3,), device="cpu")
    assert result.images == 9 and result.metrics == run.knn(data, k=(3,), device="cpu").metrics


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "data is a int; it must be a name or path"),
        ({"training": PIXELS}, "data has the splits training; name them train"),
        ((PIXELS, LABELS[:5]), "there are 48 images and 5 labels"),
        ((PIXELS, LABELS / 2), "labels are of type float64; give an integer for each image"),
        ((PIXELS, LABELS[:, None]), "labels are of type ndarray; give an integer for each image"),
        ([(PIXELS[0], "cat"), (PIXELS[1], "dog")], "labels are of type str; give an integer for each image"),
        ([(PIXELS[0], [{"box": 1}]), (PIXELS[1], [])], "labels are of type list; give an integer for each image"),
        (PIXELS.astype(np.int32), "an image: its values are int32; give uint8, uint16, int16 or floats"),
        (torch.randn(2, 3, 8, 8), r"its floats span .*; give RGB in \[0, 1\]"),
        (PIXELS[0, 0], r"the array has the shape \(24, 3\)"),
    ],
)
def test_mistakes(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        name_of(data)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_array_with_the_channels_first_is_refused(channels: int) -> None:
    data = np.zeros((8, channels, 20, 24), np.uint8)
    with pytest.raises(ValueError, match=r"arrays are \(N, H, W, C\); for \(N, C, H, W\) pass a tensor"):
        open_source(name_of(data), in_chans=channels)
    assert open_source(name_of(torch.from_numpy(data)), in_chans=channels).load(0).shape == (20, 24, 3)


def test_a_name_without_its_data() -> None:
    with pytest.raises(ValueError, match="is data of a Python program; call patchmix from Python"):
        open_source("python:Pictures-0123456789ab")


def test_gray_and_transparent_pictures() -> None:
    gray = PIXELS[0, :, :, 0]
    assert np.array_equal(pixels_of(gray), np.repeat(gray[:, :, None], 3, axis=2))
    assert np.array_equal(pixels_of(Image.fromarray(gray)), pixels_of(gray))
    clear = np.zeros((4, 4, 4), np.uint8)
    assert (pixels_of(Image.fromarray(clear)) == 255).all()  # over white


def test_photos_are_upright_and_damaged_ones_replaced_as_from_files(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side
    for i, image in enumerate(PIXELS[:8]):
        (tmp_path / "a").mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / "a" / f"{i}.jpg", exif=exif)
    broken = tmp_path / "a" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:-200])
    source, files = open_source(name_of(ImageFolder(tmp_path)), cache_bytes=0), open_source(tmp_path, cache_bytes=0)
    assert np.array_equal(source.load(0), files.load(0)) and source.load(0).shape == (24, 20, 3)
    with pytest.raises(DecodeError, match="#3: image file is truncated"):
        source.load(3)


def test_tensors_of_any_precision_with_gradients() -> None:
    planes = torch.from_numpy(PIXELS[:4]).permute(0, 3, 1, 2) // 2 * 2
    found = open_source(name_of((planes / 256).bfloat16().requires_grad_()))
    assert np.allclose(found.load(2), PIXELS[2] // 2 * 2 / 256, atol=2e-3)


def test_labels_are_those_that_the_dataset_yields() -> None:
    """Not its `targets`, if it changes them."""

    class Coarse(Pictures):
        targets, target_transform = LABELS.tolist(), staticmethod(lambda label: label // 2)

        def __getitem__(self, index: int) -> Any:
            return Image.fromarray(PIXELS[index]), self.target_transform(self.targets[index])

    labels = open_source(name_of(Coarse())).labels
    assert labels is not None and labels.tolist() == (LABELS // 2).tolist()
