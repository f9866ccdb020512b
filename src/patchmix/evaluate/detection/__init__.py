"""Transfer to COCO: Mask R-CNN on the pre-trained ViT."""
