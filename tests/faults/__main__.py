"""python -m tests.faults [TIMES]: injects every fault TIMES times and prints what was lost."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.faults.elastic import ELASTIC
from tests.faults.injections import FAST, WITH_ROOT, killed_while_writing
from tests.faults.two_hosts import can_make_hosts, cut_off_and_back


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    faults = [*FAST, *ELASTIC]
    if os.geteuid() == 0:
        faults += WITH_ROOT
    else:
        print("left out, they need root: " + ", ".join(fault.__name__ for fault in WITH_ROOT))
    if reason := can_make_hosts():
        print(f"left out: two hosts ({reason})")
    else:
        faults.append(cut_off_and_back)
    print("| injected | times | lost |\n| --- | ---: | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for fault in faults:
            count = 20 if fault is killed_while_writing else times
            what, often, lost = fault(Path(folder), count)
            print(f"| {what} | {often} | {lost} |", flush=True)


if __name__ == "__main__":
    main()
