"""The promises of docs/security.md, each attacked; archives in tests/data, more foreign weights in tests/interop."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from patchmix.config import from_yaml
from patchmix.data.decode import DecodeError, decode
from patchmix.interop.importing import import_checkpoint
from patchmix.train.checkpoint import load_checkpoint
from tests.faults.elastic import ranks
from tests.faults.injections import bomb
from tests.faults.trainee import TINY

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "patchmix"

# What may start programs or unpickle, and why; nothing else does.
MAY_IMPORT = {
    # This package again, and the program that a user names in a pipe: address; both by a list of words.
    "subprocess": {"launch.py", "data/remote.py"},
    "pickle": {"train/checkpoint.py", "interop/reading.py"},  # the name of an error only
}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "os.execv", "os.spawnv", "compile", "__import__"}
FORBIDDEN_MODULES = {"marshal", "shelve", "dill", "cloudpickle", "joblib", "socketserver", "http.server", "xmlrpc"}


def trees() -> list[tuple[str, ast.Module]]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [(str(p.relative_to(PACKAGE)), ast.parse(p.read_text(encoding="utf-8"))) for p in files]


def misuses(name: str, tree: ast.Module) -> list[str]:
    """What a module does that docs/security.md says nothing does."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            modules = []
        for module in modules:
            top = module.split(".")[0]
            if top in MAY_IMPORT and name not in MAY_IMPORT[top]:
                found.append(f"imports {module}")
            if module in FORBIDDEN_MODULES or top in FORBIDDEN_MODULES:
                found.append(f"imports {module}")
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called in FORBIDDEN_CALLS:
            found.append(f"calls {called}")
        if called.startswith("pickle.") or keywords.get("allow_pickle", "False") != "False":
            found.append(f"unpickles by {called}")
        if called == "torch.load" and keywords.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            found.append(f"calls {called}")
        if keywords.get("shell", "False") != "False":
            found.append("starts a shell")
        if called.endswith((".bind", ".listen", ".extractall", "TCPStore")):
            found.append(f"calls {called}")
    return found


def test_no_module_evaluates_unpickles_listens_or_starts_a_shell() -> None:
    assert {name: found for name, tree in trees() if (found := misuses(name, tree))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import subprocess",
        "from http.server import HTTPServer",
        "eval(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "subprocess.run(text, shell=True)",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "server.bind(('', 80))",
        "archive.extractall(folder)",
    ],
)
def test_the_reader_of_code_would_notice(line: str) -> None:
    assert misuses("new.py", ast.parse(line))


class Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    path, marker = tmp_path / "step-1.pt", tmp_path / "ran"
    torch.save({"step": 1, "method": {"w": Attack(marker)}}, path)
    for load in (load_checkpoint, import_checkpoint):
        with pytest.raises(ValueError):
            load(path)
    assert not marker.exists()


def test_a_configuration_cannot_run_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(ValueError, match="not valid YAML"):
        from_yaml(f"recipe: !!python/object/apply:os.mkdir ['{marker}']")
    assert not marker.exists()


def _header(header: bytes, length: int | None = None, body: bytes = bytes(64)) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + body


def _entry(offsets: list[int], shape: list[int]) -> bytes:
    return json.dumps({"norm.weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        _header(b"{}", length=2**63 - 1),
        _header(b"{}", length=2**40),
        _header(b"\xff" * 32),
        _header(b"[" * 100_000),
        _header(_entry([0, 2**60], [2**58])),
        _header(_entry([0, 64], [2**40])),
        _header(_entry([-8, 56], [16])),
        _header(_entry([0, 64], [16]), body=b""),
    ],
    ids=["huge", "large", "not-utf8", "deep", "beyond-the-end", "wrong-shape", "negative", "no-body"],
)
def test_hostile_safetensors_headers_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "encoder.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        import_checkpoint(path)
    assert "\n" not in str(error.value)


def test_a_bomb_is_refused_by_its_header() -> None:
    with pytest.raises(DecodeError, match="30000 x 30000 pixels are more than the limit"):
        decode(bomb(30_000, 30_000), "bomb.png")


def listening(pid: int) -> set[str]:
    """The addresses, as the kernel writes them, at which a process waits for connections."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [row.split() for f in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{f}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads /proc/net")
@pytest.mark.parametrize("devices", [1, 2])
def test_only_the_loopback_interface_is_listened_at_and_only_by_several_processes(devices: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "patchmix", "pretrain", "shapes:512", "--out", str(out), *TINY, "--epochs", "50"]
    process = subprocess.Popen([*command, "--workers", "0", "--devices", str(devices)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not (out / "checkpoints").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        workers = ranks(out)
        assert len(workers) == devices
        found = {address for pid in (process.pid, *workers) for address in listening(pid)}
        assert found <= {"0100007F", "00000000000000000000000001000000"}, found
        assert bool(found) == (devices > 1)
    finally:
        process.terminate()
        process.wait(120)
