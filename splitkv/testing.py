"""What a test or a notebook needs to judge a call: the error budget, poisoned memory, and whole problems from a seed.

>>> problem = make_problem(7, dtype=torch.float16, kind="paged", num_splits=3)
>>> out, lse = problem.decode(problem.workspace())
>>> problem.expected().error_ratio(out) <= 1
True

Depends on torch and this package alone. Values are drawn on the CPU: a seed means the same problem on any device.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from splitkv import api, reference
from splitkv.config import DTYPES, QUANTIZED_DTYPES, WorkspaceConfig, align_up, cdiv
from splitkv.kv import ContiguousKV, KVView, LatentKV, PagedKV, RaggedKV
from splitkv.workspace import Workspace, aligned_bytes

__all__ = [
    "Expected",
    "Guarded",
    "PoisonedWorkspace",
    "Problem",
    "error_ratio",
    "expect",
    "expect_merge",
    "make_problem",
    "same_bits",
    "same_computation",
    "unit_in_last_place",
]

SMALL_CALL = 4096
"""Output elements up to which the budget of a call is taken over 16 orders of summation."""
FEW_ROWS = 512
"""Rows up to which that of a float32 call is taken over four: a row's elements all err by the same weights."""

GUARD_BYTES = 4096
GUARD = 0xA5
POISONS = ("nan", "garbage", "zero")


# The error budget.


def unit_in_last_place(value: float, dtype: torch.dtype) -> float:
    """Distance of neighbouring numbers of `dtype` at this magnitude.

    >>> unit_in_last_place(1.5, torch.bfloat16)
    0.0078125
    """
    info = torch.finfo(dtype)
    exponent = math.frexp(max(abs(value), info.smallest_normal))[1] - 1
    return math.ldexp(info.eps, exponent)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; unlike torch.equal it tells NaNs and zeros apart."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, or tensors of integers unchanged."""
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@dataclass(frozen=True, eq=False)
class Expected:
    """What a call must return, and how far from it a result may be.

    The budget: at most twice the error that the same computation has in PyTorch with operands in that dtype and float32
    softmax, against float64, plus two units in the last place of the output dtype at the output's largest magnitude; by
    the norm over the call, relative to the output's, and by the largest element. LSE: 1e-5 relative or absolute in
    float32, 1e-2 absolute with 16-bit operands. Rows that see no key are exactly 0 and -inf.

    Attributes:
        out: [..., num_q_heads, head_dim_v] float64.
        lse: [..., num_q_heads] float64, natural log, without the sink.
        norm_limit: Largest allowed ‖error‖₂ / ‖out‖₂.
        element_limit: Largest allowed absolute error of one element.
        lse_absolute, lse_relative: An LSE may be off by the larger of the first and the second times its magnitude.
    """

    out: Tensor
    lse: Tensor
    norm_limit: float
    element_limit: float
    lse_absolute: float
    lse_relative: float

    @classmethod
    def of(cls, out: Tensor, lse: Tensor, same: list[Tensor], lse_absolute: float, lse_relative: float) -> Expected:
        """The budget from the float64 result and those of the same computation in PyTorch, in the output's dtype."""
        largest = float(out.abs().max()) if out.numel() else 0.0
        norm = float(out.norm())
        errors = [computed.double() - out for computed in same]
        rounding = 2 * unit_in_last_place(largest, same[0].dtype)
        return cls(
            out=out,
            lse=lse,
            norm_limit=(2 * max(float(error.norm()) for error in errors) / norm + rounding / largest) if norm else 0.0,
            element_limit=2 * max(float(error.abs().max()) if out.numel() else 0.0 for error in errors) + rounding,
            lse_absolute=lse_absolute,
            lse_relative=lse_relative,
        )

    def error_ratio(self, out: Tensor) -> float:
        """The error of an output as a share of the budget: at most 1 is within it; inf if a row without keys is not 0.

        Args:
            out: The shape of `self.out`, on its device.

        Raises:
            ValueError: another shape.
        """
        if out.shape != self.out.shape:
            raise ValueError(f"out: expected shape {list(self.out.shape)}, given {list(out.shape)}")
        if out.numel() == 0:
            return 0.0
        empty = self.lse == -math.inf
        if bool((out[empty] != 0).any()) or not bool(out.isfinite().all()):
            return math.inf
        if bool(empty.all()):
            return 0.0
        error = out.double() - self.out
        by_norm = _share(float(error.norm()), self.norm_limit * float(self.out.norm()))
        return max(by_norm, _share(float(error.abs().max()), self.element_limit))

    def lse_error_ratio(self, lse: Tensor) -> float:
        """The error of an LSE as a share of its budget; inf where one is -inf and the other is not.

        Args:
            lse: The shape of `self.lse`, on its device.

        Raises:
            ValueError: another shape.
        """
        if lse.shape != self.lse.shape:
            raise ValueError(f"lse: expected shape {list(self.lse.shape)}, given {list(lse.shape)}")
        empty = self.lse == -math.inf
        if not torch.equal(lse == -math.inf, empty) or not bool(lse[~empty].isfinite().all()):
            return math.inf
        if bool(empty.all()):
            return 0.0
        expected = self.lse[~empty]
        budget = (expected.abs() * self.lse_relative).clamp(min=self.lse_absolute)
        return float(((lse[~empty].double() - expected).abs() / budget).max())

    def check(self, out: Tensor | None = None, lse: Tensor | None = None, what: object = "") -> None:
        """Raise AssertionError where an output or an LSE is outside the budget, saying by how much.

        Args:
            out, lse: As for `error_ratio` and `lse_error_ratio`; None is not checked.
            what: Put before the message, such as the problem.
        """
        if out is not None:
            ratio = self.error_ratio(out)
            if not ratio <= 1:
                worst = float((out.double() - self.out).abs().nan_to_num(math.inf).max())
                raise AssertionError(
                    f"{what} out: expected an error of at most {self.element_limit:.3g} per element and "
                    f"{self.norm_limit:.3g} by norm, given {ratio:.3g} times that (largest element error {worst:.3g})"
                )
        if lse is not None:
            ratio = self.lse_error_ratio(lse)
            if not ratio <= 1:
                worst = float((lse.double() - self.lse).abs().nan_to_num(0.0, posinf=math.inf).max())
                raise AssertionError(
                    f"{what} lse: expected an error up to max({self.lse_absolute:g}, {self.lse_relative:g} · |lse|) "
                    f"and -inf in the same places, given {ratio:.3g} times that (largest error {worst:.3g})"
                )


def _share(error: float, limit: float) -> float:
    if limit > 0:
        return error / limit
    return math.inf if error > 0 else 0.0


@contextmanager
def _float32_products() -> Iterator[None]:
    """Matrix products of float32 tensors in float32, whatever the process has chosen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def expect(q: Tensor, kv: KVView, **rules: Any) -> Expected:
    """What `splitkv.decode_with_lse(q, kv, workspace, **rules)` must return, and its error budget.

    The same computation in PyTorch: products of operands of q's dtype summed in float32, softmax in float32, weights
    rounded to q's dtype before they meet the values, output rounded once. Operands are held in float32, exactly: every
    device sums in float32. The order of a sum is no part of the computation, and over few numbers its error is a matter
    of luck, often 0: small calls are computed in several orders, and the largest error counts (`same_computation`).

    Args:
        q, kv, **rules: As for `splitkv.decode`, without workspace and outputs.
    """

    out, lse = reference.decode_with_lse(q, kv, dtype=torch.float64, **rules)
    wide = q.dtype == torch.float32
    orders = 16 if out.numel() <= SMALL_CALL else 4 if wide and lse.numel() <= FEW_ROWS else 1
    same = [same_computation(q, kv, order, **rules)[0] for order in range(orders)]
    return Expected.of(out, lse, same, lse_absolute=1e-5 if wide else 1e-2, lse_relative=1e-5 if wide else 0.0)


def same_computation(q: Tensor, kv: KVView, order: int = 0, **rules: Any) -> tuple[Tensor, Tensor]:
    """What decode computes, in PyTorch with operands in q's dtype and float32 softmax: what its error is measured by.

    Args:
        q, kv, **rules: As for `expect`.
        order: In which order sums are taken: every number means another order of the tokens and of the head dimension.
            Where it is odd, products of queries and keys are added one after another, as kernels on a GPU do; else as
            this machine's matrix product does, which may keep several sums and then errs less.

    Returns:
        (out, lse): in q's dtype and in float32.
    """
    generator = torch.Generator().manual_seed(order)

    def shuffle(n: int) -> Tensor:
        return torch.randperm(n, generator=generator).to(q.device)

    def attend(
        q32: Tensor,
        k32: Tensor,
        v32: Tensor,
        sees: Tensor,
        *,
        keys: Tensor,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor]:
        dims, tokens = shuffle(q32.shape[-1]), shuffle(k32.shape[0])
        q32, k32, v32 = q32[..., dims], k32[tokens][..., dims], v32[tokens]
        if order % 2:
            q_by_dim = q32.view(len(q32), k32.shape[1], -1, 1, q32.shape[-1]).unbind(-1)
            k_by_dim = k32.transpose(0, 1)[None, :, None].unbind(-1)
            products = q_by_dim[0] * k_by_dim[0]
            for q_d, k_d in zip(q_by_dim[1:], k_by_dim[1:], strict=True):
                products.addcmul_(q_d, k_d)
        else:
            products = reference.products(q32, k32)
        scores = reference.attention_scores(products, sees[:, tokens], keys=keys[tokens], **more)
        logits = scores
        if sinks is not None:
            sink = sinks.float().view(1, *scores.shape[1:3], 1).expand(*scores.shape[:3], 1)
            logits = torch.cat([scores, sink], dim=-1)
        empty = (scores == -math.inf).all(dim=-1, keepdim=True)
        weights = torch.softmax(logits, dim=-1)[..., : scores.shape[-1]].masked_fill(empty, 0.0)
        lse = torch.logsumexp(scores, dim=-1).flatten(1)
        return reference.weigh(weights.to(q.dtype).float(), v32), lse

    with _float32_products():
        return reference.decode_with_lse(q, kv, attend=attend, **rules)


def expect_merge(outs: Tensor, lses: Tensor, *, sinks: Tensor | None = None, lse_base: float = math.e) -> Expected:
    """What `splitkv.merge` must return, and its error budget.

    Args:
        outs, lses, sinks, lse_base: As for `splitkv.merge`.
    """
    out, lse = reference.merge(outs, lses, sinks=sinks, lse_base=lse_base, dtype=torch.float64)
    natural = lses if lse_base == math.e else lses * math.log(lse_base)
    logits = natural if sinks is None else torch.cat([natural, sinks.float().expand(1, *lses.shape[1:])])
    seen = lses > -math.inf
    weights = torch.softmax(logits, dim=0)[: lses.shape[0]].masked_fill(~seen, 0.0)
    terms = weights[..., None] * outs.float().masked_fill(~seen[..., None], 0.0)
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(terms.shape[0], generator=generator).to(terms.device) for _ in range(8)]
    same = [terms[order].sum(dim=0).to(outs.dtype) for order in orders]
    return Expected.of(out, lse, same, lse_absolute=1e-5, lse_relative=1e-5)


def error_ratio(out: Tensor, q: Tensor, kv: KVView, **rules: Any) -> float:
    """The error of a decode output as a share of the error budget (see `Expected`): at most 1 is within it.

    >>> problem = make_problem(3, dtype=torch.float32)
    >>> out, _ = problem.decode(problem.workspace())
    >>> error_ratio(out, problem.q, problem.kv, **problem.rules) <= 1
    True

    Args:
        out: What was computed, shaped like q with head_dim_v last.
        q, kv, **rules: As they were given to `splitkv.decode`.
    """
    return expect(q, kv, **rules).error_ratio(out)


# Poisoned memory.


def poison_(memory: Tensor, kind: str, seed: int = 0) -> Tensor:
    """Fill a uint8 tensor: "nan" (every bit set: a NaN in each float format), "garbage" (random bytes) or "zero"."""
    if kind == "nan":
        return memory.fill_(0xFF)
    if kind == "zero":
        return memory.zero_()
    if kind == "garbage":
        drawn = torch.randint(0, 256, memory.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        return memory.copy_(drawn)
    raise ValueError(f"kind: expected one of {', '.join(POISONS)}, given {kind!r}")


class PoisonedWorkspace:
    """A workspace over memory that is full of NaN or garbage, between guard bytes.

    >>> config = WorkspaceConfig(2, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    >>> poisoned = PoisonedWorkspace(config, "cpu")
    >>> bool(poisoned.workspace.partial_out.isnan().all()), int(poisoned.written("out").sum())
    (True, 0)

    Args:
        config: The capacity.
        device: Where it lives.
        kind: "nan", "garbage" or "zero".
        seed: Of the garbage.

    Attributes:
        workspace: The `Workspace`.
    """

    workspace: Workspace

    def __init__(self, config: WorkspaceConfig, device: torch.device | str, kind: str = "nan", seed: int = 0) -> None:
        size = align_up(config.nbytes)
        self._memory = aligned_bytes(size + 2 * GUARD_BYTES, device)
        self._memory.fill_(GUARD)
        inside = self._memory[GUARD_BYTES : GUARD_BYTES + config.nbytes]
        for section in config.sections():
            poison_(inside[section.offset : section.end], kind, seed)
        self.workspace = Workspace.from_buffer(config, inside)
        self._before = self._memory.clone()

    def written(self, name: str) -> Tensor:
        """Which elements of a buffer have other bits than at first: bool, shaped like it."""
        section = next(section for section in self.workspace.config.sections() if section.name == name)
        start = GUARD_BYTES + section.offset
        stretch = slice(start, start + section.nbytes)
        changed = self._memory[stretch] != self._before[stretch]
        return changed.view(*section.shape, section.dtype.itemsize).any(dim=-1)

    def check_guards(self) -> None:
        """Raise AssertionError where a byte outside the buffers has changed."""
        outside = torch.ones_like(self._memory, dtype=torch.bool)
        for section in self.workspace.config.sections():
            outside[GUARD_BYTES + section.offset : GUARD_BYTES + section.end] = False
        _check_untouched("workspace", self._memory, self._before, outside)


class Guarded:
    """A tensor of poison inside a larger stretch of memory, to see whether anything around it is written.

    >>> guarded = Guarded((2, 4, 16), torch.float16, "cpu", padding=3, shift=1)
    >>> guarded.tensor.shape, guarded.tensor.stride()
    (torch.Size([2, 4, 16]), (76, 19, 1))

    Args:
        shape, dtype, device: Of the tensor.
        padding: Elements between its rows (the last dimension), each a guard.
        shift: Elements by which its start is moved off the alignment of an allocation.
        step: Distance of elements of the last dimension.

    Attributes:
        tensor: Filled with NaN.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        padding: int = 0,
        shift: int = 0,
        step: int = 1,
    ) -> None:
        strides, size = [], 1
        for index, n in enumerate(reversed(shape)):
            if index == 0:
                strides.append(step)
                size = step * n + padding
            else:
                strides.append(size)
                size *= n
        front = GUARD_BYTES // dtype.itemsize
        count = size + shift + 2 * front
        self._memory = torch.empty(count, dtype=dtype, device=device)
        poison_(self._memory.view(torch.uint8), "nan")
        self._before = self._memory.clone()
        strides.reverse()
        self.tensor = self._memory.as_strided(shape, strides, front + shift)
        self._outside = torch.ones(count, dtype=torch.bool, device=device)
        self._outside.as_strided(shape, strides, front + shift).fill_(False)

    def check_guards(self) -> None:
        """Raise AssertionError where an element around the tensor has changed."""
        _check_untouched("tensor", self._memory, self._before, self._outside)


def _check_untouched(name: str, memory: Tensor, before: Tensor, outside: Tensor) -> None:
    changed = (_bits(memory) != _bits(before)) & outside
    if bool(changed.any()):
        places = changed.nonzero()[:, 0]
        raise AssertionError(
            f"{name}: {places.numel()} elements around it were written, the first at {int(places[0])}, "
            f"the last at {int(places[-1])} of {memory.numel()}"
        )


# Problems.

STRIDES = ("contiguous", "padded", "odd", "transposed")
SCALES = ("number", "tensor", "head", "token")

CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "kind": ("paged", "csr", "contiguous", "ragged", "latent"),
    "layout": ("NHD", "HND"),
    "kv_strides": STRIDES,
    "alias_v": (False, False, True),
    "q_strides": STRIDES,
    "batch": (1, 2, 3, 4),
    "num_kv_heads": (1, 1, 2, 3),
    "group_size": (1, 2, 3, 4, 5, 7),
    "head_dim": (1, 16, 24, 59, 64, 64, 80, 128),
    "head_dim_v": (None, None, None, 1, 16, 40, 72),
    "max_len": (1, 5, 37, 100, 130),
    "page_size": (1, 3, 16, 64),
    "lens": (None,),
    "clamped": (False, False, False, False, True),
    "rows": (False, True),
    "shared_pages": (False, False, True),
    "kv_start": (False, False, False, True),
    "query": ("one", "one", "several", "ragged"),
    "q_len": (1, 2, 3, 5),
    "q_lens": (None,),
    "front": (0, 0, 2),
    "mask": ("causal", "causal", "causal", "full", "tree"),
    "window_left": (None, None, 0, 3, 50),
    "softcap": (None, None, None, 1.5, 50.0),
    "sinks": (None, None, None, "float32", "same"),
    "alibi": (False, False, False, True),
    "sm_scale": (None, None, None, 0.3),
    "spread": (1.0, 1.0, 3.0),
    "num_splits": (None, None, None, None, 1, 3, 8),
    "split_tokens": (None, None, None, 7, 16, 64),
    "max_parts": (1, 3, 32),
    "max_splits": (None, 1, 9, 64),
    "q_tile_rows": (None, None, 16, 128),
    "spare": (0, 1, 3),
    "poison": ("nan", "inf"),
    "cache": (None, None, None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
    "k_scale": SCALES,
    "v_scale": SCALES,
}
"""What a problem may be: each name's options, one of which its seed draws."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A whole decode call, made by `make_problem`.

    Attributes:
        seed: What it was drawn from.
        given: The choices that were given and not drawn.
        choices: All choices.
        q: The queries.
        kv: The view of the cache. Every slot that no query token of its request sees holds NaN or inf, and every dead
            entry of its table a page id that must not be followed.
        config: A workspace's capacity that suffices.
        rules: The keyword arguments of `splitkv.decode`.
        lens: Tokens in the cache, per request, clamped to what the view can hold.
        q_lens: Query tokens per request.
    """

    seed: int
    given: dict[str, Any]
    choices: dict[str, Any]
    q: Tensor
    kv: KVView
    config: WorkspaceConfig
    rules: dict[str, Any]
    lens: list[int]
    q_lens: list[int]

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.given.items())
        said = " ".join(
            f"{name}={value}"
            for name, value in self.choices.items()
            if value not in (None, False) and name not in self.given and name not in ("lens", "q_lens")
        )
        return f"make_problem({self.seed}{given})  # lens={self.lens} q_lens={self.q_lens} {said}"

    def workspace(self) -> Workspace:
        """A workspace that suffices, its memory full of NaN."""
        return PoisonedWorkspace(self.config, self.q.device).workspace

    def decode(self, workspace: Workspace, **changes: Any) -> tuple[Tensor, Tensor]:
        """`splitkv.decode_with_lse` of this problem.

        Args:
            workspace: The scratch.
            **changes: Keyword arguments in place of the problem's own.
        """
        return api.decode_with_lse(self.q, self.kv, workspace, **{**self.rules, **changes})

    def expected(self) -> Expected:
        """What it must return, and its error budget."""
        return expect(self.q, self.kv, **self.rules)

    def inputs(self) -> dict[str, Tensor]:
        """Every tensor that decode may read and must not write."""
        tensors = {f"kv.{name}": value for name, value in vars(self.kv).items() if isinstance(value, Tensor)}
        tensors |= {name: value for name, value in self.rules.items() if isinstance(value, Tensor)}
        return {"q": self.q, **tensors}

    def relabelled(self, seed: int) -> Problem:
        """The same problem with its pages elsewhere in the cache.

        Raises:
            ValueError: a view without pages.
        """
        kv = self.kv
        if not isinstance(kv, (PagedKV, LatentKV)):
            raise ValueError(f"kind: expected paged, csr or latent, given {self.choices['kind']}")
        count = kv.k.shape[0]
        new_place = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(kv.device)

        def move(pages: Tensor) -> Tensor:
            moved = torch.empty_like(pages)
            _bits(moved)[new_place] = _bits(pages)
            return moved

        scales = dict(map_scales(kv, move))

        def relabel(table: Tensor) -> Tensor:
            known = (table >= 0) & (table < count)
            return torch.where(known, new_place[table.clamp(0, count - 1).long()].int(), table)

        moved: KVView
        if isinstance(kv, LatentKV):
            moved = LatentKV(
                move(kv.cache), relabel(kv.page_table), kv.seq_lens, head_dim_v=kv.head_dim_v, rows=kv.rows,
                kv_start=kv.kv_start, **scales,
            )  # fmt: skip
        elif hasattr(kv, "page_indptr"):
            moved = PagedKV.from_csr(
                move(kv.k), move(kv.v), kv.page_indptr, relabel(kv.page_indices), kv.last_page_len,
                kv_start=kv.kv_start, layout=kv.layout, **scales,
            )  # fmt: skip
        else:
            moved = PagedKV(
                move(kv.k), move(kv.v), relabel(kv.page_table), kv.seq_lens, rows=kv.rows, kv_start=kv.kv_start,
                layout=kv.layout, **scales,
            )  # fmt: skip
        return dataclasses.replace(self, kv=moved)

    def select(self, order: Sequence[int]) -> Problem:
        """The problem of these requests in this order, with the same config; one may come several times.

        Raises:
            ValueError: more requests or query tokens than the config holds.
        """
        q_lens = [self.q_lens[b] for b in order]
        if len(order) > self.config.max_batch_size or sum(q_lens) > self.config.max_total_q:
            raise ValueError(
                f"order: expected at most {self.config.max_batch_size} requests with {self.config.max_total_q} query "
                f"tokens, given {len(order)} with {sum(q_lens)}"
            )
        index = torch.tensor(list(order), dtype=torch.long, device=self.q.device)
        rules = dict(self.rules)
        if "tree_mask" in rules:
            rules["tree_mask"] = rules["tree_mask"][index]
        if "qo_indptr" in rules:
            first = rules["qo_indptr"].tolist()
            q = torch.cat([self.q[first[b] : first[b + 1]] for b in order] or [self.q[:0]])
            rules["qo_indptr"] = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=q.device)
        else:
            q = self.q[index]
        kv = self.kv
        kv_start = None if kv.kv_start is None else kv.kv_start[index]
        scales = dict(map_scales(kv, lambda scale: scale))
        moved: KVView
        if isinstance(kv, RaggedKV):
            edges = kv.kv_indptr.clamp(0, kv.k.shape[0]).tolist()
            tokens = [torch.arange(edges[b], edges[b + 1], device=kv.device) for b in order]
            flat = torch.cat([*tokens, index[:0]])
            indptr = torch.tensor([0, *accumulate(map(len, tokens))], dtype=torch.int32, device=kv.device)

            def pick(tokens: Tensor) -> Tensor:
                return _bits(tokens)[flat].view(tokens.dtype)

            moved = RaggedKV(pick(kv.k), pick(kv.v), indptr, kv_start=kv_start, **dict(map_scales(kv, pick)))
        elif isinstance(kv, PagedKV) and hasattr(kv, "page_indptr"):
            edges = kv.page_indptr.tolist()
            pages = [kv.page_indices[edges[b] : edges[b + 1]] for b in order]
            indptr = torch.tensor([0, *accumulate(map(len, pages))], dtype=torch.int32, device=kv.device)
            indices = torch.cat([*pages, kv.page_indices[:0]])
            moved = PagedKV.from_csr(
                kv.k, kv.v, indptr, indices, kv.last_page_len[index], kv_start=kv_start, layout=kv.layout, **scales
            )
        else:
            rows = index.int() if kv.rows is None else kv.rows[index]
            if isinstance(kv, PagedKV):
                moved = PagedKV(
                    kv.k, kv.v, kv.page_table, kv.seq_lens[index], rows=rows, kv_start=kv_start, layout=kv.layout,
                    **scales,
                )  # fmt: skip
            elif isinstance(kv, LatentKV):
                moved = LatentKV(
                    kv.cache, kv.page_table, kv.seq_lens[index], head_dim_v=kv.head_dim_v, rows=rows, kv_start=kv_start,
                    **scales,
                )  # fmt: skip
            else:
                assert isinstance(kv, ContiguousKV)
                moved = ContiguousKV(kv.k, kv.v, kv.seq_lens[index], rows=rows, kv_start=kv_start, **scales)
        return dataclasses.replace(self, q=q, kv=moved, rules=rules, lens=[self.lens[b] for b in order], q_lens=q_lens)


def map_scales(kv: KVView, change: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Any]]:
    """The scales of a view by argument name, `change` applied to those that tokens have of their own."""
    names = ("scale",) if isinstance(kv, LatentKV) else ("k_scale", "v_scale")
    for name, scale in zip(names, (kv.k_scale, kv.v_scale), strict=False):
        if isinstance(scale, Tensor) and scale.dim() > 1:
            yield name, change(scale)
        elif scale is not None:
            yield name, scale


def make_problem(seed: int, *, device: torch.device | str = "cpu", **choices: Any) -> Problem:
    """A whole decode call, drawn from a seed: sizes, layout, strides, lengths, rules, dtypes and values.

    >>> problem = make_problem(1, kind="csr", lens=(3, 90))
    >>> problem.lens, problem.kv.k.shape[-1] == problem.q.shape[-1]
    ([3, 90], True)
    >>> same_bits(make_problem(1, kind="csr").q, make_problem(1, kind="csr").q)
    True

    The problem's repr is the call that makes it again. A choice that is given leaves all others as drawn.

    Args:
        seed: Decides everything that is not given.
        device: Where the tensors live.
        **choices: Names of `CHOICES` with a value instead of a drawn one. The value need not be among the options:

            - dtype; kind: "paged", "csr", "contiguous", "ragged" or "latent" (one KV head, values the first columns of
              keys, sm_scale given); layout: "NHD" or "HND"
            - kv_strides, q_strides: "contiguous", "padded" (rows further apart), "odd" (by an odd number, and off
              alignment) or "transposed" (heads outermost in memory); alias_v: values are the first columns of keys
            - batch, num_kv_heads, group_size, head_dim, head_dim_v (None: head_dim), page_size
            - max_len: longest cache; lens: the lengths themselves; clamped: whether lengths on the device may claim
              more than the view holds; rows: whether requests pick their rows; shared_pages: whether requests have
              pages in common; kv_start: whether tokens are hidden on the left
            - query: "one" token each ([batch, heads, head_dim]), "several" ([batch, q_len, ...]) or "ragged"
              (qo_indptr, 0…q_len tokens each, rows past the last); for "ragged" also q_lens: the lengths themselves;
              front: rows before the first request's, as prefix sums have that are a stretch of longer ones
            - mask: "causal", "full" or "tree"; window_left, softcap, sm_scale; sinks: None, "float32" or "same" (the
              dtype of q); alibi; spread: standard deviation of the scores
            - num_splits, split_tokens, max_parts, max_splits, q_tile_rows; spare: requests and query tokens that the
              workspace could hold beyond the call
            - poison: what slots that nothing sees hold, "nan", "inf" or "zero", as far as their dtype has it; so do
              scales that tokens have of their own
            - cache: None (the dtype of queries) or a quantised dtype; k_scale, v_scale: for these a "number", a
              "tensor" for all, one per "head" or per "token"

    Raises:
        TypeError: a name that is no choice.
    """
    unknown = set(choices) - set(CHOICES)
    if unknown:
        raise TypeError(f"choices: expected names of CHOICES, given {', '.join(sorted(unknown))}")
    draw = random.Random(seed)
    drawn = {name: draw.choice(options) for name, options in CHOICES.items()}
    return _Maker(seed, torch.device(device), choices, {**drawn, **choices}).problem()


class _Maker:
    """One problem in the making."""

    def __init__(self, seed: int, device: torch.device, given: dict[str, Any], choices: dict[str, Any]) -> None:
        self.seed, self.device, self.given, self.choices = seed, device, given, choices
        self.random = random.Random(f"{seed} values")
        self.generator = torch.Generator().manual_seed(seed)
        c = choices
        self.batch: int = c["batch"] if c["lens"] is None else len(c["lens"])
        self.latent = c["kind"] == "latent"
        self.head_dim: int = c["head_dim"]
        self.head_dim_v: int = c["head_dim_v"] or self.head_dim
        self.num_kv_heads: int = c["num_kv_heads"]
        if self.latent:
            self.num_kv_heads, self.head_dim_v = 1, min(self.head_dim, self.head_dim_v)
        self.num_q_heads: int = self.num_kv_heads * c["group_size"]
        self.paged = c["kind"] in ("paged", "csr", "latent")
        self.cache: torch.dtype = c["cache"] or c["dtype"]
        self.page_size: int = c["page_size"] if self.paged else 1

    def values(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self.generator).mul_(scale).to(self.choices["dtype"])

    def integers(self, *shape: int, low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int64).to(torch.int32)

    def vector(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def problem(self) -> Problem:
        lens = self.lengths()
        q_lens = self.query_lengths()
        capacity = max([*lens, 1])
        starts = [self.random.randint(0, n + 1) for n in lens] if self.choices["kv_start"] else None
        rules = self.score_rules(q_lens)
        seen = self.seen(lens, q_lens, starts, rules.get("tree_mask"))
        kv = self.view(lens, starts, capacity, seen)
        q = self.queries(q_lens)
        rules = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in rules.items()}
        total_q = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
        if self.choices["query"] == "ragged":
            rules["qo_indptr"] = self.vector(list(accumulate(q_lens, initial=self.choices["front"])))
        config = self.config(total_q)
        return Problem(self.seed, self.given, self.choices, q, kv, config, rules, lens, q_lens)

    def lengths(self) -> list[int]:
        """Tokens per request: 0, 1, page edges, the longest, and anything between."""
        if self.choices["lens"] is not None:
            return list(self.choices["lens"])
        most, page = self.choices["max_len"], self.page_size
        edge = most // page * page
        options = [0, 1, most, most, edge, max(edge - 1, 0), min(edge + 1, most)]
        lens = [
            self.random.choice(options) if self.random.random() < 0.5 else self.random.randint(0, most)
            for _ in range(self.batch)
        ]
        lens[self.random.randrange(self.batch)] = most
        return lens

    def query_lengths(self) -> list[int]:
        if self.choices["query"] == "one":
            return [1] * self.batch
        if self.choices["query"] == "several":
            return [self.choices["q_len"]] * self.batch
        if self.choices["q_lens"] is not None:
            return list(self.choices["q_lens"])
        return [self.random.choice((0, 1, self.choices["q_len"], self.choices["q_len"])) for _ in range(self.batch)]

    def queries(self, q_lens: list[int]) -> Tensor:
        heads = (self.num_q_heads, self.head_dim)
        scale = float(self.choices["spread"])
        if self.choices["query"] == "ragged":
            past = self.random.choice((0, 2)) if sum(q_lens) else 1
            q = self.values(self.choices["front"] + sum(q_lens) + past, *heads, scale=scale)
        elif self.choices["query"] == "several":
            q = self.values(self.batch, q_lens[0], *heads, scale=scale)
        else:
            q = self.values(self.batch, *heads, scale=scale)
        return self.lay(q, self.choices["q_strides"])

    def score_rules(self, q_lens: list[int]) -> dict[str, Any]:
        c, rules = self.choices, {}
        for name in ("window_left", "softcap", "sm_scale", "num_splits"):
            if c[name] is not None:
                rules[name] = c[name]
        if self.latent:
            rules.setdefault("sm_scale", 0.7 * self.head_dim**-0.5)
        if c["sinks"] is not None:
            sinks = torch.randn(self.num_q_heads, generator=self.generator)
            rules["sinks"] = sinks if c["sinks"] == "float32" else sinks.to(c["dtype"])
        if c["alibi"]:
            rules["alibi_slopes"] = torch.rand(self.num_q_heads, generator=self.generator) * 0.3
        if c["mask"] == "full":
            rules["causal"] = False
        elif c["mask"] == "tree":
            # Ragged lengths, which the device alone knows, may exceed the mask's.
            fewer = -1 if c["query"] == "ragged" else 0
            longest = max(max(q_lens, default=1) + self.random.choice((0, 0, 1, 30, fewer)), 1)
            words = self.integers(self.batch, longest, cdiv(longest, 32), low=-(2**31), high=2**31)
            rules["tree_mask"] = words
        return rules

    def seen(
        self, lens: list[int], q_lens: list[int], starts: list[int] | None, tree_mask: Tensor | None
    ) -> list[tuple[Tensor, int]]:
        """Per request: [len] bool, which tokens some query token sees; the first token whose page may be looked up."""
        seen = []
        for b, (n, q_len) in enumerate(zip(lens, q_lens, strict=True)):
            start = 0 if starts is None else min(starts[b], n)
            window = self.choices["window_left"]
            tree = None if tree_mask is None else tree_mask[b]
            causal = self.choices["mask"] == "causal"
            sees = reference.visible(q_len, start, n, causal=causal, window_left=window, tree_mask=tree).any(dim=0)
            # Which draft tokens a tree leaves out is not known when pages are looked up.
            reach = reference.visible(q_len, start, n, causal=False, window_left=window).any(dim=0)
            seen.append((sees, int(reach.int().argmax()) if bool(reach.any()) else n))
        return seen

    def lay(self, values: Tensor, how: str) -> Tensor:
        """The same values on the device with strides of this kind, NaN between the rows."""
        values = values.to(self.device)
        if how == "transposed" and values.dim() >= 3:
            return values.transpose(-3, -2).contiguous().transpose(-3, -2)
        padding, shift = {"padded": (8, 0), "odd": (3, 1)}.get(how, (0, 0))
        width = values.shape[-1] + padding
        rows = math.prod(values.shape[:-1])
        memory = torch.empty(shift + rows * width, dtype=values.dtype, device=self.device)
        poison_(memory.view(torch.uint8), "nan")
        view = memory[shift:].view(*values.shape[:-1], width)[..., : values.shape[-1]]
        _bits(view).copy_(_bits(values))
        return view

    def caches(self, seen: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """K, V and their scales, poisoned where `seen` [..., tokens] (pages and offsets, rows and tokens, or tokens) is
        False."""
        c = self.choices
        hidden = ~seen[..., None, None]
        fill = {"nan": math.nan, "inf": math.inf, "zero": 0.0}[c["poison"]]
        heads = self.num_kv_heads
        swap = self.paged and not self.latent and c["layout"] == "HND"
        aliased = self.latent or (c["alias_v"] and self.head_dim_v <= self.head_dim)
        found, scales = [], {}
        for name, width in (("k_scale", self.head_dim), ("v_scale", self.head_dim_v)):
            numbers = self.values(*seen.shape, heads, width)
            if self.cache in QUANTIZED_DTYPES:
                scale, factor = self.scale(c[name], seen, heads, fill)
                numbers = self.quantized(numbers.float() / factor, hidden, fill)
                if isinstance(scale, Tensor):
                    if scale.dim() > 1:
                        scale = scale.transpose(1, 2).contiguous() if swap else scale
                        scale = self.lay(scale[..., 0] if self.latent else scale, c["kv_strides"])
                    scale = scale.to(self.device)
                scales[name] = scale
            else:
                numbers.masked_fill_(hidden, fill)
            if swap:
                numbers = numbers.transpose(1, 2).contiguous()
            found.append(self.lay(numbers[..., 0, :] if self.latent else numbers, c["kv_strides"]))
            if aliased:
                found.append(found[0][..., : self.head_dim_v])
                if "k_scale" in scales:
                    scales["v_scale"] = scales["k_scale"]
                break
        return found[0], found[1], scales

    def scale(self, kind: str, seen: Tensor, heads: int, fill: float) -> tuple[Tensor | float, Tensor]:
        """A scale of this kind, poisoned for tokens that are not seen, and as a factor of [..., heads, width]."""

        def draw(*shape: int) -> Tensor:
            return torch.exp2(torch.rand(shape, generator=self.generator) * 2 - 6)

        if self.latent and kind == "head":
            kind = "tensor"
        if kind == "number":
            number = float(draw())
            return number, torch.tensor(number)
        if kind == "token":
            scale = draw(*seen.shape, heads)
            return scale.masked_fill(~seen[..., None], fill), scale[..., None]
        scale = draw(heads) if kind == "head" else draw()
        return scale, scale[..., None]

    def quantized(self, numbers: Tensor, hidden: Tensor, fill: float) -> Tensor:
        """Numbers in the cache's dtype, with poison, as far as it has any, where they are hidden."""
        poison = torch.tensor(fill)
        if not self.cache.is_floating_point:
            poison = poison.nan_to_num(127.0, posinf=127.0)
        code = int(_bits(poison.to(self.cache)))
        return _bits(reference.quantize(numbers, self.cache)).masked_fill_(hidden, code).view(self.cache)

    def view(self, lens: list[int], starts: list[int] | None, capacity: int, seen: list[tuple[Tensor, int]]) -> KVView:
        c = self.choices
        # Vectors of a view may be longer than the batch.
        extra = [3] * self.random.choice((0, 0, 2))
        kv_start = None if starts is None else self.vector([*starts, *extra])
        clamped = c["clamped"]
        if c["kind"] == "ragged":
            edges = list(accumulate(lens, initial=0))
            known = torch.cat([tokens for tokens, _ in seen])
            k, v, scales = self.caches(known if len(known) else torch.zeros(1, dtype=torch.bool))
            if clamped and len(known) == k.shape[0]:
                edges[-1] += 5
            return RaggedKV(k, v, self.vector(edges), kv_start=kv_start, **scales)
        if c["kind"] == "contiguous":
            rows, picked = self.pick_rows()
            known = torch.zeros(rows, capacity, dtype=torch.bool)
            for row, (tokens, _) in zip(picked, seen, strict=True):
                known[row, : len(tokens)] = tokens
            k, v, scales = self.caches(known)
            row_vector = self.vector([*picked, *[0 for _ in extra]]) if c["rows"] else None
            seq_lens = self.vector([*self.claims(lens, capacity, clamped), *extra])
            return ContiguousKV(k, v, seq_lens, rows=row_vector, kv_start=kv_start, **scales)
        return self.paged_view(lens, kv_start, capacity, seen, extra)

    def claims(self, lens: list[int], capacity: int, clamped: bool) -> list[int]:
        """What the device is told the lengths are: where `clamped`, more than the capacity, or less than nothing."""
        if not clamped:
            return lens
        return [capacity + 1000 if n == capacity else -3 if n == 0 else n for n in lens]

    def pick_rows(self) -> tuple[int, list[int]]:
        """Rows of a table or cache, and which of them each request uses."""
        if not self.choices["rows"]:
            return self.batch + self.random.choice((0, 1)), list(range(self.batch))
        rows = self.batch + 2
        return rows, self.random.sample(range(rows), self.batch)

    def paged_view(
        self,
        lens: list[int],
        kv_start: Tensor | None,
        capacity: int,
        seen: list[tuple[Tensor, int]],
        extra: list[int],
    ) -> KVView:
        c, size = self.choices, self.page_size
        counts = [cdiv(n, size) for n in lens]
        num_pages = sum(counts) + 3
        free = torch.randperm(num_pages, generator=self.generator).tolist()
        pages = [[free.pop() for _ in range(count)] for count in counts]
        if c["shared_pages"]:
            # Whole pages of the first request begin the others too: a common prefix.
            for b in range(1, self.batch):
                common = min(lens[0] // size, lens[b] // size)
                pages[b][:common] = pages[0][:common]
        known = torch.zeros(num_pages, size, dtype=torch.bool)
        for ids, (tokens, _) in zip(pages, seen, strict=True):
            for place, page in enumerate(ids):
                stretch = tokens[place * size : (place + 1) * size]
                known[page, : len(stretch)] |= stretch
        k, v, scales = self.caches(known)
        dead = self.random.choice((-1, -(2**31), num_pages, 2**31 - 1))
        for ids, (_, first) in zip(pages, seen, strict=True):
            left = min(first // size, len(ids))
            ids[:left] = [dead] * left
        if c["kind"] == "csr":
            last = [n - (count - 1) * size if count else 0 for n, count in zip(lens, counts, strict=True)]
            if c["clamped"]:
                last = [size + 7 if tail == size else tail for tail in last]
            flat = [page for ids in pages for page in ids]
            return PagedKV.from_csr(
                k, v, self.vector(list(accumulate(counts, initial=0))), self.vector([*flat, dead]),
                self.vector([*last, *extra]), kv_start=kv_start, layout=c["layout"], **scales,
            )  # fmt: skip
        # Lengths are clamped to the table's columns, so that those which claim too much need one without a dead end.
        max_pages = max([*counts, 1]) + (0 if c["clamped"] else self.random.choice((0, 1)))
        rows, picked = self.pick_rows()
        wide = self.random.choice((0, 3))
        table = torch.full((rows, max_pages + wide), dead, dtype=torch.int32)
        for row, ids in zip(picked, pages, strict=True):
            table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        row_vector = self.vector([*picked, *[0 for _ in extra]]) if c["rows"] else None
        # A length that fills its table exactly may claim more.
        full = max_pages * size if capacity == max_pages * size else -1
        seq_lens = self.vector([*self.claims(lens, full, c["clamped"]), *extra])
        table = table.to(self.device)[:, :max_pages]
        if self.latent:
            scale = scales.get("k_scale")
            return LatentKV(
                k, table, seq_lens, head_dim_v=self.head_dim_v, rows=row_vector, kv_start=kv_start, scale=scale
            )
        return PagedKV(k, v, table, seq_lens, rows=row_vector, kv_start=kv_start, layout=c["layout"], **scales)

    def config(self, total_q: int) -> WorkspaceConfig:
        c = self.choices
        config = WorkspaceConfig(
            max_batch_size=self.batch + c["spare"],
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            max_total_q=max(total_q, 1) + c["spare"] * max(1, c["q_len"] if c["query"] != "one" else 1),
            q_tile_rows=c["q_tile_rows"],
            split_tokens=c["split_tokens"],
            max_parts=c["max_parts"],
            dtype=c["dtype"],
        )
        forced = [c["max_parts"]] if c["split_tokens"] is not None else []
        forced += [c["num_splits"]] if c["num_splits"] is not None else []
        if forced:
            needed = config.max_q_tiles * config.num_kv_heads * max(forced)
        else:
            needed = c["max_splits"] or config.max_splits
        return dataclasses.replace(config, max_splits=needed)
