"""Images that a user names: files for attention, paths of a set for queries."""

from __future__ import annotations

import shutil
from pathlib import Path

import cv2
import pytest

from patchmix.cli import main
from patchmix.data.sources import open_source
from patchmix.report.gallery import find_image, open_images


@pytest.fixture(scope="module")
def folder(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """photos/a/0.png … photos/b/11.png, and a small run."""
    root = tmp_path_factory.mktemp("named")
    source = open_source("shapes:64")
    for i in range(12):
        path = root / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), source.load(i)[:, :, ::-1].copy())
    shutil.copytree(trained_run, root / "run", symlinks=True)
    return root


def test_a_path_names_an_image_of_the_set(folder: Path) -> None:
    source = open_images(folder / "photos")
    for name in ("b/3.png", str(folder / "photos" / "b" / "3.png"), "photos/b/3.png"):
        assert source.key(find_image(name, source)) == "b/3.png"
    with pytest.raises(ValueError, match="is not among the 12 images"):
        find_image("a/3.png", source)


def test_files_are_a_source(folder: Path) -> None:
    files = [folder / "photos" / "a" / "0.png", folder / "photos" / "b" / "1.png"]
    source = open_images(files)
    assert len(source) == 2
    assert source.load(1).shape == (32, 32, 3)
    assert source.fingerprint() != open_images(files[:1]).fingerprint()
    with pytest.raises(ValueError, match="there is no image"):
        open_images([folder / "none.png"])


def test_the_command_line_takes_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATCHMIX_CACHE", str(folder / "cache"))
    image = "photos/b/3.png"
    main(["show", "attention", "run", "--image", image, "--out", "attention.png"])
    main(["show", "similarity", "run", "--data", "photos", "--query", image, "--out", "similarity.png"])
    main(["show", "neighbors", "run", "--data", "photos", "--query", image, "0", "--k", "3", "--out", "near.png"])
    for name in ("attention.png", "similarity.png", "near.png"):
        assert cv2.imread(name).std() > 5  # not blank
    shutil.rmtree("cache", ignore_errors=True)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["show", "attention", "run"])
    assert stop.value.code == 2
    assert "either --data DATA or --image FILE" in capsys.readouterr().err
