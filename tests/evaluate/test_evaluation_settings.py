from __future__ import annotations

from typing import Any

import pytest

from patchmix.config import validate
from patchmix.settings import Detect, Finetune, Knn, Linear


@pytest.mark.parametrize(
    ("cls", "wrong", "message"),
    [
        (Knn, {"k": (0,)}, "greater than or equal to 1"),
        (Knn, {"layers": ("most",)}, "layers"),
        (Linear, {"protocol": "slow"}, "protocol is 'slow'; it must be 'paper' or 'fast'"),
        (Linear, {"epochs": 0}, "epochs is 0; it must be .*greater than 0"),
        (Finetune, {"epochs": 0}, "epochs is 0; it must be greater than 0"),
        (Finetune, {"batch_size": 1}, "batch_size is 1; it must be .*greater than or equal to 2"),
        (Finetune, {"drop_path": 1.0}, r"drop_path is 1\.0; it must be less than 1"),
        (Finetune, {"layer_decay": 0.0}, r"layer_decay is 0\.0; it must be greater than 0"),
        (Finetune, {"erasing": 1.5}, "erasing is 1.5; it must be less than or equal to 1"),
        (Detect, {"epochs": 0}, "epochs is 0; it must be greater than 0"),
        (Detect, {"patch_size": 14}, "patch_size is 14; it must be 4, 8, 16 or 32"),
        (Detect, {"window": -1}, "window is -1; it must be greater than or equal to 0"),
        (Detect, {"layer_decay": 0.0}, "greater than 0"),
        (Detect, {"rois_per_image": 3}, "greater than or equal to 4"),
        (Detect, {"threshold": 2}, "threshold is 2; it must be less than or equal to 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_are_named_in_one_line(cls: type[Any], wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        validate(cls, {"weights": "run", "data": "shapes", **wrong})
    assert "\n" not in str(caught.value)
