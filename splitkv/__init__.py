"""Split-KV attention for the decode step of LLM inference, in Triton.

A query token attends a long KV cache that is cut into splits; the partial results are merged by their log-sum-exp.
Every buffer that a step needs is a tensor that the caller owns, sized once from a `WorkspaceConfig`.
"""

from splitkv import _interpreter as _interpreter  # isort: split # first: it decides how Triton runs
from splitkv import compat, distributed, masks, reference
from splitkv.api import decode, decode_shared_prefix, decode_with_lse, merge, supports, warmup
from splitkv.append import append_kv, move_kv
from splitkv.config import Section, StepConfig, WorkspaceConfig
from splitkv.kv import ContiguousKV, LatentKV, PagedKV, RaggedKV
from splitkv.pool import PagePool, PoolExhausted
from splitkv.step import StepState
from splitkv.work_list import Schedule
from splitkv.workspace import Workspace

__version__ = "0.1.0"

__all__ = [
    "ContiguousKV",
    "LatentKV",
    "PagePool",
    "PagedKV",
    "PoolExhausted",
    "RaggedKV",
    "Schedule",
    "Section",
    "StepConfig",
    "StepState",
    "Workspace",
    "WorkspaceConfig",
    "append_kv",
    "compat",
    "decode",
    "decode_shared_prefix",
    "decode_with_lse",
    "distributed",
    "masks",
    "merge",
    "move_kv",
    "reference",
    "supports",
    "warmup",
]
