"""FlashInfer's wrapper over `splitkv.decode`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitkv import api, checks
from splitkv.compat.common import bounded_mask, check_flag, refuse
from splitkv.config import ALIGNMENT, DTYPES, QUANTIZED_DTYPES, WorkspaceConfig
from splitkv.kv import PagedKV
from splitkv.workspace import Workspace

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class _Planned:
    """What plan recorded.

    Attributes:
        indptr, indices, last_page_len: The pages, on the device.
        batch, q_len: Requests, and query tokens of each.
        num_qo_heads, num_kv_heads, head_dim, page_size: Sizes.
        q_dtype, kv_dtype, o_dtype: Of queries, caches and outputs.
        window_left, window_right: As FlashInfer's: -1 for none.
        rules: Keywords of decode, but for the left window and what run is given.
        fixed_tokens: Tokens per part, or None.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    batch: int
    q_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    window_left: int
    window_right: int
    rules: dict[str, Any]
    fixed_tokens: int | None

    def config(self, batch: int, nbytes: int) -> WorkspaceConfig:
        """A workspace for up to `batch` requests that takes at most nbytes, where parts may be fewer."""
        config = WorkspaceConfig(
            max_batch_size=max(batch, 1),
            num_q_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_total_q=max(batch, 1) * self.q_len,
            split_tokens=self.fixed_tokens,
            dtype=self.q_dtype,
        )
        if config.nbytes <= nbytes or self.fixed_tokens is not None:
            return config
        least = dataclasses.replace(config, max_splits=1)
        spare = nbytes - least.nbytes - 2 * ALIGNMENT
        return dataclasses.replace(
            config, max_splits=1 + max(0, spare // (config.q_tile_rows * (self.head_dim + 1) * 4))
        )


class BatchDecodeWithPagedKVCacheWrapper:
    """FlashInfer's wrapper of batch decode over paged caches, by `splitkv.decode`.

    The module's docstring says what is refused.

    >>> wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(32 * 2**20, dtype=torch.uint8), "NHD")
    >>> indptr, indices = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([5, 2, 7, 1], dtype=torch.int32)
    >>> last_page_len = torch.tensor([8, 16], dtype=torch.int32)
    >>> wrapper.plan(indptr, indices, last_page_len, num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
    >>> cache = torch.randn(8, 2, 16, 2, 64, dtype=torch.float16)
    >>> wrapper.run(torch.randn(2, 4, 64, dtype=torch.float16), cache).shape
    torch.Size([2, 4, 64])

    plan checks and records; it reads nothing on the device. Lengths and pages that are on the device already are not
    copied: what is written into them later is seen by run, and by the replay of a CUDA graph. With use_cuda_graph plan
    copies into the buffers given, as FlashInfer's does; a graph that captured run is right after the next plan, whose
    rules must be the same. run allocates its output unless it is given one, and makes a view of the cache: it takes the
    host some 30 µs more than `splitkv.decode`, which replays of a graph do not have. The float_workspace_buffer serves
    one stream at a time.

    Args:
        float_workspace_buffer: Contiguous, of any dtype, arbitrary on entry: 20 to 70 MB let all GPUs be filled; with
            less, calls are cut into fewer parts. `workspace_size` says how many bytes are used.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: Whether plan writes into the following buffers, for a batch that stays the same.
        use_tensor_cores: Changes nothing: they are always used.
        paged_kv_indptr_buffer: [batch + 1] int32.
        paged_kv_indices_buffer: [most pages] int32.
        paged_kv_last_page_len_buffer: [batch] int32.
        backend: "auto".
        jit_args: None.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        checks.check_choice("kv_layout", kv_layout, "NHD", "HND")
        check_flag("use_cuda_graph", use_cuda_graph)
        check_flag("use_tensor_cores", use_tensor_cores)
        if not isinstance(backend, str) or backend != "auto":
            raise ValueError(f'backend: expected "auto" (there is one), given {backend!r}')
        refuse("jit_args", jit_args, "there are no kernels but ours")
        self._buffer = _bytes_of("float_workspace_buffer", float_workspace_buffer)
        self.device = self._buffer.device
        self._kv_layout, self._use_cuda_graph, self._use_tensor_cores = kv_layout, use_cuda_graph, use_tensor_cores
        given = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None
        if use_cuda_graph:
            indptr, indices, tails = (
                checks.check_index_vector(f"paged_kv_{name}_buffer", buffer, self.device, "float_workspace_buffer")
                for name, buffer in zip(("indptr", "indices", "last_page_len"), given, strict=True)
            )
            checks.check_shape("paged_kv_indptr_buffer", indptr, [tails.shape[0] + 1])
            self._buffers = indptr, indices, tails
        else:
            for name, buffer in zip(("indptr", "indices", "last_page_len"), given, strict=True):
                refuse(f"paged_kv_{name}_buffer", buffer, "without use_cuda_graph nothing is copied there")
        self._planned: _Planned | None = None
        self._workspace: Workspace | None = None
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    @property
    def use_tensor_cores(self) -> bool:
        """As given."""
        return self._use_tensor_cores

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plan writes into buffers of the caller."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor | None) -> None:
        """Take another float_workspace_buffer. plan must be called again.

        Args:
            float_workspace_buffer: As for the constructor, on the same device.
            int_workspace_buffer: Not needed: nothing is planned.
        """
        if int_workspace_buffer is not None:
            checks.check_tensor("int_workspace_buffer", int_workspace_buffer)
        buffer = _bytes_of("float_workspace_buffer", float_workspace_buffer)
        checks.check_device("float_workspace_buffer", buffer, self.device, "the wrapper")
        self._buffer, self._workspace, self._planned = buffer, None, None

    def workspace_size(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> tuple[int, int]:
        """(bytes of float_workspace_buffer that such a plan makes use of, 0). Arguments as for `plan`."""
        planned = self._read(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode,
            window_left, logits_soft_cap, q_data_type, kv_data_type, o_data_type, data_type, sm_scale, rope_scale,
            rope_theta, block_tables, seq_lens, fixed_split_size, disable_split_kv, q_len_per_req, 0,
        )  # fmt: skip
        return planned.config(planned.batch, 2**62).nbytes + ALIGNMENT, 0

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
    ) -> None:
        """Record what the following runs attend, and by which rules.

        Args:
            indptr: [batch + 1] int32, prefix sums of pages.
            indices: [num_pages] int32, the pages of all requests one after another.
            last_page_len: [batch] int32, tokens in each request's last page, 1…page_size.
            num_qo_heads, num_kv_heads, head_dim, page_size: Sizes of what run is given.
            pos_encoding_mode: "NONE".
            window_left: Keys left of a query token's position that it sees besides its own; -1: all.
            logits_soft_cap: Cap of the scaled scores; None or 0: none.
            q_data_type, kv_data_type: Of queries and caches; None: as the other. Caches may be 8-bit.
            o_data_type: That of queries (None), or float32.
            data_type: Takes the place of a q_data_type or kv_data_type that is left at its default.
            sm_scale: Logit multiplier; head_dim ** -0.5 by default.
            non_blocking: Whether the host goes on before the three tensors are copied.
            fixed_split_size: Pages per part, so that a request's bits do not depend on the batch; None or -1: parts are
                balanced over the GPU. Of very long requests, with more than 32 parts, parts are multiples of it.
            disable_split_kv: One part per request.
            q_len_per_req: Query tokens of each request, which see each other causally.
            window_right: Keys right of a query token's position that it sees; -1: all.

        Raises:
            TypeError, ValueError: naming the argument, what was expected, and what was given.
        """
        check_flag("non_blocking", non_blocking)
        planned = self._read(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode,
            window_left, logits_soft_cap, q_data_type, kv_data_type, o_data_type, data_type, sm_scale, rope_scale,
            rope_theta, block_tables, seq_lens, fixed_split_size, disable_split_kv, q_len_per_req, window_right,
        )  # fmt: skip
        workspace = self._workspace_for(planned)
        if self._buffers is None:
            tensors = [
                tensor.to(self.device, non_blocking=non_blocking)
                for tensor in (planned.indptr, planned.indices, planned.last_page_len)
            ]
        else:
            before = self._planned
            if before is not None and before.q_len != planned.q_len:
                raise ValueError(
                    f"q_len_per_req: expected {before.q_len} (as planned before: graphs have it captured), given "
                    f"{planned.q_len}"
                )
            checks.check_shape("last_page_len", planned.last_page_len, self._buffers[2].shape)
            if planned.indices.shape[0] > self._buffers[1].shape[0]:
                raise ValueError(
                    f"indices: expected at most {self._buffers[1].shape[0]} pages (paged_kv_indices_buffer's), given "
                    f"{planned.indices.shape[0]}"
                )
            tensors = list(self._buffers)
            for target, source in zip(tensors, (planned.indptr, planned.indices, planned.last_page_len), strict=True):
                target[: source.shape[0]].copy_(source, non_blocking=non_blocking)
        rules = planned.rules
        if 0 < planned.window_right < planned.q_len - 1:
            # Graphs hold its address: it is made once for what it depends on.
            form = planned.q_len, planned.window_right, planned.batch
            if form not in self._masks:
                self._masks[form] = bounded_mask(*form, self.device)
            rules = {**rules, "tree_mask": self._masks[form]}
        self._planned = dataclasses.replace(
            planned, indptr=tensors[0], indices=tensors[1], last_page_len=tensors[2], rules=rules
        )
        self._workspace = workspace

    begin_forward = plan

    def _read(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: str | torch.dtype | None,
        kv_data_type: str | torch.dtype | None,
        o_data_type: str | torch.dtype | None,
        data_type: str | torch.dtype | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
        block_tables: Tensor | None,
        seq_lens: Tensor | None,
        fixed_split_size: int | None,
        disable_split_kv: bool,
        q_len_per_req: int,
        window_right: int,
    ) -> _Planned:
        """Check arguments of plan."""
        for name, tensor in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
            checks.check_index_vector(name, tensor, checks.check_tensor(name, tensor).device, name)
            if tensor.device.type != "cpu":
                checks.check_device(name, tensor, self.device, "float_workspace_buffer")
        batch = last_page_len.shape[0]
        checks.check_shape("indptr", indptr, [batch + 1])
        for name, number in (
            ("num_qo_heads", num_qo_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim),
            ("page_size", page_size), ("q_len_per_req", q_len_per_req),
        ):  # fmt: skip
            checks.require_int(name, number, 1)
        if num_qo_heads % num_kv_heads:
            raise ValueError(
                f"num_qo_heads: expected a multiple of num_kv_heads = {num_kv_heads}, given {num_qo_heads}"
            )
        _check_rules(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        checks.require_int("window_right", window_right, -1)
        refuse("block_tables", block_tables, "indptr and indices name the pages")
        refuse("seq_lens", seq_lens, "indptr and last_page_len say the lengths")
        check_flag("disable_split_kv", disable_split_kv)
        if fixed_split_size is not None and not (isinstance(fixed_split_size, int) and fixed_split_size == -1):
            checks.require_int("fixed_split_size", fixed_split_size, 1)
            if disable_split_kv:
                raise ValueError("disable_split_kv: expected False with fixed_split_size, given True")
        else:
            fixed_split_size = None
        if data_type is not None:
            q_data_type = data_type if q_data_type in (None, "float16") else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        if q_data_type is None:
            raise ValueError("q_data_type: expected a dtype, or data_type in its place, given None")
        q_dtype = _dtype_of("q_data_type", q_data_type, *DTYPES)
        kv_dtype = _dtype_of(
            "kv_data_type", q_dtype if kv_data_type is None else kv_data_type, q_dtype, *QUANTIZED_DTYPES
        )
        o_dtype = _dtype_of(
            "o_data_type", q_dtype if o_data_type is None else o_data_type, *dict.fromkeys((q_dtype, torch.float32))
        )
        return _Planned(
            indptr=indptr,
            indices=indices,
            last_page_len=last_page_len,
            batch=batch,
            q_len=q_len_per_req,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            o_dtype=o_dtype,
            window_left=window_left,
            window_right=window_right,
            rules=dict(
                sm_scale=sm_scale,
                softcap=logits_soft_cap or None,
                num_splits=1 if disable_split_kv else None,
                causal=0 <= window_right < max(q_len_per_req - 1, 1),  # else no query token is hidden
            ),
            fixed_tokens=None if fixed_split_size is None else fixed_split_size * page_size,
        )

    def _workspace_for(self, planned: _Planned) -> Workspace:
        """The workspace in use where it has room and the same geometry, else another in the buffer."""
        now = self._workspace
        batch = planned.batch
        if now is not None:
            batch = max(batch, now.config.max_batch_size)
        start = -self._buffer.data_ptr() % ALIGNMENT
        room = self._buffer.numel() - start
        config = planned.config(batch, room)
        if config.nbytes > room and batch > planned.batch:
            config = planned.config(planned.batch, room)
        if now is not None and now.config == config:
            return now
        if config.nbytes > room:
            raise ValueError(
                f"float_workspace_buffer: expected at least {config.nbytes + ALIGNMENT} bytes for this plan, given "
                f"{self._buffer.numel()}"
            )
        return Workspace.from_buffer(config, self._buffer[start:])

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend each request's query tokens to its pages, as planned.

        Args:
            q: [batch · q_len_per_req, num_qo_heads, head_dim].
            paged_kv_cache: (k_cache, v_cache), each [num_pages, page_size, num_kv_heads, head_dim] ("HND": the middle
                two swapped); or both in one, [num_pages, 2, …]. Without the dimension of tokens a page holds one.
            q_scale, k_scale: Numbers that the scores are multiplied by besides sm_scale.
            v_scale: A number that the output is multiplied by: with a 16- or 32-bit cache in one more launch.
            out: Shaped like q, of the planned dtype; allocated where None.
            lse: [batch · q_len_per_req, num_qo_heads] float32, filled; allocated where None and return_lse.
            return_lse: Whether (out, lse) is returned. Base 2: made of the natural log in one more launch.
            window_left: None, or as planned.
            sinks: [num_qo_heads] float32: a logit per head that joins the softmax denominator, in natural units.
            q_len_per_req: None, or as planned.

        Returns:
            out, or (out, lse).

        Raises:
            TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
        """
        return self._run(
            q, paged_kv_cache, self._planned, args, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl,
            window_left, sinks, q_len_per_req, skip_softmax_threshold_scale_factor, kv_cache_sf,
        )  # fmt: skip

    def run_return_lse(
        self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """`run` with return_lse=True."""
        out, lse = self.run(q, paged_kv_cache, *args, **options, return_lse=True)
        return out, lse

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """`run` by these rules, in the place of those planned. Deprecated by FlashInfer."""
        planned = self._replanned(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        out = self._run(q, paged_kv_cache, planned, (), q_scale, k_scale, v_scale)
        assert isinstance(out, Tensor)
        return out

    def forward_return_lse(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`forward`, and also the LSE. Deprecated by FlashInfer."""
        planned = self._replanned(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        out, lse = self._run(q, paged_kv_cache, planned, (), q_scale, k_scale, v_scale, return_lse=True)
        return out, lse

    def end_forward(self) -> None:
        """Does nothing, as FlashInfer's."""

    def _replanned(
        self,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> _Planned | None:
        _check_rules(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        planned = self._planned
        if planned is None:
            return None
        rules = {**planned.rules, "sm_scale": sm_scale, "softcap": logits_soft_cap or None}
        return dataclasses.replace(planned, window_left=window_left, rules=rules)

    def _run(
        self,
        q: Tensor,
        paged_kv_cache: object,
        planned: _Planned | None,
        args: tuple[Any, ...],
        q_scale: float | None,
        k_scale: float | None,
        v_scale: float | None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: object = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if planned is None or self._workspace is None:
            raise ValueError("run: expected a call of plan before, given none")
        if args:
            raise ValueError(f"args: expected none (there are no kernels but ours), given {len(args)}")
        refuse("enable_pdl", enable_pdl, "it is used where the GPU has it")
        refuse("skip_softmax_threshold_scale_factor", skip_softmax_threshold_scale_factor, "no key is skipped")
        refuse("kv_cache_sf", kv_cache_sf, "caches have 8, 16 or 32 bits")
        check_flag("return_lse", return_lse)
        if window_left is not None and window_left != planned.window_left:
            raise ValueError(f"window_left: expected None or {planned.window_left}, as planned, given {window_left!r}")
        if q_len_per_req is not None and q_len_per_req != planned.q_len:
            raise ValueError(f"q_len_per_req: expected None or {planned.q_len}, as planned, given {q_len_per_req!r}")
        for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                checks.check_finite(name, scale)
        q = checks.check_tensor("q", q)
        checks.check_dtype("q", q, planned.q_dtype)
        checks.check_shape("q", q, [planned.batch * planned.q_len, planned.num_qo_heads, planned.head_dim])
        k_cache, v_cache = self._caches(paged_kv_cache, planned)
        quantized = planned.kv_dtype in QUANTIZED_DTYPES
        kv = PagedKV.from_csr(
            k_cache,
            v_cache,
            planned.indptr,
            planned.indices,
            planned.last_page_len,
            k_scale=k_scale if quantized else None,
            v_scale=v_scale if quantized else None,
            layout=self._kv_layout,
        )
        rules = dict(planned.rules, window_left=None if planned.window_left < 0 else planned.window_left, sinks=sinks)
        factor = (1.0 if q_scale is None else q_scale) * (1.0 if quantized or k_scale is None else k_scale)
        if factor != 1.0:
            rules["sm_scale"] = factor * (planned.head_dim**-0.5 if rules["sm_scale"] is None else rules["sm_scale"])
        if out is None:
            out = torch.empty(q.shape, dtype=planned.o_dtype, device=q.device)
        else:
            api.check_out(out, q.shape, q, "q", planned.o_dtype)
        if lse is not None:
            api.check_lse(lse, q.shape[:-1], q, "q")
        elif return_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)

        def by_request(tensor: Tensor) -> Tensor:
            if planned.q_len == 1:
                return tensor
            return tensor.view(planned.batch, planned.q_len, *tensor.shape[1:])

        api.decode(
            by_request(q),
            kv,
            self._workspace,
            out=by_request(out),
            lse=None if lse is None else by_request(lse),
            **rules,
        )
        if v_scale is not None and v_scale != 1 and not quantized:
            out.mul_(v_scale)
        if lse is not None:
            lse.mul_(LOG2_E)
        if not return_lse:
            return out
        assert lse is not None
        return out, lse

    def _caches(self, paged_kv_cache: object, planned: _Planned) -> tuple[Tensor, Tensor]:
        """(k_cache, v_cache) of four dimensions, checked against the plan."""
        name = "paged_kv_cache"
        tokens, heads = (1, 2) if self._kv_layout == "NHD" else (2, 1)
        if isinstance(paged_kv_cache, Tensor):
            both = checks.check_tensor(name, paged_kv_cache)
            checks.check_rank(name, both, 4, 5)
            if both.shape[1] != 2:
                raise ValueError(f"{name}: expected shape [num_pages, 2, …], given {checks.shape_text(both.shape)}")
            pair = both[:, 0], both[:, 1]
        elif isinstance(paged_kv_cache, tuple) and len(paged_kv_cache) == 2:
            pair = (
                checks.check_tensor(f"{name}[0]", paged_kv_cache[0]),
                checks.check_tensor(f"{name}[1]", paged_kv_cache[1]),
            )
        else:
            raise TypeError(f"{name}: expected a tensor or (k_cache, v_cache), given {type(paged_kv_cache).__name__}")
        sizes: list[int | str] = ["num_pages", 0, 0, planned.head_dim]
        sizes[tokens], sizes[heads] = planned.page_size, planned.num_kv_heads
        caches = []
        for index, cache in enumerate(pair):
            if cache.dim() == 3:
                cache = cache.unsqueeze(tokens)
            checks.check_dtype(f"{name}[{index}]", cache, planned.kv_dtype)
            checks.check_shape(f"{name}[{index}]", cache, sizes)
            checks.check_device(f"{name}[{index}]", cache, self.device, "float_workspace_buffer")
            caches.append(cache)
        return caches[0], caches[1]


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """FlashInfer's wrapper with use_cuda_graph=True, by its argument order.

    Args:
        workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout, use_tensor_cores: As
            float_workspace_buffer, paged_kv_indptr_buffer, … of `BatchDecodeWithPagedKVCacheWrapper`.
    """

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )


def _bytes_of(name: str, buffer: object) -> Tensor:
    """A contiguous tensor as uint8."""
    buffer = checks.check_tensor(name, buffer)
    if not buffer.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, given strides {checks.shape_text(buffer.stride())}")
    return buffer.view(-1).view(torch.uint8)


def _dtype_of(name: str, value: str | torch.dtype, *dtypes: torch.dtype) -> torch.dtype:
    """A dtype given as such or by its name."""
    found = getattr(torch, value, value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or found not in dtypes:
        raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes))}, given {value!r}")
    return found


def _check_rules(
    pos_encoding_mode: object,
    window_left: object,
    logits_soft_cap: object,
    sm_scale: object,
    rope_scale: object,
    rope_theta: object,
) -> None:
    """Check what plan and forward have in common."""
    if not isinstance(pos_encoding_mode, str) or pos_encoding_mode != "NONE":
        raise ValueError(
            f'pos_encoding_mode: expected "NONE" (rotate q and k before; ALiBi is splitkv.decode\'s alibi_slopes), '
            f"given {pos_encoding_mode!r}"
        )
    refuse("rope_scale", rope_scale, "rotate q and k before")
    refuse("rope_theta", rope_theta, "rotate q and k before")
    checks.require_int("window_left", window_left, -1)
    if logits_soft_cap is not None and checks.check_finite("logits_soft_cap", logits_soft_cap) < 0:
        raise ValueError(f"logits_soft_cap: expected None or a number ≥ 0, given {logits_soft_cap}")
    if sm_scale is not None:
        checks.check_finite("sm_scale", sm_scale)
