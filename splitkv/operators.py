"""Operators of `torch.library`, as which calls enter compiled graphs (`torch.compile`, `torch.export`).

Eager calls do not come here. While a call is traced, its view and its workspace are taken apart into tensors, numbers
and text, and one operator takes its place in the graph, whose schema says which tensors it writes. When the graph runs,
the operator puts them together again and does what the eager call does. It keeps nothing of a graph's tensors.

Tensors are a graph's inputs; numbers and text are its constants, as everywhere in PyTorch: a function that is compiled
once and called for many layers is compiled anew for each softcap, window, or scale that is a number and not a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from splitkv import checks
from splitkv.config import QUANTIZED_DTYPES
from splitkv.kv import CONTIGUOUS, PAGED, ContiguousKV, KVView, LatentKV, PagedKV, RaggedKV
from splitkv.work_list import Schedule

LIBRARY: Any = torch.library.Library("splitkv", "DEF")  # type: ignore[no-untyped-call]
NAMES: list[str] = []  # of what is registered
DEVICES = ("CPU", "CUDA", "XPU")  # "CUDA" on HIP too

# What a view is in a schema: see `take_apart`. A format string: what a call writes of the caches and their scales.
VIEW = (
    "Tensor{k} k, Tensor{v}? v, Tensor{k_scale}? k_scale, Tensor{v_scale}? v_scale, Tensor? lens, Tensor? indptr, "
    "Tensor? table, Tensor? rows, Tensor? kv_start, Tensor? work_list, Tensor? shard_lens, Tensor? shard_starts, "
    "str kind, SymInt? head_dim_v, float? k_number, float? v_number, SymInt? len_hint, str? schedule, "
    "SymInt? shard_first, SymInt? shard_step"
)
VIEW_TENSORS = 12  # so many of these are tensors, the first
READ_VIEW = VIEW.format(k="", v="", k_scale="", v_scale="")
WRITTEN_VIEW = VIEW.format(k="(w!)", v="(x!)", k_scale="(y!)", v_scale="(z!)")

Function = Callable[..., None]


def operator(schema: str) -> Callable[[Function], Function]:
    """Make a function the implementation of splitkv::name. It returns nothing: it writes what the schema says.

    Args:
        schema: "name(arguments)", with every written tensor marked.
    """

    def register(function: Function) -> Function:
        # Strides are kept: what is refused, and how fast it is, depends on them.
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        LIBRARY.define(f"{schema} -> ()", tags=tags)
        name = schema.split("(")[0]
        # What runs between graphs is traced where it can be, and an operator that runs is not to be.
        run = torch._disable_dynamo(function)  # type: ignore[attr-defined] # of PyTorch's own custom_op
        for device in DEVICES:
            LIBRARY.impl(name, run, device)
        torch.library.register_fake(f"splitkv::{name}", _nothing, lib=LIBRARY)
        NAMES.append(name)
        return function

    return register


def _nothing(*_: object, **__: object) -> None:
    """What an operator does to tensors without memory: it makes none, and shapes stay."""


def tracing(tensor: object) -> bool:
    """Whether a call is being traced rather than run, or given tensors that have a shape and no memory."""
    if torch.compiler.is_compiling():
        return True
    if type(tensor) is Tensor:  # asked by every eager call
        return tensor.is_meta
    return isinstance(tensor, Tensor) and not checks.has_memory(tensor)


def found(error: Exception) -> str:
    """What `refuse` raises anew when the graph runs: of what is raised in a trace the message is lost."""
    return f"{'TypeError' if isinstance(error, TypeError) else 'ValueError'}: {error.args[0]}"


def refused(check: Callable[..., object], *arguments: Any) -> str | None:
    """What to `refuse` where a check raises for these arguments: schemas would make numbers of True and False."""
    try:
        check(*arguments)
    except (TypeError, ValueError) as error:
        return found(error)
    return None


def followed(*given: tuple[str, Tensor | None]) -> str | None:
    """What to `refuse` where autograd would have to follow one of these: an operator that runs cannot see it."""
    for name, tensor in given:
        refusal = None if tensor is None else refused(checks.check_no_grad, name, tensor)
        if refusal is not None:
            return refusal
    return None


def refuse(refusal: str | None) -> None:
    """Raise what was found wrong in a trace."""
    if refusal is not None:
        kind, _, text = refusal.partition(": ")
        raise (TypeError if kind == "TypeError" else ValueError)(text)


def shapes_only(tensor: Tensor) -> bool:
    """Whether an eager call was given tensors of the meta device: it is checked as any other, and runs nothing."""
    return not torch.compiler.is_compiling() and tensor.is_meta and not checks.is_fake(tensor)


def take_apart(kv: KVView, scheduled: bool = True) -> tuple[Any, ...]:
    """A view as the schemas take it (`VIEW`), its schedule left out unless `scheduled`."""
    where, stand, schedule = kv.addressing, kv.positions, kv.schedule if scheduled else None
    head_dim_v = None
    k, k_scale, v_scale = kv.k, kv.k_scale, kv.v_scale
    v: Tensor | None = kv.v
    if isinstance(kv, LatentKV):
        # The caller's own tensor: a graph that uses it too must see that both are the same.
        k, v, head_dim_v, v_scale = kv.cache, None, kv.head_dim_v, None
        kind = "latent"
    elif isinstance(kv, PagedKV):
        kind = f"{'paged' if where.kind == PAGED else 'csr'} {kv.layout}"
    else:
        kind = "contiguous" if where.kind == CONTIGUOUS else "ragged"
    if kv.shared is not None:
        k, v = kv.shared.views()
    if kv.shared_scales is not None:
        k_scale, v_scale = kv.shared_scales.views()
    return (
        k,
        v,
        k_scale if isinstance(k_scale, Tensor) else None,
        v_scale if isinstance(v_scale, Tensor) else None,
        where.lens,
        where.indptr,
        where.table,
        kv.rows,
        kv.kv_start,
        None if schedule is None else schedule.buffer,
        None if stand is None else stand.seq_lens,
        None if stand is None else stand.starts,
        kind,
        head_dim_v,
        None if isinstance(k_scale, Tensor) else k_scale,
        None if isinstance(v_scale, Tensor) else v_scale,
        kv.len_hint,
        None if schedule is None else schedule.spec,
        None if stand is None else stand.first,
        None if stand is None else stand.step,
    )


def put_together(
    k: Tensor,
    v: Any,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    lens: Any,
    indptr: Any,
    table: Any,
    rows: Any,
    kv_start: Tensor | None,
    work_list: Tensor | None,
    shard_lens: Tensor | None,
    shard_starts: Tensor | None,
    kind: str,
    head_dim_v: Any,
    k_number: float | None,
    v_number: float | None,
    len_hint: int | None,
    schedule: str | None,
    shard_first: int | None,
    shard_step: int | None,
) -> KVView:
    """The view that `take_apart` took apart, whose kind says which of these are None."""
    shares = None if schedule is None or work_list is None else Schedule.of_spec(schedule, work_list)
    common: dict[str, Any] = dict(kv_start=kv_start, len_hint=len_hint, schedule=shares)
    scales: dict[str, Any] = dict(
        k_scale=k_number if k_scale is None else k_scale, v_scale=v_number if v_scale is None else v_scale
    )
    name, _, layout = kind.partition(" ")
    view: KVView
    if name == "latent":
        view = LatentKV(k, table, lens, rows=rows, head_dim_v=head_dim_v, scale=scales["k_scale"], **common)
    elif name == "paged":
        view = PagedKV(k, v, table, lens, rows=rows, layout=layout, **scales, **common)
    elif name == "csr":
        view = PagedKV.from_csr(k, v, indptr, table, lens, layout=layout, **scales, **common)
    elif name == "contiguous":
        view = ContiguousKV(k, v, lens, rows=rows, **scales, **common)
    else:
        view = RaggedKV(k, v, indptr, **scales, **common)
    if shard_lens is None:
        return view
    if shard_starts is not None:
        return view.shard(shard_lens, starts=shard_starts)
    return view.shard(shard_lens, rank=shard_first, size=shard_step)


def operands(
    k: Tensor,
    v: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    lens: Tensor | None,
    indptr: Tensor | None,
    table: Tensor | None,
    rows: Tensor | None,
    kv_start: Tensor | None,
    work_list: Tensor | None,
    shard_lens: Tensor | None,
    shard_starts: Tensor | None,
    *rest: object,
) -> tuple[Tensor | None, ...]:
    """`tensors` of the view that `take_apart` took apart."""
    if k.dtype in QUANTIZED_DTYPES:
        k, v = k.view(torch.uint8), None if v is None else v.view(torch.uint8)
    return (
        k, v, lens, indptr, table, rows, kv_start, work_list, k_scale, v_scale, shard_lens, shard_starts,
    )  # fmt: skip


@operator(f"update_schedule(Tensor(a!) buffer, str spec, SymInt? batch, str? refusal, {READ_VIEW})")
def _update_schedule_operator(buffer: Tensor, spec: str, batch: int | None, refusal: str | None, *view: Any) -> None:
    refuse(refusal)
    Schedule.of_spec(spec, buffer).update(put_together(*view), batch)
