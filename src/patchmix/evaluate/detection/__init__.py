"""Transfer to COCO: Mask R-CNN on the pre-trained ViT."""

from patchmix.evaluate.detection.files import DetectorFile, load_detector
from patchmix.evaluate.detection.scoring import print_detection
from patchmix.evaluate.detection.settings import DetectSettings
from patchmix.evaluate.detection.transfer import detect, evaluate_only, predict

__all__ = [
    "DetectSettings",
    "DetectorFile",
    "detect",
    "evaluate_only",
    "load_detector",
    "predict",
    "print_detection",
]
