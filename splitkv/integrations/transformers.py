"""transformers' models with attention by splitkv: `register()`, then attn_implementation="splitkv".

>>> from splitkv.integrations.transformers import register
>>> register()  # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="splitkv")  # doctest: +SKIP
>>> model.generate(**tokenizer(texts, padding=True, padding_side="left", return_tensors="pt"))  # doctest: +SKIP

Prompts and decode steps take the same way: `splitkv.decode` over a view of the keys and values that the model's cache
hands out, dynamic or static, whatever their strides: nothing is copied. Lengths stay on the device, so that a step over
a static cache can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

import splitkv
from splitkv import api, checks
from splitkv._interpreter import release

SUPPORTED = ((5, 17), (5, 25))
"""transformers from the first of these versions to before the second."""

TILE_ROWS = 64  # prompts fill query tiles of as many rows; decode steps take smaller ones

# Keyword arguments of an attention call that say nothing about what it computes.
WITHOUT_MEANING = frozenset(
    (
        "position_ids", "cache_position", "use_cache", "logits_to_keep", "output_hidden_states", "output_router_logits",
        "num_items_in_batch", "return_dict", "deterministic", "token_type_ids", "mm_token_type_ids",
    )
)  # fmt: skip

Geometry = tuple[int, int, int, int]
"""num_q_heads, num_kv_heads, head_dim, head_dim_v."""

_workspaces: dict[tuple[Any, ...], splitkv.Workspace] = {}


def register(name: str = "splitkv", *, num_splits: int | None = None) -> None:
    """Make an attention implementation of this name known to transformers.

    Honoured are the model's scale, grouped heads, sliding windows, softcap and sinks, and left padding. Refused, with a
    ValueError when the model runs, are other masks (custom 4D masks, right padding, holes, chunked or bidirectional
    attention, packed sequences), dropout, weights as a result (output_attentions), and a query that requires grad.
    For models of several parts name it for the language model alone:
    attn_implementation={"text_config": "splitkv", "vision_config": "sdpa"}.

    A workspace of at most 65 MB is allocated at the first call of each geometry, stream and thread, and kept. Whether a
    mask is left padding is checked once per step, for which the device is waited for where there is a 2D mask; not
    during a capture of a CUDA graph or in a trace, where any mask is taken for left padding.

    A decode step compiles without a graph break, as generate does it with a static cache. Compiled models of one
    geometry share a workspace: run them on one stream at a time.

    Args:
        name: What attn_implementation is to be; one that was registered before is replaced.
        num_splits: Attend every request in so many parts, so that what it is answered does not depend on the others in
            its batch. None: as fills the GPU best.

    Raises:
        ImportError: no transformers, or one out of range.
        TypeError, ValueError: a name that is empty or taken by another implementation, or no such number of splits.
    """
    if num_splits is not None:
        checks.require_int("num_splits", num_splits, 1, api.MAX_SPLITS)
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, given {type(name).__name__}")
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"transformers is needed, {_range()}: pip install 'splitkv[transformers]' ({error})"
        ) from error
    if not SUPPORTED[0] <= release(transformers.__version__)[:2] < SUPPORTED[1]:
        raise ImportError(f"transformers: expected {_range()}, given {transformers.__version__}")
    taken = transformers.AttentionInterface().get(name)
    ours = isinstance(taken, functools.partial) and taken.func is attention
    if not name or name == "eager" or "|" in name or (taken is not None and not ours):
        raise ValueError(f"name: expected one that no other implementation has, without '|', given {name!r}")
    transformers.AttentionInterface.register(name, functools.partial(attention, num_splits=num_splits))
    transformers.AttentionMaskInterface.register(name, key_bounds)


def _range() -> str:
    (major, minor), (next_major, next_minor) = SUPPORTED
    return f">={major}.{minor},<{next_major}.{next_minor}"


def key_bounds(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """What the model hands to each layer instead of a mask: which keys a request has. transformers calls it.

    Args:
        batch_size, q_length, kv_length: Requests, query tokens of each, and keys that its attention calls will have.
        q_offset, kv_offset: Position of the first query token and of the first key.
        mask_function: Which keys a query token sees: causal, or causal within a window of local_size.
        attention_mask: [batch_size, tokens] bool, tokens that are no padding, from position 0.
        local_size: The window, the query token itself included, or None.
        use_vmap: Whether the mask is anybody's own.
        device: Where the model runs.

    Returns:
        [1, window + 1, 1 or 2, batch_size] int32, with 0 for no window. Entries along the window are all the same: it
        is there for its size alone, which survives a move to another device. The next dimension is seq_lens and, with
        padding, kv_start, both counted from kv_offset. transformers passes tensors of four dimensions on as they are.

    Raises:
        ValueError: a mask that is anything else than causal, a window and left padding.
    """
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    window = 0
    if use_vmap or not _same(mask_function, causal_mask_function):
        if use_vmap or not local_size or not _same(mask_function, sliding_window_causal_mask_function(local_size)):
            named = getattr(mask_function, "__qualname__", mask_function)
            raise ValueError(
                f"mask: expected causal attention, or a sliding window of it, given {named}: this model needs another "
                "attn_implementation, such as 'sdpa'"
            )
        window = local_size
    end = q_offset + q_length
    start = None if attention_mask is None else _left_padding(attention_mask, end)
    bounds = torch.empty((1, 1, 1 if start is None else 2, batch_size), dtype=torch.int32, device=device)
    bounds[0, 0, 0] = end - kv_offset
    if start is not None:
        bounds[0, 0, 1] = (start - kv_offset).clamp_min(0)
    return bounds.expand(-1, window + 1, -1, -1)


def _same(function: Any, other: Any) -> bool:
    """Whether two mask functions are made of the same code and the same numbers."""
    if function is other:
        return True
    if isinstance(function, FunctionType) and isinstance(other, FunctionType):
        cells = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (function, other)]
        return function.__code__ is other.__code__ and _same(*cells)
    if isinstance(function, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(function) == len(other) and all(map(_same, function, other))
    return isinstance(function, int) and isinstance(other, int) and function == other


def _left_padding(mask: Tensor, end: int | Tensor) -> Tensor | None:
    """[batch] position of each request's first token, None where nothing is padded; raises for any other mask.

    Columns from `end` on are of tokens that do not exist yet.
    """
    checks.check_rank("attention_mask", mask, 2)
    mask = mask.to(torch.bool)
    readable = not (torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()))
    length = mask.shape[1]
    if readable and bool(mask.all()) and int(end) <= length:
        return None
    columns = torch.arange(length, device=mask.device)
    # A request without any token begins where it ends.
    start = torch.where(mask.any(1), mask.int().argmax(1), length)
    if readable:
        fits = ((mask == (columns >= start[:, None])) | (columns >= end)).all(1)
        given = f"fewer columns ({length})" if int(end) > length else ""
        if not given and not bool(fits.all()):
            given = f"a hidden token right of a visible one in row {int(fits.int().argmin())}"
        if given:
            raise ValueError(
                "attention_mask: expected padding on the left alone (padding_side='left') and a column for each of "
                f"{int(end)} tokens, given {given}"
            )
    return start


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    *,
    num_splits: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, as transformers calls it.

    Args:
        module: The attention layer.
        query: [batch, num_q_heads, q_len, head_dim].
        key, value: [batch, num_kv_heads, kv_len, width], the cache's, the new tokens included.
        attention_mask: What `key_bounds` made; None for a layer without masks, which sees all keys.
        scaling: Logit multiplier; head_dim ** -0.5 by default.
        dropout: 0.
        sliding_window: As the mask says, or None.
        softcap: Cap of the scaled scores.
        s_aux: [num_q_heads] sinks.
        is_causal: As the mask says, or None; without a mask the layer's own by default.
        num_splits: As for `register`.

    Returns:
        ([batch, q_len, num_q_heads, head_dim_v], None).

    Raises:
        TypeError, ValueError: what cannot be honoured, or an argument that `splitkv.decode` refuses.
    """
    if dropout:
        raise ValueError(f"dropout: expected 0 (attention by splitkv is forward only: model.eval()), given {dropout}")
    for name, argument in kwargs.items():
        if name not in WITHOUT_MEANING and argument is not None and argument is not False:
            raise ValueError(f"{name}: expected it left out (attention by splitkv does not know it), given it")
    batch, num_q_heads, q_len, _ = query.shape
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    kv_start = None
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if sliding_window is not None or (causal and 1 < q_len != k.shape[1]):
            raise ValueError(
                "attention_mask: expected what transformers makes for this implementation, given None for "
                f"{q_len} query tokens of {k.shape[1]} and sliding_window={sliding_window}"
            )
        seq_lens, window_left = torch.full((batch,), k.shape[1], dtype=torch.int32, device=k.device), None
    else:
        causal, bounds = True, attention_mask
        if bounds.dtype != torch.int32 or bounds.dim() != 4 or bounds.shape[0] != 1 or bounds.shape[2] > 2:
            raise ValueError(
                "attention_mask: expected None or a mask of shape [batch, tokens] for the model, given one of "
                f"{bounds.dtype} {checks.shape_text(bounds.shape)}: splitkv cannot honour such masks, 'sdpa' can"
            )
        window = bounds.shape[1] - 1
        if is_causal is False or sliding_window not in (None, window or None):
            raise ValueError(
                f"sliding_window: expected {window or None} and causal attention (the mask's), given {sliding_window} "
                f"and is_causal={is_causal}"
            )
        window_left = window - 1 if window else None
        seq_lens = bounds[0, 0, 0]
        kv_start = bounds[0, 0, 1] if bounds.shape[2] == 2 else None
    kv = splitkv.ContiguousKV(k, v, seq_lens, kv_start=kv_start)
    out = query.new_empty((batch, q_len, num_q_heads, v.shape[-1]))
    splitkv.decode(
        query.transpose(1, 2),
        kv,
        _workspace(query, kv),
        sm_scale=scaling,
        causal=causal,
        window_left=window_left,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.detach(),
        num_splits=num_splits,
        out=out,
    )
    return out, None


def _workspace(query: Tensor, kv: splitkv.ContiguousKV) -> splitkv.Workspace:
    """Scratch for calls of this geometry on this stream, kept for good: a captured graph may hold its address."""
    device, geometry = query.device, (query.shape[1], kv.num_kv_heads, kv.head_dim, kv.head_dim_v)
    if torch.compiler.is_compiling():
        shared: splitkv.Workspace = _workspace_of_graphs(device, query.dtype, geometry)
        return shared
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _kept((stream, threading.get_ident()), device, query.dtype, geometry)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def _workspace_of_graphs(device: torch.device, dtype: torch.dtype, geometry: Geometry) -> splitkv.Workspace:
    """The one that compiled graphs share, made while one is traced."""
    workspace = _kept("compiled", device, dtype, geometry)
    for name in ("partial_out", "partial_lse", "out", "lse"):
        # A graph that writes tensors that it does not own becomes a CUDA graph if they promise to stay where they are.
        torch._dynamo.mark_static_address(getattr(workspace, name))
    return workspace


def _kept(user: Any, device: torch.device, dtype: torch.dtype, geometry: Geometry) -> splitkv.Workspace:
    key = user, device, dtype, geometry
    if key not in _workspaces:
        config = splitkv.WorkspaceConfig(1, *geometry, q_tile_rows=TILE_ROWS, dtype=dtype)
        _workspaces[key] = splitkv.Workspace.allocate(config, device)
    return _workspaces[key]
