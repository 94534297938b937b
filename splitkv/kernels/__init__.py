"""Triton kernels and their launchers. They take tensors and integers, never the package's own objects."""
