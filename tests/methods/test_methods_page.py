from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from patchmix.methods.options import METHOD_OPTIONS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")


def options_in_docs(name: str) -> set[str]:
    found = re.search(rf"\*\*`{name}`\*\*.*?Options:(.*?)\n\n", TEXT, flags=re.DOTALL)
    assert found, f"docs/methods.md has no paragraph on {name}"
    named = set(" ".join(re.findall(r"`([^`]*)`", found[1])).split())
    return named | options_in_docs("dino") if "DINO's" in found[1] else named


@pytest.mark.parametrize("name", METHOD_OPTIONS)
def test_every_method_is_documented_with_all_its_options(name: str) -> None:
    assert options_in_docs(name) - {"fidelity.md"} == {
        option.name for option in dataclasses.fields(METHOD_OPTIONS[name])
    }


def test_the_new_method_in_the_docs_is_the_example() -> None:
    example = (Path(__file__).resolve().parents[2] / "examples" / "new_method.py").read_text(encoding="utf-8")
    block = re.search(r"```py\n@dataclass\(frozen=True\)\nclass SimSiam.*?```", TEXT, flags=re.DOTALL)
    assert block
    for line in block[0].splitlines()[1:-1]:
        assert line.strip() in example, line
