"""The rows of the paper's four ablations and of the comparison of methods, with the paper's numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from patchmix.config import check_known

Ablation = Literal["mix", "num-mix", "terms", "epochs", "method"]
TITLES: dict[str, str] = {
    "mix": "The effect of the mix",
    "num-mix": "The effect of the number of images in a mix",
    "terms": "The effect of the terms of the loss",
    "epochs": "The effect of the length of training",
    "method": "Methods side by side",
}
TERMS = ("oto", "mto", "mtm")  # origin-to-origin, mix-to-origin, mix-to-mix: the order of method.weights
# The settings that an ablation varies: a user can't set them for all rows.
VARIED: dict[str, tuple[str, ...]] = {
    "mix": ("mix", "region_weight"),
    "num-mix": ("num_mix", "mix"),
    "terms": (),
    "epochs": (),
    "method": ("method",),
}

Paper = dict[str, tuple[float | None, float | None]]  # data → linear, kNN in %; None: it did not converge


@dataclass(frozen=True)
class AblationRow:
    """One row of a table; everything else is the same in all rows."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    method: str | None = None  # None: the recipe's
    terms: tuple[str, ...] | None = None  # of the loss; None: all
    length: float = 1.0  # share of the longest training
    paper: Paper = field(default_factory=dict)


def _paper(c10_linear: float | None, c10_knn: float | None, c100_linear: float, c100_knn: float) -> Paper:
    return {"cifar10": (c10_linear, c10_knn), "cifar100": (c100_linear, c100_knn)}


_BASELINE, _FULL = _paper(89.8, 88.2, 66.0, 61.2), _paper(96.0, 94.6, 78.7, 75.4)


def _mix(name: str) -> dict[str, Any]:
    return {"mix": name, "region_weight": 0.0}  # only PatchMix has regions of whole patches


# Table "mix". Its baseline has the numbers of M = 1 in Table "num_mix", no mix at all. The paper has Mixup and CutMix
# only together.
MIX = (
    AblationRow("baseline", _mix("patchmix") | {"num_mix": 1}, paper=_BASELINE),
    AblationRow("mixup", _mix("mixup")),
    AblationRow("cutmix", _mix("cutmix")),
    AblationRow("cutmix+mixup", _mix("cutmix+mixup"), paper=_paper(90.6, 88.7, 66.8, 62.3)),
    AblationRow("regionswap", _mix("regionswap"), paper=_paper(92.1, 91.3, 70.4, 64.2)),
    AblationRow("resizemix", _mix("resizemix"), paper=_paper(94.2, 92.1, 77.1, 66.7)),
    AblationRow("patchmix", _mix("patchmix"), paper=_FULL),
)

# Table "num_mix".
NUM_MIX = (
    AblationRow("m1", {"num_mix": 1}, paper=_BASELINE),
    AblationRow("m2", {"num_mix": 2}, paper=_paper(95.6, 94.3, 77.6, 71.1)),
    AblationRow("m3", {"num_mix": 3}, paper=_FULL),
    AblationRow("m4", {"num_mix": 4}, paper=_paper(95.7, 94.3, 75.2, 70.9)),
)

# Table "loss".
LOSS_TERMS = (
    AblationRow("oto", terms=("oto",), paper=_paper(91.1, 87.0, 69.7, 59.7)),
    AblationRow("mto", terms=("mto",), paper=_paper(None, None, 61.3, 57.2)),
    AblationRow("mtm", terms=("mtm",), paper=_paper(None, None, 52.6, 47.4)),
    AblationRow("oto+mto", terms=("oto", "mto"), paper=_paper(95.4, 93.8, 77.9, 69.2)),
    AblationRow("oto+mto+mtm", terms=("oto", "mto", "mtm"), paper=_FULL),
)

# Figure "epochs" has no numbers; the tables have those of 800 and 1600 epochs, here half and full.
LENGTHS = (
    AblationRow("eighth", length=1 / 8),
    AblationRow("quarter", length=1 / 4),
    AblationRow("half", length=1 / 2, paper=_FULL),
    AblationRow("full", paper=_paper(96.4, 95.1, 78.9, 74.6)),
)

# Table "cifar", ViT-S/2 at 800 epochs.
_METHODS: dict[str, Paper] = {
    "patchmix": _FULL,
    "mocov3": _paper(90.2, 89.1, 66.4, 62.3),
    "dino": _paper(92.6, 91.8, 63.8, 60.6),
    "ibot": _paper(94.8, 93.1, 67.8, 64.2),
    "sdmp": _paper(94.2, 92.1, 77.1, 66.7),
}


def rows_of(ablation: str, methods: Iterable[str]) -> tuple[AblationRow, ...]:
    """All rows of an ablation, in the table's order; `methods` are the names that can be compared."""
    rows = {
        "mix": MIX,
        "num-mix": NUM_MIX,
        "terms": LOSS_TERMS,
        "epochs": LENGTHS,
        "method": tuple(AblationRow(name, method=name, paper=_METHODS.get(name, {})) for name in methods),
    }
    check_known(ablation, rows, "ablation")
    return rows[ablation]


def choose_rows(rows: Sequence[AblationRow], names: Sequence[str]) -> tuple[AblationRow, ...]:
    """The named rows, in the table's order; all of them where no name is given."""
    for name in names:
        check_known(name, [row.name for row in rows], "row")
    return tuple(row for row in rows if not names or row.name in names)


def masked_weights(weights: Sequence[float], terms: Sequence[str]) -> tuple[float, ...]:
    """The weights of the given terms, 0 for the others."""
    return tuple(weight if term in terms else 0.0 for term, weight in zip(TERMS, weights, strict=True))
