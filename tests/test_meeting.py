"""Processes that are started together find each other, whatever an earlier start has left where they meet."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from itertools import count

import pytest
import torch.distributed as dist

from patchmix.distributed import fresh_store

MINUTE = timedelta(minutes=1)
ADDRESSES = count()


def start(server: dist.TCPStore, world: int, *, late: int | None = None) -> list[dist.Store]:
    """One thread for each process; `late` comes after the others. Each then leaves its address where they met."""
    parts: dict[int, dist.Store] = {}
    address = str(next(ADDRESSES))
    stale: list[int] = []

    def meet(me: int) -> None:
        if me == late:
            time.sleep(0.3)
        store = dist.TCPStore("127.0.0.1", server.port, world, is_master=False, timeout=MINUTE)
        parts[me] = fresh_store(store, me, world, MINUTE)
        if parts[me].check([f"address of {me}"]):
            stale.append(me)
        parts[me].set(f"address of {me}", address)

    threads = [threading.Thread(target=meet, args=(me,)) for me in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not stale, f"addresses of an earlier start: {stale}"
    return [parts[me] for me in range(world)]


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=MINUTE)


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("late", [0, 1, None])
def test_a_restarted_group_does_not_see_the_one_before(server: dist.TCPStore, world: int, late: int | None) -> None:
    seen = set()
    for _ in range(3):
        parts = start(server, world, late=late)
        seen.add(parts[0].get("address of 0"))
        for part in parts:
            assert {part.get(f"address of {me}") for me in range(world)} == {parts[0].get("address of 0")}
    assert len(seen) == 3


def test_a_start_that_some_did_not_survive_leaves_nothing_behind(server: dist.TCPStore) -> None:
    start(server, 3)
    for key, value in (("patchmix/nonce/1", "of a process that died"), ("patchmix/acknowledged/2", "something else")):
        server.set(key, value)
    parts = start(server, 3)
    assert len({part.get("address of 1") for part in parts}) == 1


def test_those_who_never_come_are_not_waited_for_without_end(server: dist.TCPStore) -> None:
    short = timedelta(seconds=0.5)
    for me in (0, 1):  # rank 0 waits for a nonce, rank 1 for the echo
        store = dist.TCPStore("127.0.0.1", server.port, 2, is_master=False, timeout=short)
        with pytest.raises(dist.DistStoreError, match=r"(?i)time"):
            fresh_store(dist.PrefixStore(str(me), store), me, 2, short)
