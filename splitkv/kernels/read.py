"""A kernel that only reads: the time that the memory itself needs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv.config import cdiv
from splitkv.kernels.launch import launch


@triton.jit
def read_kernel(x_ptr, sink_ptr, n: tl.int64, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):
    """Read n words once, each program every num_programs-th block, and store its sum, so that no read is idle.

    Grid: (programs,).

    Reads:  x [n] int32
    Writes: sink [programs] int32, sums that wrap around
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    offs = tl.arange(0, BLOCK)
    whole = n // BLOCK * BLOCK
    total = tl.zeros([BLOCK], tl.int32)
    # Whole blocks need no mask; what is left after them is one block of the first program.
    for start in tl.range(first, whole, step, num_stages=NUM_STAGES):
        total += tl.load(x_ptr + start + offs)
    if first == 0:
        total += tl.load(x_ptr + whole + offs, mask=whole + offs < n, other=0)
    tl.store(sink_ptr + tl.program_id(0), tl.sum(total, 0))


def read_all(x: Tensor, sink: Tensor, *, block: int, programs: int, num_stages: int, num_warps: int) -> None:
    """Read every word of x once; sink.sum() is then x.sum(), both modulo 2³².

    Args:
        x: [n] int32, contiguous.
        sink: [≥ programs] int32, contiguous; zeroed by the caller where its sum matters.
        block: Words per program and step, a power of two.
        programs: Programs; at most one per block is launched.
        num_stages: Depth of the software pipeline.
        num_warps: Warps per program.
    """
    assert x.dtype == torch.int32 and x.is_contiguous()
    launch(
        read_kernel,
        (min(programs, max(1, cdiv(x.numel(), block))),),
        x.device,
        dict(x_ptr=x, sink_ptr=sink, n=x.numel()),
        dict(BLOCK=block, NUM_STAGES=num_stages),
        num_warps,
    )
