"""Transfer to COCO: Mask R-CNN on the pre-trained ViT."""

from patchmix.evaluate.detection.inference import predict
from patchmix.evaluate.detection.model import DetectorFile, load_detector
from patchmix.evaluate.detection.scoring import print_detection
from patchmix.evaluate.detection.training import DetectSettings, detect, evaluate_only

__all__ = [
    "DetectSettings",
    "DetectorFile",
    "detect",
    "evaluate_only",
    "load_detector",
    "predict",
    "print_detection",
]
