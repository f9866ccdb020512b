"""The report's file without a browser: what it says, that it is inert, that it is small."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jinja2 import UndefinedError
from PIL import Image

from patchmix.data.folder import FolderSource
from patchmix.evaluate.results import read_results
from patchmix.report import page
from patchmix.report.attention import show_attention
from patchmix.report.gallery import Gallery, load_gallery
from patchmix.report.neighbors import pack_explorer
from patchmix.report.page import environment, read_record, report, verdict
from patchmix.settings import Report, ShowAttention
from patchmix.study import compare

ASSETS = Path(page.__file__).parent / "assets"
EVIL = "<script>alert(1)</script>.png"


def rendered(template: str, **content: Any) -> str:
    return environment().from_string(template).render(**content)


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_it_says_what_the_run_is_and_what_it_is_worth(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper = {"knn": 92.9, "linear": 94.4, "finetune": 97.5}
    monkeypatch.setattr(compare, "paper_accuracies", lambda config, data: paper)
    text = report(Report((run,), tmp_path / "r.html", images=30, device="cpu")).read_text()
    (result,) = read_results(run)
    low, high = result.interval()
    line = f"trained 2 epochs, kNN {100 * result.top1:.1f} % [{100 * low:.1f}, {100 * high:.1f}], no collapse"
    assert line in text
    command = f"patchmix pretrain shapes:64 --out runs/again --config {run / 'config.yaml'}"
    assert html.escape(command) in text and "num_mix: 2" in text
    assert ">92.9<" in text and ">94.4<" in text and "not evaluated" in text
    for heading in ("Curves", "Evaluations", "Cost", "Explorer", "Mixing", "Attention", "Similarity", "Reproduce"):
        assert f">{heading}</h2>" in text
    data = data_of(text)
    assert len(data["explorer"]["thumbs"]) == 30 and data["explorer"]["classes"][0] == "circle"
    assert [panel["key"] for panel in data["curves"]["panels"]][:4] == ["oto", "mto", "region", "knn"]


def test_the_summary_has_the_result_with_the_default_options(run: Path) -> None:
    record = read_record(run)
    (main,) = record.results
    other = replace(main, metrics=main.metrics | {"top1": 0.123}, changed={"k": [3]})
    assert verdict(replace(record, results=[main, other])) == verdict(record)
    assert ", kNN (k 3) 12.3 % [" in verdict(replace(record, results=[other]))[0]
    earlier = replace(main, weights="0" * 64)  # before the run went on; or of its momentum encoder
    assert verdict(replace(record, results=[main, earlier])) == verdict(record)
    assert "% in the training monitor" in verdict(replace(record, results=[earlier]))[0]


def test_a_run_that_is_unfinished_or_collapsed_is_marked(run: Path, tmp_path: Path) -> None:
    going = tmp_path / "going"
    shutil.copytree(run, going)
    (going / "encoder.safetensors").unlink()
    (going / "results.jsonl").unlink()
    with (going / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "monitor", "step": 9, "epoch": 1.5, "rank": 1.2, "mean_cosine": 0.2}) + "\n")
    text, fine = verdict(read_record(going))
    assert text.startswith("unfinished, at epoch 1.5 of 2, kNN ") and "collapsed: effective rank 1.2" in text
    assert not fine
    record = read_record(going)
    assert record.config is not None
    rows = [
        {"kind": "monitor", "step": 0, "epoch": 0.0, "rank": 1.2, "knn": 0.1},
        {"kind": "train", "step": 5, "epoch": 0.5},
    ]
    begun = replace(record, config=record.config.replace(budget="1h"), history=replace(record.history, rows=rows))
    assert verdict(begun)[0] == "unfinished, at epoch 0.5, kNN not measured, collapse not checked"  # 0 is untrained
    shutil.rmtree(going / "checkpoints")
    written = report(Report((going,), tmp_path / "g.html", device="cpu")).read_text()  # no encoder yet: curves only
    assert "explorer-here" not in written.split("<script")[0] and "curves-here" in written


def test_the_runs_own_mix_is_drawn(run: Path) -> None:
    record = read_record(run)
    assert record.config is not None and record.backbone is not None
    encoders = [record.backbone]
    gallery = load_gallery(encoders, "shapes:64", 12, device="cpu")
    titles = {"patchmix": "PatchMix of 2 images: ", "mixup": "Mixup: ", "cutmix+mixup": ("CutMix: ", "Mixup: ")}
    for mix, title in titles.items():
        mixed = replace(record, config=record.config.replace(mix=mix))
        assert page.figures(gallery, [mixed], encoders)["mixing"].get_suptitle().startswith(title)


def test_names_that_look_like_code_stay_names(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / 'a"<b>&amp;{{script}}'
    folder.mkdir(parents=True)
    (tmp_path / "data" / "plain").mkdir()
    for i in range(4):
        Image.fromarray(np.full((40, 40, 3), 50 * i, np.uint8)).save(folder / f"{i}.png")
        Image.fromarray(np.full((40, 40, 3), 60 * i, np.uint8)).save(tmp_path / "data" / "plain" / f"{i}.png")
    name = EVIL.replace("/", "\u2215")  # a file name can't hold a slash
    (folder / "0.png").rename(folder / name)
    evil_run = tmp_path / "<img src=x onerror=alert(2)>"
    shutil.copytree(run, evil_run)
    text = report(Report((evil_run,), tmp_path / "e.html", data=str(tmp_path / "data"), device="cpu")).read_text()
    assert "<script>alert" not in text and "<img src=x" not in text
    assert len(re.findall(r"<script", text)) == 2 == len(re.findall(r"</script>", text))
    data = data_of(text)
    assert any(name in key for key in data["explorer"]["keys"])
    assert 'a"<b>&amp;{{script}}' in data["explorer"]["classes"]


def test_json_and_markup_are_escaped() -> None:
    strings = ["</script>", "<!--", "]]>", "\u2028", "a&b", '"', "\ud800"]
    written = rendered("{{ data | tojson }}", data=strings)
    assert not set("<>&\u2028") & set(written) and json.loads(written) == strings
    cell = rendered('<td class="{{ kind }}">{{ text }}</td>', kind='"x"', text="<b>")
    assert cell == '<td class="&#34;x&#34;">&lt;b&gt;</td>'
    with pytest.raises(ValueError, match="JSON compliant"):
        rendered("{{ data | tojson }}", data=[math.nan])
    with pytest.raises(UndefinedError):
        rendered("{{ missing }}")


def test_the_policy_allows_exactly_this_style_and_script(run: Path, tmp_path: Path) -> None:
    text = report(Report((run,), tmp_path / "r.html", images=0)).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy and "unsafe" not in policy[1] and policy[1].startswith("default-src 'none';")
    style, script = re.search(r"<style>(.*?)</style>", text, re.S), re.search(r'"module">(.*?)</script>', text, re.S)
    modules = [(ASSETS / name).read_text() for name in ("dom.js", "curves.js", "explorer.js", "main.js")]
    assert style and script and script[1] == "\n".join(modules)
    for part in (style[1], script[1]):
        assert base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() in policy[1]
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)  # the SVG namespace is a name, not an address
    assert "innerHTML" not in text and "eval(" not in text
    assert not re.findall(r"^(import|export) ", script[1], re.M)


def test_two_thousand_photographs_and_two_wide_encoders_stay_below_15_megabytes() -> None:
    noise = np.random.default_rng(0).normal(128, 25, (16, 64, 64, 3)).clip(0, 255).astype(np.uint8)  # worse than photos

    class Noise(FolderSource):
        def load(self, index: int) -> np.ndarray:
            return noise[index % 16]

        def key(self, index: int) -> str:
            return "name.jpg"

    runs = [(name, torch.randn(2000, 768)) for name in ("a", "b")]
    packed = pack_explorer(Gallery(Noise(Path(), name="noise", files=["x"]), list(range(2000)), None, runs))
    assert len(rendered("{{ data | tojson }}", data=packed)) < 15e6 * 0.93  # the rest is for figures and curves


@pytest.mark.parametrize(
    ("runs", "out", "message"),
    [
        ([], "r.html", "no run to report on"),
        (["random:vit_tiny_patch16_224"], "r.pdf", "must end in .html"),
        (["random:vit_tiny_patch16_224"], "r.html", "give --data, or --images 0"),
        (["no such run"], "r.html", "does not exist"),
    ],
)
def test_mistakes(runs: list[str], out: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        report(Report(tuple(runs), tmp_path / out))


def test_photographs_without_labels_and_a_folder_with_one(run: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(6):
        Image.fromarray(random.integers(0, 256, (40, 70, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    (folder / "broken.png").write_bytes(b"not a picture")
    data = data_of(report(Report((run,), tmp_path / "u.html", data=str(folder), device="cpu")).read_text())["explorer"]
    assert data["labels"] is None and data["classes"] is None and data["most"] == 5
    assert len(data["thumbs"]) == len(data["keys"]) == 6 and "broken.png" not in data["keys"]
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "0.png", alone)
    assert show_attention(ShowAttention((run,), str(alone), out=tmp_path / "a.png"))[0].is_file()
    with pytest.raises(ValueError, match="at least 3 images"):
        report(Report((run,), tmp_path / "o.html", data=str(alone), device="cpu"))
