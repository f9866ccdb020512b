"""Imports point one way: read off the syntax trees, so that nothing has to run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "patchmix"

# What each room may import of the others. A dotted name is a single module of a room.
MAY_IMPORT: dict[str, set[str]] = {
    "settings": {"config", "methods.options"},
    "files": set(),
    "progress": set(),
    "data": {"files", "progress", "settings"},
    "mixing": set(),
    "losses": set(),
    "schedules": set(),
    "distributed": set(),
    "device": set(),
    "launch": set(),
    "config": {"methods.options", "data.IMAGENET_MEAN", "data.IMAGENET_STD"},
    "nn": {"distributed"},
    "interop": {"files", "progress", "data", "nn", "device", "settings"},
    "methods": {"mixing", "nn", "losses", "schedules", "distributed"},
    "train": {"files", "progress", "methods.method", "schedules", "distributed", "device"},
    "evaluate": {
        *("files", "progress", "data", "nn", "losses", "schedules", "distributed", "device", "interop", "train"),
        *("methods.method", "settings"),
    },
    "recipes": {"config", "methods.options"},
}
MAY_IMPORT["build"] = set(MAY_IMPORT)
MAY_IMPORT["study"] = set(MAY_IMPORT) - {"mixing", "losses"}
MAY_IMPORT["report"] = set(MAY_IMPORT) - {"launch", "build", "methods"}
MAY_IMPORT["run"] = set(MAY_IMPORT)
MAY_IMPORT["ablation"] = set(MAY_IMPORT)
MAY_IMPORT["evaluation"] = set(MAY_IMPORT)
MAY_IMPORT["demo"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = set(MAY_IMPORT)
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT["__init__"] = {"mixing", "interop", "run", "cli"}

CONTRACT = ("patchmix.methods.method", "patchmix.methods.options")
TORCH_ONLY = ("mixing", "losses")
DUMPING_GROUNDS = {"utils", "util", "misc", "common", "helpers", "helper"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """The full names of all modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_one_way() -> None:
    wrong = []
    for path in modules():
        room = room_of(path)
        assert room in MAY_IMPORT, f"{room} is new: add what it may import to MAY_IMPORT"
        for name in imported(path):
            top, *rest = name.split(".")
            if top != "patchmix" or not rest or rest[0] == room or rest[0].startswith("__"):
                continue
            if not {rest[0], ".".join(rest[:2])} & MAY_IMPORT[room]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "methods").glob("*.py")), ids=lambda p: p.name)
def test_no_method_imports_another(path: Path) -> None:
    for name in imported(path):
        assert not name.startswith("patchmix.methods") or name.startswith(CONTRACT), name


@pytest.mark.parametrize("room", TORCH_ONLY)
def test_mixing_and_losses_import_torch_only(room: str) -> None:
    standard = {"__future__", "collections", "dataclasses", "math", "typing"}
    for path in (p for p in modules() if room_of(p) == room):
        tops = {name.split(".")[0] for name in imported(path)}
        assert tops <= standard | {"torch", "patchmix"}, path


def test_there_is_no_dumping_ground() -> None:
    assert not [p for p in modules() if p.stem in DUMPING_GROUNDS or p.parent.name in DUMPING_GROUNDS]


def test_nothing_loads_pickled_code() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert keywords.get("weights_only") == "True", path
