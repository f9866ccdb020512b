"""One paper per file, all behind the contract in `method.py`."""
