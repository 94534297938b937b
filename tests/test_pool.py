"""PagePool against a plain model: tokens that are really written to slots, and read back through the page table."""

import copy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import splitkv
from splitkv.pool import Binding, PageCopy, PagePool, PoolExhausted

NAMES = range(8)
PICKS = st.integers(0, 7)
RARELY = st.sampled_from([False] * 7 + [True])
LENGTHS = st.one_of(st.integers(0, 6), st.integers(0, 22))


class PoolMachine(RuleBasedStateMachine):
    """Each request's tokens are numbers that occur once; memory and page table are what a device would hold."""

    @initialize(
        num_pages=st.integers(1, 12), page_size=st.integers(1, 4), rows=st.integers(1, 5), columns=st.integers(1, 6)
    )
    def start(self, num_pages: int, page_size: int, rows: int, columns: int) -> None:
        self.pool = PagePool(num_pages, page_size, max_requests=rows, max_pages=columns)
        self.page_size, self.columns = page_size, columns
        self.tokens: dict[int, list[int]] = {}
        self.memory: dict[tuple[int, int], int] = {}
        self.table = [[-1] * columns for _ in range(rows)]
        self.written = 0

    def name(self, pick: int, live: bool) -> int:
        """A live request, or one that is not: rules mostly draw what can work."""
        fitting = [name for name in NAMES if (name in self.tokens) == live] or [*NAMES]
        return fitting[pick % len(fitting)]

    def write(self, name: int, count: int) -> None:
        """Append new tokens to a request, through its pages."""
        for _ in range(count):
            page, offset = divmod(len(self.tokens[name]), self.page_size)
            self.memory[self.pool.pages(name)[page], offset] = self.written
            self.tokens[name].append(self.written)
            self.written += 1

    def refuse(self, errors: Any, act: Any) -> None:
        """The call raises and changes nothing."""
        before = copy.deepcopy(vars(self.pool))
        with pytest.raises(errors):
            act()
        assert vars(self.pool) == before

    def pages_needed(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def free_pages(self) -> int:
        held = {page for name in self.tokens for page in self.pool.pages(name)}
        return self.pool.num_pages - len(held)

    @rule(pick=PICKS, live=RARELY, length=LENGTHS, reserve=st.sampled_from([0, 0, 1, 5]))
    def admit(self, pick: int, live: bool, length: int, reserve: int) -> None:
        name = self.name(pick, live)

        def act() -> None:
            self.pool.admit(name, length, reserve=reserve)

        if name in self.tokens or length + reserve > self.columns * self.page_size:
            self.refuse(ValueError, act)
        elif len(self.tokens) == len(self.table) or self.pages_needed(length + reserve) > self.free_pages():
            self.refuse(PoolExhausted, act)
        else:
            act()
            self.tokens[name] = []
            self.write(name, length)

    @rule(pick=PICKS, dead=RARELY, by=st.integers(-1, 5), reserve=st.sampled_from([0, 0, 3]))
    def extend(self, pick: int, dead: bool, by: int, reserve: int) -> None:
        name = self.name(pick, not dead)
        length = len(self.tokens.get(name, ())) + by

        def act() -> None:
            self.pool.extend(name, length, reserve=reserve)

        if name not in self.tokens:
            self.refuse(KeyError, act)
        elif by < 0 or length + reserve > self.columns * self.page_size:
            self.refuse(ValueError, act)
        elif self.pages_needed(length + reserve) - len(self.pool.pages(name)) > self.free_pages():
            self.refuse(PoolExhausted, act)
        else:
            act()
            self.write(name, by)

    @rule(pick=PICKS, dead=RARELY, taken=RARELY, back=st.sampled_from([None, None, 0, 1, 2, 3, 7, -1]))
    def fork(self, pick: int, dead: bool, taken: bool, back: int | None) -> None:
        name, new = self.name(pick, not dead), self.name(pick, taken)
        tokens = self.tokens.get(name, [])
        length = None if back is None else len(tokens) - back

        def act() -> PageCopy | None:
            return self.pool.fork(name, new, length)

        common = len(tokens) if length is None else length
        if name not in self.tokens:
            self.refuse(KeyError, act)
        elif new in self.tokens or not 0 <= common <= len(tokens):
            self.refuse(ValueError, act)
        elif len(self.tokens) == len(self.table) or (common % self.page_size and not self.free_pages()):
            self.refuse(PoolExhausted, act)
        else:
            free = self.free_pages()
            made = act()
            assert (made is not None) == bool(common % self.page_size)
            self.tokens[new] = tokens[:common]
            if made is not None:
                assert made.tokens == common % self.page_size
                for offset in range(made.tokens):
                    self.memory[made.target, offset] = self.memory[made.source, offset]
            assert free - self.free_pages() == (made is not None)  # full pages are shared
            assert self.pool.pages(new)[: common // self.page_size] == self.pool.pages(name)[: common // self.page_size]

    @rule(pick=PICKS, dead=RARELY)
    def release(self, pick: int, dead: bool) -> None:
        name = self.name(pick, not dead)
        if name not in self.tokens:
            self.refuse(KeyError, lambda: self.pool.release(name))
            return
        self.pool.release(name)
        del self.tokens[name]
        self.refuse(KeyError, lambda: self.pool.release(name))

    @rule(order=st.permutations(range(8)))
    def bind(self, order: list[int]) -> None:
        chosen = [name for name in order if name in self.tokens]
        binding = self.pool.binding(chosen)
        places = [(row, column) for row, column, _ in binding.page_updates]
        assert len(places) == len(set(places))  # a device may write them in any order
        last = {row: max(c for r, c in places if r == row) for row, _ in places}
        for row, column, page in binding.page_updates:
            self.table[row][column] = page
            if column == 0:
                self.table[row][last[row] + 1 :] = [-1] * (self.columns - last[row] - 1)
        assert len(set(binding.rows)) == len(chosen)
        assert self.pool.binding(chosen) == Binding(binding.rows, binding.seq_lens, [])
        live = {}
        for name, row, length in zip(chosen, binding.rows, binding.seq_lens, strict=True):
            assert length == len(self.tokens[name])
            live[row] = list(self.pool.pages(name))
            for position, token in enumerate(self.tokens[name]):
                page = self.table[row][position // self.page_size]
                assert self.memory[page, position % self.page_size] == token
        for row, entries in enumerate(self.table):
            pages = live.get(row, [])
            assert entries == pages + [-1] * (self.columns - len(pages))

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def pages_are_neither_lost_nor_written_by_two(self) -> None:
        assert self.pool.num_free_pages == self.free_pages()
        holders: dict[int, int] = {}
        for name in self.tokens:
            pages = self.pool.pages(name)
            assert len(pages) == len(set(pages)) and all(0 <= page < self.pool.num_pages for page in pages)
            for page in pages:
                holders[page] = holders.get(page, 0) + 1
        for name, tokens in self.tokens.items():
            # Where a request will write next, nobody else reads.
            assert all(holders[page] == 1 for page in self.pool.pages(name)[len(tokens) // self.page_size :])


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40)


def test_exhaustion_says_how_many_pages_are_needed_and_free() -> None:
    pool = PagePool(num_pages=3, page_size=16, max_requests=1, max_pages=8)
    with pytest.raises(PoolExhausted, match="4 pages are needed, 3 of 3 are free"):
        pool.admit("a", 64)
    pool.admit("a", 48)
    with pytest.raises(PoolExhausted, match="no row is free: all 1 are taken"):
        pool.admit("b", 0)
    with pytest.raises(PoolExhausted, match="1 pages are needed, 0 of 3 are free"):
        pool.extend("a", 49)


def test_errors_name_the_argument() -> None:
    pool = PagePool(num_pages=3, page_size=16, max_requests=2, max_pages=2)
    with pytest.raises(ValueError, match="page_size: expected an integer ≥ 1, given 0"):
        PagePool(3, 0, 1, 1)
    with pytest.raises(TypeError, match="max_pages"):
        PagePool(3, 16, 1, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seq_len: expected an integer in 0…32, given 33"):
        pool.admit("a", 33)
    with pytest.raises(ValueError, match=r"reserve: expected an integer in 0…2, given 3"):
        pool.admit("a", 30, reserve=3)
    pool.admit("a", 20)
    with pytest.raises(ValueError, match="request: expected a name that is not in use, given 'a'"):
        pool.admit("a", 1)
    with pytest.raises(ValueError, match="seq_len: expected at least 20"):
        pool.extend("a", 19)
    with pytest.raises(ValueError, match="new: expected a name that is not in use"):
        pool.fork("a", "a")
    with pytest.raises(ValueError, match=r"seq_len: expected an integer in 0…20, given 21"):
        pool.fork("a", "b", 21)
    pool.release("a")
    for act in (pool.release, pool.pages, pool.seq_len, lambda name: pool.binding([name])):
        with pytest.raises(KeyError, match="expected a live request, given 'a'"):
            act("a")


def test_reserved_pages_are_kept_and_used() -> None:
    pool = splitkv.PagePool(num_pages=8, page_size=4, max_requests=2, max_pages=8)
    pool.admit("a", 3, reserve=9)
    assert pool.pages("a") == (0, 1, 2) and pool.seq_len("a") == 3
    pool.extend("a", 12)
    assert pool.pages("a") == (0, 1, 2) and pool.seq_len("a") == 12
    assert pool.binding(["a"]).seq_lens == [12]
