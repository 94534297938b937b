"""Timing of decode beside its peers and the limit of the memory; `python -m splitkv bench` and `tune`.

Everything here is imported by the name of its module: `splitkv.bench.run.time_decode` times one cell from a script or a
notebook. rich and matplotlib (the `bench` extra) are imported where they are used; tables are plain text without rich.
"""
