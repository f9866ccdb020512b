from __future__ import annotations

import http.server
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from filelock import FileLock

from patchmix.data import shard_files
from patchmix.data.shards import ShardSource
from patchmix.data.sources import open_source
from patchmix.data.write_shards import write_shards
from patchmix.files import prune
from patchmix.settings import Shards
from tests.data.test_shards import IMAGES, shard


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHMIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shard_files, "PAUSE", 0.0)
    return tmp_path / "cache" / "shards" / "fetched"


def opened(data: str) -> ShardSource:
    source = open_source(data, cache_bytes=0)
    assert isinstance(source, ShardSource)
    return source


class Server:
    """Serves a folder on this machine, records the requests, and fails as often as it is set to."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        self.failures = 0
        self.pause = 0.0
        self.cut = False
        outer = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(self.path)
                time.sleep(outer.pause)
                if self.path.endswith(".tar") and outer.failures > 0:
                    outer.failures -= 1
                    self.send_error(503)
                    return
                if outer.cut and self.path.endswith(".tar"):
                    data = (folder / self.path[1:]).read_bytes()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data[:700])
                    return
                super().do_GET()

            def log_message(self, *_: object) -> None:
                pass

        def handler(*args: object) -> Handler:
            return Handler(*args, directory=str(folder))  # type: ignore[arg-type]

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)  # type: ignore[arg-type]
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def shard_requests(self) -> list[str]:
        return [path for path in self.requests if path.endswith(".tar")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "served"
    folder.mkdir()
    for number in range(6):
        (folder / f"part-{number}.tar").write_bytes(shard(number * 10, 10))
    made = Server(folder)
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_over_http_each_shard_is_fetched_once(server: Server, cache: Path) -> None:
    source = opened(f"{server.url}/part-{{0..5}}.tar")
    for index in (59, 3, 30):
        np.testing.assert_array_equal(source.load(index), IMAGES[index])
    assert source.key(30) == "part-3.tar/0030.png"
    assert sorted(server.shard_requests()) == [f"/part-{number}.tar" for number in range(6)]
    again = opened(f"{server.url}/part-{{0..5}}.tar")  # a second start finds index and files
    np.testing.assert_array_equal(again.load(42), IMAGES[42])
    assert len(server.shard_requests()) == 6
    assert again.fingerprint() == source.fingerprint()
    assert not list(cache.rglob("*.unfinished"))


def test_with_an_index_nothing_is_fetched_before_it_is_needed(server: Server, tmp_path: Path) -> None:
    write_shards(Shards("shapes:40", tmp_path / "served" / "w", split="train", per_shard=10))
    source = opened(f"{server.url}/w/train-{{000000..000003}}.tar")
    assert len(source) == 40
    assert source.classes is not None
    assert server.shard_requests() == []
    source.load(25)
    assert server.shard_requests() == ["/w/train-000002.tar"]


def test_a_server_that_recovers_is_waited_for(server: Server) -> None:
    server.failures = 3
    assert len(opened(f"{server.url}/part-0.tar")) == 10
    assert len(server.shard_requests()) == 4


def test_one_that_does_not_is_named(server: Server) -> None:
    with pytest.raises(ValueError, match=r"part-9\.tar' cannot be fetched \(no such file; 4 tries\)") as caught:
        opened(f"{server.url}/part-{{9..9}}.tar")
    assert "\n" not in str(caught.value)
    server.cut = True
    with pytest.raises(ValueError, match=r"part-1\.tar' cannot be fetched \(.*not complete.*; 4 tries\)"):
        opened(f"{server.url}/part-1.tar")


def test_a_shard_of_another_size_than_its_index_says_is_refused(server: Server, tmp_path: Path) -> None:
    write_shards(Shards("shapes:20", tmp_path / "served" / "w", split="train", per_shard=10))
    source = opened(f"{server.url}/w/train-{{000000..000001}}.tar")
    path = tmp_path / "served" / "w" / "train-000001.tar"
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(512))  # arrives as a whole, so that the server's own word is kept
    with pytest.raises(ValueError, match=rf"cannot be fetched \({len(whole) + 512} bytes arrived, not {len(whole)}; 4"):
        source.load(15)
    path.write_bytes(whole)
    assert source.load(15).shape == (32, 32, 3)


def test_a_kept_shard_of_another_size_is_fetched_again(server: Server, tmp_path: Path, cache: Path) -> None:
    write_shards(Shards("shapes:20", tmp_path / "served" / "w", split="train", per_shard=10))
    source = opened(f"{server.url}/w/train-{{000000..000001}}.tar")
    right = source.load(15)
    (kept,) = cache.glob("*/train-000001.tar")
    kept.write_bytes(kept.read_bytes()[:700])
    source.release()
    np.testing.assert_array_equal(source.load(15), right)
    assert server.shard_requests() == ["/w/train-000001.tar"] * 2


def test_what_a_killed_process_began_to_fetch_is_fetched_again(server: Server, cache: Path) -> None:
    right = opened(f"{server.url}/part-1.tar").load(3)
    (kept,) = cache.glob("*/part-1.tar")
    begun = kept.rename(kept.parent / ".part-1.tar.x.unfinished")
    begun.write_bytes(begun.read_bytes()[:-512])
    np.testing.assert_array_equal(opened(f"{server.url}/part-1.tar").load(3), right)
    assert server.shard_requests() == ["/part-1.tar"] * 2
    assert not begun.exists()


def test_the_folder_is_bounded_and_the_oldest_go(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(shard(0, 10))
    monkeypatch.setenv("PATCHMIX_CACHE_GB", str(2.5 * size / 2**30))
    source = opened(f"{server.url}/part-{{0..5}}.tar")
    for index in (5, 15, 25, 35, 45, 55, 5):
        np.testing.assert_array_equal(source.load(index), IMAGES[index])
        assert sum(path.stat().st_size for path in cache.rglob("*.tar")) <= 2.5 * size
    source.release()  # what is open is read although it was removed
    source.load(5)
    source.load(15)
    source.release()
    source.load(6)  # used again, so the other one is older
    source.load(25)
    source.release()
    server.requests.clear()
    source.load(7)
    assert server.requests == []
    source.load(16)
    assert server.requests == ["/part-1.tar"]


def _load(source: ShardSource, answers: multiprocessing.SimpleQueue[int]) -> None:
    answers.put(int(source.load(55).sum()))


def test_several_processes_fetch_once(server: Server, tmp_path: Path) -> None:
    write_shards(Shards("shapes:60", tmp_path / "served" / "w", split="train", per_shard=10))
    source = opened(f"{server.url}/w/train-{{000000..000005}}.tar")
    server.pause = 0.5
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    workers = [context.Process(target=_load, args=(source, answers)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4  # one that failed would never answer
    assert len({answers.get() for _ in workers}) == 1
    assert server.shard_requests() == ["/w/train-000005.tar"]


def test_one_process_at_a_time_makes_room(cache: Path) -> None:
    """Two that count the same files would both remove the oldest, and more than is needed."""
    cache.mkdir(parents=True)
    (cache / "old.tar").write_bytes(bytes(1000))
    with FileLock(cache / ".prune.lock"):
        other = threading.Thread(target=prune, args=(cache, 500))
        other.start()
        other.join(0.3)
        assert other.is_alive() and (cache / "old.tar").exists()
    other.join(60)
    assert not (cache / "old.tar").exists()


class TestFsspec:
    @pytest.fixture(autouse=True)
    def _memory(self) -> Iterator[None]:
        system = fsspec.filesystem("memory")
        for number in range(3):
            system.pipe_file(f"/bucket/train-{number}.tar", shard(number * 10, 10))
        system.pipe_file("/bucket/val-0.tar", shard(50, 10))
        yield
        system.rm("/bucket", recursive=True)

    @pytest.mark.parametrize(
        "data", ["memory://bucket/train-{0..2}.tar", "memory://bucket/tr*.tar", "memory://bucket/"]
    )
    def test_braces_patterns_and_folders(self, data: str) -> None:
        source = opened(data)
        assert len(source) == 30
        np.testing.assert_array_equal(source.load(25), IMAGES[25])

    def test_splits(self) -> None:
        source = open_source("memory://bucket", "test", cache_bytes=0)
        np.testing.assert_array_equal(source.load(0), IMAGES[50])

    def test_what_arrives_in_part_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        system = type(fsspec.filesystem("memory"))
        monkeypatch.setattr(system, "size", lambda self, path: 123_456)
        with pytest.raises(
            ValueError, match=r"train-0\.tar' cannot be fetched \(\d+ bytes arrived, not 123456; 4 tries"
        ):
            opened("memory://bucket/train-0.tar")

    def test_a_missing_one_and_an_unknown_protocol(self) -> None:
        with pytest.raises(ValueError, match=r"train-7\.tar' cannot be fetched \(no such file; 4 tries\)"):
            opened("memory://bucket/train-{7..7}.tar")
        with pytest.raises(ValueError, match=r"cannot be fetched .*install fsspec"):
            opened("nosuch://bucket/train-0.tar")


def test_an_index_that_does_not_arrive_is_named(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shards(Shards("shapes:20", tmp_path / "served" / "w", split="train", per_shard=10))

    def unavailable(place: str) -> bytes:
        raise OSError("HTTP 503")

    capsys.readouterr()
    monkeypatch.setattr("patchmix.data.shards.read_remote", unavailable)
    assert len(opened(f"{server.url}/w/train-{{000000..000001}}.tar")) == 20
    assert "train-index.safetensors cannot be read (HTTP 503); the shards are scanned" in capsys.readouterr().err
