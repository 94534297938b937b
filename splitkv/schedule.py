"""The work partition of decode in plain integers: which program attends which keys, and where its partials go.

The same arithmetic as the device functions of `splitkv/kernels/primitives.py` and the kernels that call them, under the
same names. The kernels never use it: `tests/test_schedule.py` holds them against it, and `python -m splitkv doctor`
prints it. How the schedule works is said in `primitives.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from splitkv.config import cdiv

# How tiles are cut.
BALANCED = 0  # so that all programs have about as much to do
FIXED_PARTS = 1  # each into the same number of parts
FIXED_TOKENS = 2  # at multiples of a number of tokens

GRAIN = 8  # tokens that weigh one


@dataclass(frozen=True)
class Request:
    """What the partition depends on of a request, clamped as the kernels clamp it.

    Attributes:
        seq_len: Keys, the query tokens' own included.
        q_len: Query tokens.
        kv_start: Keys before it are invisible.
    """

    seq_len: int
    q_len: int = 1
    kv_start: int = 0


@dataclass(frozen=True)
class Stretch:
    """Keys of one tile that one share of the work takes, for all KV heads.

    Attributes:
        share: Its number; program share · num_kv_heads + h attends KV head h.
        request, tile: Whose keys.
        offset, taken: Where it begins within the tile's length on the axis, and how much of that it takes.
        low, high: The keys, low ≤ key < high; none where high ≤ low.
        slot: Partial slot, None where it is the whole tile and goes straight to the output. KV head h uses
            slot · num_kv_heads + h.
    """

    share: int
    request: int
    tile: int
    offset: int
    taken: int
    low: int
    high: int
    slot: int | None

    @property
    def tokens(self) -> int:
        """Keys that it attends."""
        return max(self.high - self.low, 0)


class Sharing(NamedTuple):
    """How a batch is shared.

    Attributes:
        by_work: Whether a tile's length on the axis follows its keys; else all tiles are `each` long.
        each: Parts per tile where shares do not follow the work.
        share: Length of a share.
        total: Length of the axis.
    """

    by_work: bool
    each: int
    share: int
    total: int


def even_edge(part: int, parts: int, tokens: int) -> int:
    """Where part `part` of `tokens` tokens in `parts` even parts begins.

    >>> [even_edge(part, 4, 10) for part in range(5)]
    [0, 2, 5, 7, 10]
    """
    return part * tokens // parts


def part_tokens(seq_len: int, split_tokens: int, max_parts: int) -> int:
    """With fixed split tokens: the distance of part edges, the least multiple with which max_parts parts suffice.

    >>> part_tokens(1000, 64, 32), part_tokens(5000, 64, 32)
    (64, 192)
    """
    return split_tokens * max(cdiv(cdiv(seq_len, split_tokens), max_parts), 1)


def tile_at(place: int, tiles: int) -> int:
    """Which of a request's tiles stands at a place among them, where later ones see more keys.

    >>> [tile_at(place, 5) for place in range(5)]
    [0, 4, 1, 3, 2]
    """
    return tiles - 1 - place // 2 if place % 2 else place // 2


def place_of(tile: int, tiles: int) -> int:
    """Where a tile stands among a request's: the inverse of tile_at.

    >>> [place_of(tile, 5) for tile in range(5)]
    [0, 2, 4, 3, 1]
    """
    return 2 * tile if 2 * tile < tiles else 2 * (tiles - 1 - tile) + 1


def tile_weight(span: int, by_work: bool, each: int, heaviest: int, tile_cost: int) -> int:
    """Length of a tile on the axis.

    >>> tile_weight(100, True, 3, 1000, 16), tile_weight(100, False, 3, 1000, 16)
    (15, 3)
    """
    return min(max(cdiv(span + tile_cost, GRAIN), 1), heaviest) if by_work else each


def stretch(
    low: int, high: int, offset: int, taken: int, weight: int, by_work: bool, tile_cost: int
) -> tuple[int, int]:
    """(first, last) of the keys low…high that a stretch of a tile's length stands for.

    >>> stretch(0, 100, 4, 11, 15, True, 16), stretch(0, 100, 1, 1, 3, False, 16)
    ((16, 100), (34, 68))
    """
    visible = max(high - low, 0)
    if by_work:
        first = min(max(offset * GRAIN - tile_cost, 0), visible)
        last = min(max((offset + taken) * GRAIN - tile_cost, 0), visible)
        return low + first, low + (visible if offset + taken == weight else last)
    length = cdiv(visible, weight)
    return low + min(offset * length, visible), low + min((offset + taken) * length, visible)


@dataclass(frozen=True)
class Partition:
    """Everything but the lengths that decides who attends what: the integers of one launch.

    >>> partition = Partition(BALANCED, group_size=4, block_m=16, num_kv_heads=2, shares=4)
    >>> units = partition.stretches([Request(72), Request(7), Request(0)])
    >>> [(unit.share, unit.request, unit.low, unit.high, unit.slot) for unit in units]
    [(0, 0, 0, 24, 4), (1, 0, 24, 48, 1), (2, 0, 48, 72, 2), (3, 1, 0, 7, None), (3, 2, 0, 0, None)]

    Attributes:
        schedule: BALANCED, FIXED_PARTS or FIXED_TOKENS.
        group_size, block_m, num_kv_heads: Query heads per KV head, rows of a tile, KV heads.
        shares: Shares per KV head that the launch starts a program for.
        heaviest: Most that a tile may weigh, so that the axis stays within 32 bits.
        min_chunk: Balanced: least tokens of a share.
        segment_cost: Balanced: what it costs to begin and end within tiles, in tokens.
        tile_cost: Balanced: what it costs to begin another tile, in tokens.
        parts: FIXED_PARTS: parts of every tile. FIXED_TOKENS: most parts of a tile.
        split_tokens: FIXED_TOKENS: part edges are multiples of it.
        window_left: As for `splitkv.decode`; None: no window.
        right_bound: Whether a query token sees no key right of its position (causal, without a tree mask).
    """

    schedule: int
    group_size: int
    block_m: int
    num_kv_heads: int
    shares: int
    heaviest: int = 2**30
    min_chunk: int = 1
    segment_cost: int = 0
    tile_cost: int = 0
    parts: int = 1
    split_tokens: int = 1
    window_left: int | None = None
    right_bound: bool = True

    @classmethod
    def of_launch(cls, operands: Mapping[str, Any], constants: Mapping[str, Any]) -> Partition:
        """The partition that a launch of split_decode_kernel with these arguments makes."""
        return cls(
            schedule=constants["SCHEDULE"],
            group_size=constants["GROUP_SIZE"],
            block_m=constants["BLOCK_M"],
            num_kv_heads=constants["NUM_KV_HEADS"],
            shares=operands["shares"],
            heaviest=operands["heaviest"],
            min_chunk=constants["MIN_CHUNK"],
            segment_cost=constants["SEGMENT_COST"],
            tile_cost=constants["TILE_COST"],
            parts=constants["PARTS"],
            split_tokens=constants["SPLIT_TOKENS"],
            window_left=operands["window_left"] if constants["HAS_WINDOW"] else None,
            right_bound=constants["CAUSAL"] and operands["tree_ptr"] is None,
        )

    def request_work(self, request: Request) -> tuple[int, int]:
        """Query tiles per head of a request, and an upper bound of the keys that one of its tiles can see."""
        tiles = cdiv(request.q_len * self.group_size, self.block_m)
        span = request.seq_len - request.kv_start
        if self.window_left is not None:
            # A tile's first query token sees window_left keys further left than its last.
            tile_tokens = (self.block_m - 2) // self.group_size + 2
            reach = min(request.q_len, tile_tokens) if self.right_bound else max(request.q_len, 1)
            span = min(span, self.window_left + reach)
        return tiles, span

    def choose_shares(self, requests: Sequence[Request]) -> Sharing:
        """How this batch is shared."""
        work = [self.request_work(request) for request in requests]
        tiles = sum(count for count, _ in work)
        if self.schedule != BALANCED:
            return Sharing(False, self.parts, 1, tiles * self.parts)
        weight = sum(count * tile_weight(span, True, 1, self.heaviest, self.tile_cost) for count, span in work)
        longest = max((span for count, span in work if count > 0), default=0)
        least = self.min_chunk // GRAIN
        most = max(self.shares // max(tiles, 1), 1)
        each = min(most, max(longest // self.min_chunk, 1))
        tile_share = cdiv(tiles * most, self.shares) if each == most else 1
        longest_program = tile_share * self.shares * (longest + each * self.tile_cost)
        work_program = max(weight, self.shares * least) * GRAIN + self.shares * self.segment_cost
        if longest_program > each * work_program:
            return Sharing(True, each, max(cdiv(weight, self.shares), least), weight)
        return Sharing(False, each, tile_share, tiles * each)

    def weight(self, request: Request, sharing: Sharing) -> int:
        """Length on the axis of each of a request's tiles."""
        span = self.request_work(request)[1]
        return tile_weight(span, sharing.by_work, sharing.each, self.heaviest, self.tile_cost)

    def locate(self, position: int, requests: Sequence[Request], sharing: Sharing) -> tuple[int, int]:
        """The request at a position of the axis, and where it begins there; past it (their number, its length)."""
        begin = 0
        for b, request in enumerate(requests):
            end = begin + self.request_work(request)[0] * self.weight(request, sharing)
            if position < end:
                return b, begin
            begin = end
        return len(requests), begin

    def tile_range(self, request: Request, tile: int) -> tuple[int, int]:
        """(low, high): keys that some row of a tile may see."""
        first_token = tile * self.block_m // self.group_size
        last_token = min((tile * self.block_m + self.block_m - 1) // self.group_size, request.q_len - 1)
        first_position = request.seq_len - request.q_len
        low, high = request.kv_start, request.seq_len
        if self.window_left is not None:
            low = max(low, first_position + first_token - self.window_left)
        if self.right_bound:
            high = min(high, first_position + last_token + 1)
        return low, high

    def fixed_parts(self, request: Request) -> int:
        """With fixed schedules: parts of each of a request's tiles."""
        if self.schedule == FIXED_PARTS:
            return self.parts
        return max(cdiv(request.seq_len, part_tokens(request.seq_len, self.split_tokens, self.parts)), 1)

    def keys(
        self, request: Request, tile: int, offset: int, taken: int, weight: int, sharing: Sharing
    ) -> tuple[int, int]:
        """(low, high): the keys of a stretch of a tile; none where high ≤ low."""
        low, high = self.tile_range(request, tile)
        if self.schedule == BALANCED:
            return stretch(low, high, offset, taken, weight, sharing.by_work, self.tile_cost)
        if self.schedule == FIXED_PARTS:
            first = even_edge(offset, self.parts, request.seq_len)
            last = even_edge(offset + 1, self.parts, request.seq_len)
        else:
            distance = part_tokens(request.seq_len, self.split_tokens, self.parts)
            first, last = offset * distance, min(offset + 1, self.fixed_parts(request)) * distance
        return max(low, first), min(high, last)

    def share_stretches(self, share: int, requests: Sequence[Request], sharing: Sharing) -> Iterator[Stretch]:
        """What the programs of one share do, one stretch after another."""
        place = share * sharing.share
        stop = min(place + sharing.share, sharing.total)
        while place < stop:
            b, begin = self.locate(place, requests, sharing)
            weight = self.weight(requests[b], sharing)
            tile, offset = divmod(place - begin, weight)
            if self.right_bound:
                tile = tile_at(tile, self.request_work(requests[b])[0])
            taken = min(weight - offset, stop - place)
            low, high = self.keys(requests[b], tile, offset, taken, weight, sharing)
            slot: int | None
            if self.schedule == BALANCED:
                whole, slot = taken == weight, self.shares + share if offset == 0 else share
            else:
                whole, slot = self.fixed_parts(requests[b]) == 1, place
            if self.schedule == BALANCED or offset < self.fixed_parts(requests[b]):
                yield Stretch(share, b, tile, offset, taken, low, high, None if whole else slot)
            place += taken

    def stretches(self, requests: Sequence[Request]) -> Iterator[Stretch]:
        """What all programs of the launch do."""
        sharing = self.choose_shares(requests)
        for share in range(self.shares):
            yield from self.share_stretches(share, requests, sharing)

    def merged_slots(self, b: int, tile: int, requests: Sequence[Request]) -> list[int]:
        """The slots that are merged into a tile of request b, in order; none where one stretch is the tile."""
        sharing = self.choose_shares(requests)
        weight = self.weight(requests[b], sharing)
        _, begin = self.locate(2**31 - 1, requests[:b], sharing)
        if self.right_bound:
            tile = place_of(tile, self.request_work(requests[b])[0])
        begin += tile * weight
        if self.schedule == BALANCED:
            first_share = begin // sharing.share
            parts = (begin + weight - 1) // sharing.share - first_share + 1
            first_slot, next_slot = self.shares + first_share, first_share + 1
        else:
            parts, first_slot, next_slot = self.fixed_parts(requests[b]), begin, begin + 1
        return [first_slot, *range(next_slot, next_slot + parts - 1)] if parts > 1 else []
