from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from patchmix.data.folder import FolderSource
from patchmix.data.python import name_of
from patchmix.data.shapes import shapes_source
from patchmix.data.sources import open_source
from patchmix.data.views import to_float, usual_resize
from patchmix.evaluate import features
from patchmix.evaluate.features import FeatureExtractor, embed, extract
from patchmix.evaluate.labeled import Part, Subset, held_out, open_labeled
from patchmix.evaluate.protocol import encoder_name
from patchmix.interop.backbone import Architecture, Backbone
from patchmix.nn.vit import create_encoder
from patchmix.progress import progress_bar
from patchmix.settings import Embed
from tests.evaluate.conftest import make_backbone

CPU = torch.device("cpu")
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)


class Flat(nn.Module):
    """Features are the pixels; also notes in which mode it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, images: Tensor) -> Tensor:
        self.modes.append(self.training)
        return images.flatten(1)


def test_features_are_the_encoders_output_in_the_sources_order() -> None:
    source = shapes_source("train", 23)
    encoder = Flat()
    found = extract(encoder, source, image_size=32, mean=MEAN, std=STD, device=CPU, batch_size=5)
    whole = torch.from_numpy(np.stack([source.load(i) for i in range(23)]))
    torch.testing.assert_close(found.vectors, to_float(whole, MEAN, STD).flatten(1))
    assert found.indices.tolist() == list(range(23))
    assert found.labels is not None and found.labels.tolist() == [i % 10 for i in range(23)]
    assert encoder.modes == [False] * 5
    assert encoder.training  # as it came


def test_undecodable_images_are_left_out_and_the_others_keep_their_labels(class_folder: Path) -> None:
    (class_folder / "class1" / "1.png").write_bytes(b"no image")
    source = open_labeled(class_folder).train
    found = extract(Flat(), source, image_size=8, mean=MEAN, std=STD, device=CPU, batch_size=4)
    assert len(found.vectors) == 11
    bad = next(i for i in range(12) if source.key(i).endswith("class1/1.png"))
    assert found.indices.tolist() == [i for i in range(12) if i != bad]
    assert source.labels is not None and found.labels is not None
    assert found.labels.tolist() == np.delete(source.labels, bad).tolist()


def test_pools_are_the_token_and_the_mean_of_the_patches(backbone: Backbone) -> None:
    source = shapes_source("train", 4)
    encoder = backbone.encoder()
    images = to_float(torch.from_numpy(np.stack([source.load(i) for i in range(4)])), MEAN, STD)
    with torch.no_grad():
        tokens = encoder.forward_features(images)  # (4, 1 + 16, D)
    for pool, wanted in {"token": tokens[:, 0], "mean": tokens[:, 1:].mean(dim=1)}.items():
        found = extract(encoder, source, image_size=32, mean=MEAN, std=STD, device=CPU, pool=pool)
        torch.testing.assert_close(found.vectors, wanted)


def test_all_pools_come_from_one_pass(backbone: Backbone) -> None:
    source = shapes_source("train", 4)
    encoder = backbone.encoder()
    images = to_float(torch.from_numpy(np.stack([source.load(i) for i in range(4)])), MEAN, STD)
    passes: list[int] = []
    encoder.patch_embed.register_forward_hook(lambda *_: passes.append(1))
    pools = ["token", "mean", "patches", "token-1", "mean-1", "token-2", "pixels"]
    found = features.extract_all(encoder, source, pools, image_size=32, mean=MEAN, std=STD, device=CPU)
    assert len(passes) == 1
    with torch.no_grad():
        x = encoder.norm_pre(encoder._pos_embed(encoder.patch_embed(images)))
        first = encoder.blocks[0](x)
        one, two = encoder.norm(first), encoder.norm(encoder.blocks[1](first))  # (4, 1 + 16, D)
    wanted = {"token": two[:, 0], "mean": two[:, 1:].mean(dim=1), "token-2": two[:, 0]}
    wanted |= {"token-1": one[:, 0], "mean-1": one[:, 1:].mean(dim=1)}
    for pool, vectors in wanted.items():
        torch.testing.assert_close(found[pool].vectors, vectors)
    assert found["patches"].vectors.dtype == torch.float16
    torch.testing.assert_close(found["patches"].vectors.float(), two[:, 1:], rtol=1e-3, atol=1e-3)
    halves = images.unflatten(3, (16, 2)).unflatten(2, (16, 2)).mean(dim=(3, 5))
    torch.testing.assert_close(found["pixels"].vectors, halves.flatten(1))


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_dinov3", "vit_base_patch16_siglip_224", "vit_base_patch16_gap_224"]
)
def test_features_do_not_depend_on_what_else_the_pass_gives(name: str) -> None:
    """Models that pool otherwise than by a class token, or have none."""
    encoder = create_encoder(name, image_size=32, patch_size=8, dim=32, depth=2, heads=2).eval()
    images = torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        together = features.pooled_all(encoder, images, ["token", "mean", "patches"])
        torch.testing.assert_close(together["token"], encoder(images))
        for pool, vectors in together.items():
            torch.testing.assert_close(vectors, features.pooled_all(encoder, images, [pool])[pool])
        assert together["patches"].shape == (3, 16, 32)
        if encoder.cls_token is None:
            with pytest.raises(ValueError, match="no class token in its blocks; use --pool mean"):
                features.pooled_all(encoder, images, ["token", "token-1"])


def test_an_encoder_of_one_channel_sees_the_mean_of_three() -> None:
    found = FeatureExtractor(make_backbone(in_chans=1), device=CPU).features(shapes_source("train", 3))
    assert found.vectors.shape == (3, 24)
    assert torch.isfinite(found.vectors).all()


def test_resize_is_the_authors_switch(backbone: Backbone) -> None:
    """32 → 36 → the central 32: other features than those of the whole image."""
    source = shapes_source("train", 4)
    whole = FeatureExtractor(backbone, device=CPU).features(source).vectors
    cropped = FeatureExtractor(backbone, device=CPU, resize=36).features(source).vectors
    assert not torch.allclose(whole, cropped)
    assert (usual_resize(32), usual_resize(224), usual_resize(384)) == (32, 256, 439)


def test_embed_takes_images_as_evaluation_does(class_folder: Path) -> None:
    encoder = create_encoder("vit_tiny_patch16_80", dim=24, depth=1, heads=3)
    large = Backbone(Architecture.of("vit_tiny_patch16_80", encoder), encoder.state_dict())
    source = open_source(class_folder, "train")
    expected = FeatureExtractor(large, device=CPU, cache=False).features(source).vectors
    files = [class_folder / source.key(i) for i in range(len(source))]
    torch.testing.assert_close(large.embed(files, device="cpu"), expected)


def test_broken_weights_are_named_and_not_stored(cache: Path) -> None:
    backbone = make_backbone()
    backbone.weights["norm.bias"][0] = float("nan")
    with pytest.raises(ValueError, match=r"shapes \(train\): the features of 5 of 5 images are NaN"):
        FeatureExtractor(backbone, device=CPU).features(shapes_source("train", 5))
    assert not cache.exists()


def test_nothing_is_printed_where_nobody_looks(backbone: Backbone, capfd: pytest.CaptureFixture[str]) -> None:
    FeatureExtractor(backbone, device=CPU).features(shapes_source("train", 5))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("total", [10, None])
def test_a_bar_is_shown_at_a_terminal(
    total: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("features of x", total) as advance:
        advance(10)
    out, err = capsys.readouterr()
    assert out == "" and ("features of x: 10 images" if total else "features of x") in err


@pytest.mark.parametrize(("total", "line"), [(10, "features of x: 10 images\n"), (None, "features of x\n"), (5, "")])
def test_what_takes_long_is_one_line_in_a_log(
    total: int | None, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("patchmix.progress._QUIET_SECONDS", -1.0)
    with progress_bar("features of x", total) as advance:
        advance(5)
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("origin", "shown"),
    [
        ({}, "vit_tiny_patch8_32"),
        ({"recipe": "paper"}, "vit_tiny_patch8_32 (base encoder)"),
        ({"format": "dino", "encoder": "momentum"}, "vit_tiny_patch8_32 (momentum encoder)"),
    ],
)
def test_the_encoder_is_named(origin: dict[str, str], shown: str, backbone: Backbone) -> None:
    assert encoder_name(dataclasses.replace(backbone, origin=origin)) == shown


# --------------------------------------------------------------------------------------------------------------- store


class Counting:
    """Counts the encoders that are made: none is, when features come from the store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        original = features.extract_all

        def counted(*args: object, **kwargs: object) -> object:
            self.runs += 1
            return original(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(features, "extract_all", counted)


def test_a_second_reading_does_not_run_the_encoder(
    backbone: Backbone, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(monkeypatch)
    source = shapes_source("train", 12)
    first = FeatureExtractor(backbone, device=CPU).features(source)
    assert counting.runs == 1
    second = FeatureExtractor(backbone, device=CPU).features(source)
    assert counting.runs == 1
    assert torch.equal(first.vectors, second.vectors)
    assert first.labels is not None and second.labels is not None and torch.equal(first.labels, second.labels)
    assert [path.suffix for path in cache.glob("[!.]*")] == [".safetensors"]


def test_anything_that_changes_features_runs_it_again(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shapes_source("train", 12)
    FeatureExtractor(backbone, device=CPU).features(source)
    counting = Counting(monkeypatch)
    more_heads = dataclasses.replace(backbone.architecture, heads=6)
    changed = [
        (FeatureExtractor(make_backbone(1), device=CPU), source),
        (FeatureExtractor(dataclasses.replace(backbone, mean=(0.1, 0.1, 0.1)), device=CPU), source),
        (FeatureExtractor(dataclasses.replace(backbone, architecture=more_heads), device=CPU), source),
        (FeatureExtractor(backbone, device=CPU, pool="mean"), source),
        (FeatureExtractor(backbone, device=CPU, resize=36), source),
        (FeatureExtractor(backbone, device=CPU), shapes_source("test", 12)),
        (FeatureExtractor(backbone, device=CPU), Part(source, np.arange(0, 6))),
        (FeatureExtractor(backbone, device=CPU), Part(source, np.arange(6, 12))),
        (FeatureExtractor(backbone, device=CPU, cache=False), source),
    ]
    for number, (extractor, images) in enumerate(changed, start=1):
        extractor.features(images)
        assert counting.runs == number


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_damaged_file_is_computed_again(
    damage: str, backbone: Backbone, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shapes_source("train", 12)
    right = FeatureExtractor(backbone, device=CPU).features(source)
    (path,) = cache.glob("[!.]*")
    path.write_bytes({"cut": path.read_bytes()[:-100], "empty": b""}[damage])
    counting = Counting(monkeypatch)
    again = FeatureExtractor(backbone, device=CPU).features(source)
    assert counting.runs == 1
    assert torch.equal(again.vectors, right.vectors)
    FeatureExtractor(backbone, device=CPU).features(source)  # and it is whole again
    assert counting.runs == 1


def test_features_unused_for_longest_make_room(
    backbone: Backbone, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [shapes_source("train", length) for length in (20, 21, 22)]
    extractor = FeatureExtractor(backbone, device=CPU)
    for source in sources:
        extractor.features(source)
        for path in cache.glob("[!.]*"):
            os.utime(path, (path.stat().st_mtime - 100, path.stat().st_mtime - 100))
    (cache.parent / "notes.safetensors").write_bytes(bytes(10_000))  # not ours
    extractor.features(sources[0])  # the oldest, but used now
    size = max(path.stat().st_size for path in cache.glob("?" * 40 + ".safetensors"))
    monkeypatch.setattr(features, "KEPT_BYTES", round(2.5 * size))
    extractor.features(shapes_source("train", 23))
    assert (cache.parent / "notes.safetensors").exists()
    counting = Counting(monkeypatch)
    extractor.features(sources[0])
    extractor.features(shapes_source("train", 23))
    assert counting.runs == 0
    extractor.features(sources[2])
    assert counting.runs == 1


def test_a_store_that_can_not_be_written_costs_nothing_but_a_warning(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PATCHMIX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="not kept"):
        found = FeatureExtractor(backbone, device=CPU).features(shapes_source("train", 5))
    assert len(found.vectors) == 5


# ----------------------------------------------------------------------------------------------------- many processes

WORKER = """
import sys, torch
from pathlib import Path
from patchmix import distributed
from patchmix.evaluate.features import FeatureExtractor
from patchmix.evaluate.labeled import open_labeled
from patchmix.interop.loading import load_backbone
device, folder = torch.device("cpu"), Path(sys.argv[1])
with distributed.process_group(device):
    backbone = load_backbone(folder / "encoder.safetensors")
    extractor = FeatureExtractor(backbone, device=device, cache=False)
    for case in ("odd", "bad"):
        found = extractor.features(open_labeled(folder / case).train)
        torch.save([found.vectors, found.labels, found.indices], folder / f"{case}-{distributed.rank()}.pt")
"""


def test_two_processes_find_what_one_finds(backbone: Backbone, class_folder: Path, tmp_path: Path) -> None:
    """An odd number of images, and one that can't be decoded: parts of different lengths, nothing lost or doubled."""
    for case in ("odd", "bad"):
        shutil.copytree(class_folder, tmp_path / case)
    (tmp_path / "odd" / "class0" / "0.png").unlink()
    (tmp_path / "bad" / "class0" / "0.png").write_bytes(b"no image")
    backbone.save(tmp_path / "encoder.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    processes = [subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    for case in ("odd", "bad"):
        alone = FeatureExtractor(backbone, device=CPU, cache=False).features(open_labeled(tmp_path / case).train)
        assert len(alone.vectors) == 11
        for rank in range(2):
            vectors, labels, indices = torch.load(tmp_path / f"{case}-{rank}.pt", weights_only=True)
            torch.testing.assert_close(vectors, alone.vectors)
            assert torch.equal(labels, alone.labels)
            assert torch.equal(indices, alone.indices)


# ------------------------------------------------------------------------------------------------------ labeled data


def test_a_subset_is_spread_evenly() -> None:
    source = shapes_source("train", 100)
    subset = Subset(source, 5)
    assert subset.positions.tolist() == [0, 25, 50, 74, 99]
    assert subset.labels is not None and subset.labels.tolist() == [0, 5, 0, 4, 9]
    assert np.array_equal(subset.load(1), source.load(25))
    assert len(Subset(source, 1000)) == 100


def test_held_out_images_are_a_share_of_each_class() -> None:
    labels = np.array([0] * 50 + [1] * 10 + [2] * 3 + [3])
    held = held_out(labels, 0.2)
    assert np.bincount(labels[held], minlength=4).tolist() == [10, 2, 1, 0]  # a class keeps at least one
    assert np.array_equal(held, held_out(labels, 0.2))
    with pytest.raises(ValueError, match="every class has one"):
        held_out(np.arange(4), 0.2)


def test_without_a_test_split_a_fifth_is_held_out(class_folder: Path) -> None:
    labeled = open_labeled(class_folder).with_test()
    assert labeled.test is not None
    assert (len(labeled.train), len(labeled.test)) == (9, 3)
    names = [{part.key(i) for i in range(len(part))} for part in (labeled.train, labeled.test)]
    assert not names[0] & names[1]


def test_missing_labels_are_named(class_folder: Path) -> None:
    flat = class_folder / "class0"
    with pytest.raises(ValueError, match=r"has no labels, which evaluation needs; put the images into one sub-folder"):
        open_labeled(flat)
    (class_folder / "class1").rename(class_folder.parent / "away1")
    (class_folder / "class2").rename(class_folder.parent / "away2")
    with pytest.raises(ValueError, match="has only one class"):
        open_labeled(class_folder)
    with pytest.raises(ValueError, match="neither a name nor a path"):
        open_labeled("no-such-data")


def test_a_test_class_without_training_images_is_named() -> None:
    """Also where there are classes above it: nothing could predict it, and all its images would count as wrong."""
    images = np.zeros((6, 32, 32, 3), np.uint8)
    for labels, found in (([0, 1, 0, 1, 0, 1], 2), ([0, 2, 0, 2, 0, 2], 1)):
        data = name_of({"train": (images, np.array(labels)), "test": (images, np.array([0, 1, 2, 0, 1, 2]))})
        with pytest.raises(ValueError, match=f"has label {found}, which .* does not have; both must have the same"):
            open_labeled(data)


def test_files_of_the_same_size_with_other_pixels_are_other_images(backbone: Backbone, tmp_path: Path) -> None:
    """The size of a .bmp does not tell what it shows."""
    found = []
    for value in (0, 200):
        for name in ("a/1", "a/2", "b/1"):
            pixels = np.full((32, 32, 3), value, np.uint8)
            (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / "set" / f"{name}.bmp")
        source = open_source(tmp_path / "set", cache_bytes=0)
        found.append(FeatureExtractor(backbone, torch.device("cpu")).features(source).vectors)
    assert not torch.allclose(*found)


def test_features_on_disk_are_written_to_a_file_without_decoding_all_images(
    backbone: Backbone, class_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone.save(tmp_path / "encoder.safetensors")
    settings = Embed(str(tmp_path / "encoder.safetensors"), str(class_folder), tmp_path / "f.parquet", device="cpu")
    embed(settings)
    read, original = list[str](), FolderSource.load
    monkeypatch.setattr(FolderSource, "load", lambda self, i: (read.append(self.key(i)), original(self, i))[1])
    embed(settings)
    assert len(pq.read_table(tmp_path / "f.parquet")) == 12 > len(read)
