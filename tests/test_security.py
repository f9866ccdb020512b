"""The promises of docs/security.md, each attacked; archives in tests/data, more foreign weights in tests/interop."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from patchmix.config import from_yaml
from patchmix.data.decode import DecodeError, decode
from patchmix.interop.importing import import_checkpoint
from patchmix.train.checkpoint import load_checkpoint
from tests.evaluate.detection.conftest import write_split
from tests.faults.elastic import descendants
from tests.faults.injections import bomb
from tests.faults.trainee import TINY

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "patchmix"

# What may start programs or unpickle, and why; nothing else does.
MAY_IMPORT = {
    "subprocess": {"launch.py"},  # this package again, by a list of words
    "pickle": {"train/checkpoint.py", "interop/importing.py"},  # the name of an error only
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
    with pytest.raises(DecodeError, match="its pixels are more than the limit"):
        decode(bomb(30_000, 30_000), "bomb.png")


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # as the kernel writes addresses
reads_proc = pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs /proc/net: run on Linux")


def listening(pid: int) -> set[str]:
    """The addresses at which a process waits for TCP connections or UDP packets."""
    inodes, tables = set(), {}
    with suppress(OSError):  # it ended while we looked
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed while we looked
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
        tables = {name: Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6", "udp", "udp6")}
    rows = [(name, row.split()) for name, table in tables.items() for row in table.splitlines()[1:]]
    waiting = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
    return {row[1].split(":")[0] for name, row in rows if row[3] == waiting[name] and row[9] in inodes}


def watch(process: subprocess.Popen[bytes], scratch: Path) -> Iterator[tuple[int, set[str]]]:
    """While the process runs: how many there are below its TMPDIR `scratch`, and where they listen."""
    deadline = time.monotonic() + 600
    while process.poll() is None:
        assert time.monotonic() < deadline
        pids = descendants(scratch)
        yield len(pids), {address for pid in pids for address in listening(pid)}
        time.sleep(0.05)


@reads_proc
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_the_look_at_sockets_would_notice(kind: socket.SocketKind) -> None:
    assert not listening(os.getpid())
    for address, shown in (("127.0.0.1", "0100007F"), ("0.0.0.0", "00000000")):
        with socket.socket(type=kind) as server:
            server.bind((address, 0))
            if kind == socket.SOCK_STREAM:
                server.listen()
            assert listening(os.getpid()) == {shown}


@reads_proc
@pytest.mark.slow
def test_one_process_listens_nowhere(tmp_path: Path) -> None:
    """Training, every evaluation and the report, one after the other, with their workers: not even on the loopback."""
    run, coco = tmp_path / "run", tmp_path / "coco"
    write_split(coco, "train2017", 5)
    write_split(coco, "val2017", 4)
    small = ["--batch-size", "2", "--image-size", "64", "--channels", "16", "--head-dim", "16"]
    small += ["--smallest-anchor", "8", "--rois-per-image", "16"]
    verbs = [
        ["pretrain", "shapes:512", "--out", run, *TINY, "--epochs", "1", "--depth", "4", "--workers", "1"],
        ["knn", run, "--data", "shapes:64"],
        ["linear", run, "--data", "shapes:64", "--protocol", "fast", "--epochs", "5"],
        ["linear", run, "--data", "shapes:64", "--epochs", "1"],
        ["finetune", run, "--data", "shapes:64", "--epochs", "1"],
        ["detect", run, "--data", coco, "--epochs", "1", *small],
        ["embed", run, "--data", "shapes:64", "--out", tmp_path / "vectors.parquet"],
        ["report", run, "--images", "50"],
    ]
    code = (
        f"from patchmix.cli import main\nfor words in {[[str(word) for word in verb] for verb in verbs]}: main(words)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path), "PATCHMIX_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, env=environment | {"OMP_NUM_THREADS": "1"}
    )
    seen = list(watch(process, tmp_path))
    assert process.returncode == 0 and (run / "report.html").exists()
    assert max(count for count, _ in seen) >= 2  # the loader's workers were looked at, too
    assert set().union(*(found for _, found in seen)) == set()


@reads_proc
@pytest.mark.slow
def test_several_processes_listen_on_the_loopback_interface_only(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "patchmix",
        "pretrain",
        "shapes:512",
        "--out",
        str(tmp_path / "run"),
        *TINY,
        "--epochs",
        "1",
    ]
    process = subprocess.Popen(
        [*command, "--workers", "0", "--devices", "2"],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    seen = list(watch(process, tmp_path))
    assert process.returncode == 0 and max(count for count, _ in seen) >= 3
    found = set().union(*(found for _, found in seen))
    assert found and found <= LOOPBACK
