"""From bytes to batches of views: where images come from, how they are augmented, in which order they arrive."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
