"""Which compiled kernels a decode call launches: a pure function of its form and sizes, so that they can be listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from splitkv import tiles as tile_sizes
from splitkv.config import WorkspaceConfig, cdiv, next_power_of_2, tile_bound
from splitkv.schedule import BALANCED, FIXED_PARTS, FIXED_TOKENS
from splitkv.tiles_io import TileTable

ALIGNED_BYTES = 16  # rows that are aligned to it are copied in pieces of it
TALL_ROWS = 128  # of tiles that hold many query tokens, of one request or of many
MERGED_TOKENS = 8  # that one program of the merge looks at, where it has something to do for few of them


@dataclass(frozen=True)
class Variant:
    """The kernels of one call.

    Attributes:
        q_tiles: Query tiles per KV head, or a bound of them.
        units: Shares of the work per KV head.
        listed: Whether they read the view's work list.
        split, merge: Constants of the two kernels.
        merges: Whether the second one is launched.
        num_warps, max_registers: Of the first.
        dependent: Whether a kernel may start while the one before it ends.
        shared: The pass over shared keys that goes before, or None.
    """

    q_tiles: int
    units: int
    listed: bool
    split: dict[str, Any]
    merge: dict[str, Any]
    merges: bool
    num_warps: int
    max_registers: int
    dependent: bool
    shared: SharedPass | None = None


@dataclass(frozen=True)
class SharedPass:
    """The pass of `decode_shared_prefix` over the keys that requests have in common, and where both leave results.

    Attributes:
        q_tiles, units, split, num_warps, max_registers: Of its kernel, as for `Variant`.
        group: Constants of the kernel that finds out what is shared.
        slot_rows: Rows of the workspace's partial_out that its partials take, from the first.
        own_slot_rows: Rows after these for the partials of the other pass.
        whole_rows: Rows after these for tiles in one part: one per query token and head of the one and the other pass.
        words: 32-bit words, at the end of partial_out, of the lists that say what is shared.
    """

    q_tiles: int
    units: int
    split: dict[str, Any]
    num_warps: int
    max_registers: int
    group: dict[str, Any]
    slot_rows: int
    own_slot_rows: int
    whole_rows: int
    words: int


def choose_tiles(
    target: tile_sizes.Target,
    table: TileTable | None,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    rows: int,
    aligned: bool,
    blocks: tile_sizes.Blocks,
    kv_dtype: torch.dtype,
    latent: bool,
    tree: bool = False,
    beside: bool = False,
) -> tile_sizes.Tiles:
    """Those of a caller's table, or else those of `splitkv.tiles`, whose `choose` says what the arguments are.

    Those of a table that only a tree mask leaves no room for are passed over: tables are measured without.

    Raises:
        ValueError: a table's tiles, or any, do not fit the shared memory of a program.
    """
    cache: dict[str, Any] = dict(kv_dtype=kv_dtype, latent=latent)
    if table is not None:
        tiles = table.lookup(target.arch, dtype, head_dim, head_dim_v, rows, **cache)
        if tiles is not None:
            sizes = target, dtype, head_dim, head_dim_v, rows, tiles.block_n, tiles.num_stages
            needed = tile_sizes.shared_bytes(*sizes, **cache)
            if needed > target.shared_memory:
                raise ValueError(
                    f"tiles: expected entries that fit {target.shared_memory} bytes of shared memory on {target.arch}, "
                    f"given block_n {tiles.block_n} with num_stages {tiles.num_stages} for widths of {head_dim} and "
                    f"{head_dim_v} and {rows} rows of {dtype} ({needed} bytes)"
                )
            if not tree or tile_sizes.shared_bytes(*sizes, **cache, tree=True) <= target.shared_memory:
                return tiles
    return tile_sizes.choose(
        target, dtype, head_dim, head_dim_v, rows, aligned=aligned, blocks=blocks, **cache, tree=tree, beside=beside
    )


@dataclass(frozen=True)
class CallForm:
    """What the kernels of a decode call depend on, but for its batch, lengths, strides and alignment.

    Attributes:
        config, target, tiles: The workspace's.
        partial_elements, partial_rows: Elements of its partial_out and partial_lse.
        num_kv_heads, group_size, head_dim, head_dim_v: Sizes of the query and the cache.
        kind, page_size: The view's addressing.
        by_page: Whether tokens are found through page ids.
        q_len: Query tokens of each request; None where they vary (qo_indptr).
        causal, has_window, has_softcap, has_tree, num_splits: The rules.
        listed_tiles: Most query tiles of a call that reads the view's work list; None: none does.
        len_hint: The view's: typical length in tokens.
        kv_dtype: Of the cache.
        kv_format: What its elements are, as the kernels know it; 0 where it is not quantised.
        latent: Whether values are the first columns of keys.
        k_scale_per_token, v_scale_per_token: Whether every token of it has scales of its own.
        native: Whether kernels may convert 8-bit numbers by instructions of the target's.
        widen: Whether products are computed in float32, for Triton's interpreter.
        positive_scale: Whether what multiplies scores is above 0.
        shares_keys: Whether keys that requests have in common are attended for all of them at once.
        has_kv_start: Whether requests may have tokens hidden on the left.
        beside: Whether these kernels run beside those of low tiles.
    """

    config: WorkspaceConfig
    target: tile_sizes.Target
    tiles: TileTable | None
    partial_elements: int
    partial_rows: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    head_dim_v: int
    kind: int
    page_size: int
    by_page: bool
    q_len: int | None
    causal: bool
    has_window: bool
    has_softcap: bool
    has_tree: bool
    num_splits: int | None
    listed_tiles: int | None
    len_hint: int | None
    kv_dtype: torch.dtype
    kv_format: int
    latent: bool
    k_scale_per_token: bool
    v_scale_per_token: bool
    native: bool
    widen: bool
    positive_scale: bool = True
    shares_keys: bool = False
    has_kv_start: bool = False
    beside: bool = False

    @property
    def fixed(self) -> bool:
        """Whether parts are, so that a row's bits may not depend on how many others there are, nor on hints."""
        return self.num_splits is not None or self.config.split_tokens is not None

    def rows(self, kv_vector: int) -> int:
        """Rows of a query tile."""
        rows = self.config.q_tile_rows
        if self.q_len is not None:
            needed = self.q_len * self.group_size
            if rows == TALL_ROWS // 2 and needed >= TALL_ROWS and not self.fixed:
                rows = TALL_ROWS  # half as many reads of keys, which is what chunks are bound by
            rows = min(rows, max(16, next_power_of_2(needed)))
        return tile_sizes.fit_rows(
            self.target,
            self.config.dtype,
            self.head_dim,
            self.head_dim_v,
            rows,
            aligned=kv_vector > 1,
            kv_dtype=self.kv_dtype,
            latent=self.latent,
            tree=self.has_tree,
        )

    def q_tiles(self, batch: int, total_q: int, kv_vector: int) -> int:
        """Query tiles per KV head of a call, or a bound of them."""
        rows = self.rows(kv_vector)
        if self.q_len is None:
            return tile_bound(batch, total_q, self.group_size, rows)
        return batch * cdiv(self.q_len * self.group_size, rows)

    def choose(self, batch: int, q_tiles: int, q_vector: int, kv_vector: int, same_strides: bool) -> Variant:
        """The kernels of a call.

        Args:
            batch: Requests.
            q_tiles: As the method of that name says.
            q_vector, kv_vector: Elements to whose multiple every row of q and out, and of K and V, is aligned: those of
                ALIGNED_BYTES, or 1.
            same_strides: Whether a token lies at the same offset in K and V, with pages less than 2 GiB apart; of
                latent rows, whether those of a page lie without gaps.

        Raises:
            ValueError: partials that the workspace cannot hold, or no tiles that fit the device.
        """
        config, target = self.config, self.target
        rows = self.rows(kv_vector)
        slots = min(self.partial_elements // (rows * self.head_dim_v), self.partial_rows // rows)
        blocks = tile_sizes.Blocks.SHORT
        if not self.fixed:
            blocks = tile_sizes.prefer_blocks(target, q_tiles * self.num_kv_heads, self.len_hint, latent=self.latent)
        tiles = choose_tiles(
            target, self.tiles, config.dtype, self.head_dim, self.head_dim_v, rows, kv_vector > 1, blocks,
            self.kv_dtype, self.latent, self.has_tree, self.beside,
        )  # fmt: skip
        if self.fixed:
            schedule = FIXED_TOKENS if self.num_splits is None else FIXED_PARTS
            parts = config.max_parts if self.num_splits is None else self.num_splits
            units = q_tiles * parts
            if parts > 1 and units * self.num_kv_heads > slots:
                name = "split_tokens" if self.num_splits is None else "num_splits"
                raise ValueError(
                    f"{name}: expected at most {slots} partial tiles (the workspace's capacity for {rows} rows of "
                    f"width {self.head_dim_v}), given {units * self.num_kv_heads} "
                    f"({q_tiles} query tiles · {self.num_kv_heads} KV heads · {parts} parts): a larger max_splits or "
                    "q_tile_rows in its config makes room"
                )
        else:
            schedule, parts = BALANCED, 0
            units = tile_sizes.share_count(target, tiles, self.num_kv_heads, q_tiles, slots, self.len_hint)
        shared = dict(
            NUM_KV_HEADS=self.num_kv_heads,
            GROUP_SIZE=self.group_size,
            HEAD_DIM_V=self.head_dim_v,
            PAGE_SIZE=self.page_size,
            KV_KIND=self.kind,
            SCHEDULE=schedule,
            SPLIT_TOKENS=(config.split_tokens or 0) if schedule == FIXED_TOKENS else 0,
            PARTS=parts,
            MIN_CHUNK=tiles.min_chunk,
            SEGMENT_COST=tiles.segment_cost,
            TILE_COST=tiles.tile_cost,
            DEPENDENT_LAUNCH=target.dependent_launch,
            HAS_WINDOW=self.has_window,
            BLOCK_B=1 if batch <= 1 else 16 if batch <= 16 else 64 if batch <= 64 else 256,
            WIDEN=self.widen,
            BLOCK_M=rows,
        )
        block_d, block_d_tail = tile_sizes.split_width(self.head_dim)
        block_dv, block_dv_tail = tile_sizes.split_width(self.head_dim_v)
        if self.latent:
            block_d, block_d_tail = tile_sizes.split_latent_width(self.head_dim, self.head_dim_v)
            block_dv, block_dv_tail = block_d, 0
        split = dict(
            shared,
            HEAD_DIM=self.head_dim,
            MULTI_TOKEN=self.q_len is None or self.q_len > 1 or self.has_tree,
            CAUSAL=self.causal,
            FIRST_KEYS=False,
            WAITS_LAST=False,
            HAS_SOFTCAP=self.has_softcap,
            POSITIVE_SCALE=self.positive_scale,
            # Beside keys that are loaded element by element the rest is no matter: fewer kernels to compile.
            Q_VECTOR=q_vector if kv_vector > 1 else 1,
            SAME_STRIDES=same_strides and self.by_page and kv_vector > 1 and not self.latent,
            KV_VECTOR=kv_vector,
            KV_FORMAT=self.kv_format,
            K_SCALE_PER_TOKEN=self.k_scale_per_token,
            V_SCALE_PER_TOKEN=self.v_scale_per_token,
            NATIVE=self.kv_format != 0 and kv_vector > 1 and self.native,
            PACKED=same_strides and self.latent and kv_vector > 1,
            BLOCK_N=tiles.block_n,
            BLOCK_D=block_d,
            BLOCK_D_TAIL=block_d_tail,
            BLOCK_DV=block_dv,
            BLOCK_DV_TAIL=block_dv_tail,
            NUM_STAGES=tiles.num_stages,
        )
        # Most parts that one tile is likely to have: all are loaded at once where they are many.
        likely = parts if self.fixed else units // max(q_tiles, 1) + 1
        block_p = min(128, max(8, next_power_of_2(likely)))
        merge = dict(
            shared,
            RIGHT_BOUND=self.causal and not self.has_tree,
            BLOCK_P=block_p,
            BLOCK_DV=min(max(16, next_power_of_2(self.head_dim_v)), 2048 // max(block_p, 16)),
            # Of tall tiles of which there are more than shares most are whole, and have many rows.
            TOKENS=MERGED_TOKENS if rows >= TALL_ROWS // 2 and q_tiles > units and not self.fixed else 1,
            SHARED_BLOCK_M=0,
            SHARED_MIN_CHUNK=0,
            SHARED_SEGMENT_COST=0,
            SHARED_TILE_COST=0,
        )
        return Variant(
            q_tiles=q_tiles,
            units=units,
            # More tiles than the list was sized for could leave 32 bits on its axis: such calls do without.
            listed=self.listed_tiles is not None and q_tiles <= self.listed_tiles,
            split=split,
            merge=merge,
            # Nothing is left to merge where every tile has one part by construction; rows past qo_indptr[-1] are the
            # merge's.
            merges=self.q_len is None or not (self.fixed and parts == 1),
            num_warps=tiles.num_warps,
            max_registers=tiles.max_registers,
            dependent=target.dependent_launch,
        )

    def _slot_rows(self, cut: Variant) -> int:
        """Rows of partial_out that the partials of these kernels take at most."""
        balanced = cut.split["SCHEDULE"] == BALANCED
        # A single share per head, or a single part of each tile, cuts nothing.
        slots = 0 if (cut.units if balanced else cut.split["PARTS"]) == 1 else 2 * cut.units if balanced else cut.units
        return slots * self.num_kv_heads * int(cut.split["BLOCK_M"])

    def choose_shared(
        self, batch: int, q_tiles: int, total_q: int, q_vector: int, kv_vector: int, same_strides: bool
    ) -> Variant:
        """The kernels of a call of `decode_shared_prefix` of two or more requests.

        Args:
            batch, q_tiles, q_vector, kv_vector, same_strides: As for `choose`.
            total_q: Query tokens.

        Raises:
            ValueError: partials that the workspace cannot hold, or no tiles that fit the device.
        """
        width, fixed = self.head_dim_v, self.fixed
        words = 5 * (batch + total_q) + 1
        whole_rows = 2 * total_q * self.num_kv_heads * self.group_size
        held = min((self.partial_elements - words) // width, self.partial_rows)
        room = held - whole_rows
        if room < 0:
            raise ValueError(
                f"workspace: expected partials of at least {whole_rows} rows of width {width} for {total_q} query "
                f"tokens over shared keys, given {max(held, 0)}: q_tile_rows=128 or a larger max_splits in its config "
                "makes room"
            )
        # Rows that are whole are float32 and written like q's.
        q_vector = q_vector if width % q_vector == 0 else 1

        # The common keys of a group: all its query tokens see them, but for keys on the left that some do not see.
        rows = self.config.q_tile_rows
        if not fixed:
            rows = max(rows, TALL_ROWS if total_q * self.group_size > TALL_ROWS // 2 else TALL_ROWS // 2)
        tall = replace(
            self, config=replace(self.config, q_tile_rows=rows), q_len=None, causal=False, has_window=False,
            has_tree=False, listed_tiles=None, beside=not fixed and self.target.dependent_launch,
        )  # fmt: skip
        tall_tiles = tile_bound(max(batch // 2, 1), total_q, self.group_size, tall.rows(kv_vector))

        def attempt(form: CallForm, tiles: int, rows_given: int) -> tuple[Variant, int]:
            form = replace(form, partial_elements=rows_given * width, partial_rows=rows_given)
            chosen = form.choose(batch, tiles, q_vector, kv_vector, same_strides)
            return chosen, self._slot_rows(chosen)

        # What a request attends on its own is not what its hint tells.
        own_form = self if fixed else replace(self, len_hint=None)
        # Where the partials of as many programs as run at a time do not fit, both passes get fewer.
        enough = 2**40
        _, shared_rows = attempt(tall, tall_tiles, enough)
        _, own_rows = attempt(own_form, q_tiles, enough)
        if fixed and shared_rows + own_rows > room:
            rows, needed = self.config.q_tile_rows, whole_rows + shared_rows + own_rows
            name = "split_tokens" if self.num_splits is None else "num_splits"
            raise ValueError(
                f"{name}: expected a workspace for {needed} rows of partials over shared keys and own ones (max_splits="
                f"{cdiv(needed * width + words, rows * width)} or more in its config, of {rows} rows each), given "
                f"{max(held, 0)}"
            )
        if shared_rows + own_rows > room:
            shared_rows = room * shared_rows // (shared_rows + own_rows)
        shared, slot_rows = attempt(tall, tall_tiles, shared_rows)
        own, own_slot_rows = attempt(own_form, q_tiles, room - slot_rows)
        if tall.beside:
            # The one is bound by arithmetic, the other by memory: side by side on a multiprocessor they take little
            # more time than the longer of them.
            own = replace(own, split=dict(own.split, WAITS_LAST=True))
        sizes = dict(
            SHARED_BLOCK_M=shared.split["BLOCK_M"],
            SHARED_MIN_CHUNK=shared.split["MIN_CHUNK"],
            SHARED_SEGMENT_COST=shared.split["SEGMENT_COST"],
            SHARED_TILE_COST=shared.split["TILE_COST"],
        )
        return replace(
            own,
            listed=False,
            merges=True,
            merge=dict(own.merge, BLOCK_P=16, BLOCK_DV=min(max(16, next_power_of_2(width)), 128), TOKENS=1, **sizes),
            shared=SharedPass(
                q_tiles=tall_tiles,
                units=shared.units,
                split=dict(shared.split, FIRST_KEYS=self.has_window or self.has_kv_start),
                num_warps=shared.num_warps,
                max_registers=shared.max_registers,
                group=dict(
                    PAGE_SIZE=self.page_size,
                    KV_KIND=self.kind,
                    HAS_WINDOW=self.has_window,
                    CAUSAL=self.causal,
                    HAS_TREE=self.has_tree,
                    DEPENDENT_LAUNCH=self.target.dependent_launch,
                    BLOCK_G=16,
                    BLOCK_B=64,
                ),
                slot_rows=slot_rows,
                own_slot_rows=own_slot_rows,
                whole_rows=whole_rows,
                words=words,
            ),
        )

    def variants(self, max_batch: int | None = None) -> Iterator[Variant]:
        """The kernels of every call of this form that decode accepts; those of one call may come more than once.

        Args:
            max_batch: Most requests of a call; None: any number.
        """
        vector = ALIGNED_BYTES // self.config.dtype.itemsize
        for kv_vector in (ALIGNED_BYTES // self.kv_dtype.itemsize, 1):
            for batch, q_tiles in self._sizes(kv_vector):
                if max_batch is not None and batch > max_batch:
                    continue
                for q_vector in {vector, 1} if kv_vector > 1 else {1}:
                    for same_strides in (True, False) if self.by_page and kv_vector > 1 else (False,):
                        try:
                            if self.shares_keys and batch > 1:
                                for total_q in (1, TALL_ROWS):  # such as fill half of the tallest tile, and more
                                    yield self.choose_shared(batch, q_tiles, total_q, q_vector, kv_vector, same_strides)
                            else:
                                yield self.choose(batch, q_tiles, q_vector, kv_vector, same_strides)
                        except ValueError:
                            continue  # decode refuses it too

    def _sizes(self, kv_vector: int) -> Iterator[tuple[int, int]]:
        """(batch, q_tiles) of calls, all that make a difference."""
        blocks = (1, 2, 17, 65)  # the least batch of each block of requests
        num_sms, heads = self.target.num_sms, self.num_kv_heads
        # From one tile per share, and one per two multiprocessors, more make no difference.
        programs = 4 if self.tiles is None else max([t.programs_per_sm for t in self.tiles.entries.values()], default=4)
        most = max(num_sms * max(programs, 4) // heads, 1) + 1
        tiles = set(range(most + 1))
        if self.listed_tiles is not None:
            tiles |= {self.listed_tiles, self.listed_tiles + 1}
        if self.q_len is None:
            yield from ((batch, q_tiles) for batch in blocks for q_tiles in sorted(tiles))
            return
        each = self.q_tiles(1, self.q_len, kv_vector)
        for batch in sorted({*blocks, *(n // each + up for n in tiles for up in (0, 1))} - {0}):
            yield batch, batch * each
