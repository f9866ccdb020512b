"""From bytes to batches of views: where images come from, how they are augmented, in which order they arrive."""
