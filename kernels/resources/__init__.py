"""What the kernels compile to. `python -m kernels.resources` rewrites it."""
