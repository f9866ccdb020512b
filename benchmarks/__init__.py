"""What is fast, against what: ratios from interleaved runs. `make bench` runs all of it."""
