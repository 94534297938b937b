"""An optional host-side allocator of pages, for engines that have none. Plain Python, no tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from splitkv.config import cdiv, require_int


class PoolExhausted(RuntimeError):
    """No page or no row is left for what was asked; nothing was changed."""


class PageCopy(NamedTuple):
    """The first `tokens` slots of page `source` have to be copied to page `target`, in every layer's caches."""

    source: int
    target: int
    tokens: int


class Binding(NamedTuple):
    """What `StepState.bind` takes: each request's row and length, and what has changed in the page table.

    Attributes:
        rows, seq_lens: Rows of the page table, and KV tokens.
        page_updates: (row, column, page) triples. A row whose column 0 is among them begins anew: what it holds right
            of its last column here is void. Page -1 there: the row has no page.
    """

    rows: list[int]
    seq_lens: list[int]
    page_updates: list[tuple[int, int, int]]


@dataclass
class _Entry:
    row: int
    seq_len: int
    pages: list[int]


class PagePool:
    """Gives requests rows and pages of a page table, and shares the full pages of common prefixes.

    Requests are named by any hashable value. Changes are collected until `binding` hands them out.

    >>> pool = PagePool(num_pages=8, page_size=4, max_requests=2, max_pages=4)
    >>> pool.admit("a", 6)
    >>> pool.fork("a", "b")  # the second page holds two tokens: both requests will write behind them
    PageCopy(source=1, target=2, tokens=2)
    >>> pool.extend("b", 9)
    >>> pool.binding(["a", "b"])
    Binding(rows=[0, 1], seq_lens=[6, 9], page_updates=[(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 2), (1, 2, 3)])
    >>> pool.release("a")
    >>> pool.binding(["b"])  # page 0 lives on in "b"
    Binding(rows=[1], seq_lens=[9], page_updates=[(0, 0, -1)])
    >>> pool.num_free_pages
    5

    Args:
        num_pages: Pages of the cache.
        page_size: Tokens per page.
        max_requests: Rows of the page table.
        max_pages: Columns of the page table: most pages of one request.

    Whatever raises changes nothing. Errors of all methods: TypeError or ValueError for a value out of range, a name in
    use, or a request that would shrink; KeyError for a request that is not live (any more); PoolExhausted.
    """

    def __init__(self, num_pages: int, page_size: int, max_requests: int, max_pages: int) -> None:
        for name, value in locals().copy().items():
            if name != "self":
                require_int(name, value, 1)
        self.num_pages, self.page_size = num_pages, page_size
        self.max_requests, self.max_pages = max_requests, max_pages
        self._live: dict[Hashable, _Entry] = {}
        # Taken from the end: low numbers first, and what was freed last, whose memory is warm.
        self._free_pages = list(reversed(range(num_pages)))
        self._free_rows = list(reversed(range(max_requests)))
        self._holders = [0] * num_pages
        self._updates: dict[int, dict[int, int]] = {}  # by row, then by column

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free_pages)

    def seq_len(self, request: Hashable) -> int:
        """The request's tokens, without what is only reserved.

        >>> pool = PagePool(num_pages=8, page_size=4, max_requests=2, max_pages=4)
        >>> pool.admit("a", 6, reserve=4)
        >>> pool.seq_len("a"), pool.pages("a")
        (6, (0, 1, 2))
        """
        return self._entry(request).seq_len

    def pages(self, request: Hashable) -> tuple[int, ...]:
        """The request's pages, those that are only reserved included.

        >>> pool = PagePool(num_pages=8, page_size=4, max_requests=2, max_pages=4)
        >>> pool.admit("a", 6)
        >>> pool.pages("a")
        (0, 1)
        """
        return tuple(self._entry(request).pages)

    def admit(self, request: Hashable, seq_len: int, *, reserve: int = 0) -> None:
        """Give a new request a row, and pages for `seq_len` tokens.

        Args:
            request: Its name.
            seq_len: Tokens, ≥ 0.
            reserve: Tokens beyond that which get pages too: those of steps that the device takes without the host.
        """
        self._enter("request", request, seq_len, [], self._pages_for(seq_len, reserve))

    def extend(self, request: Hashable, seq_len: int, *, reserve: int = 0) -> None:
        """Make a request `seq_len` tokens long in all, and give it the pages for them.

        Args:
            request: A live request.
            seq_len: Its new length, at least the old one.
            reserve: As for `admit`. Pages that were reserved before are kept.
        """
        entry = self._entry(request)
        count = self._pages_for(seq_len, reserve)
        if seq_len < entry.seq_len:
            raise ValueError(
                f"seq_len: expected at least {entry.seq_len} (request {request!r} cannot shrink), given {seq_len}"
            )
        self._grow(entry, count)
        entry.seq_len = seq_len

    def fork(self, request: Hashable, new: Hashable, seq_len: int | None = None) -> PageCopy | None:
        """Give a new request the first tokens of a live one.

        Full pages are shared: nobody writes to them again. A last page that is filled in part is the new request's own.

        Args:
            request: The live request.
            new: The new one's name.
            seq_len: Tokens that they have in common; None: all.

        Returns:
            The copy that the caller has to enqueue before anything else is written to either page; None: there is none.
        """
        entry = self._entry(request)
        seq_len = entry.seq_len if seq_len is None else seq_len
        require_int("seq_len", seq_len, 0, entry.seq_len)
        full, rest = divmod(seq_len, self.page_size)
        child = self._enter("new", new, seq_len, entry.pages[:full], full + bool(rest))
        return PageCopy(entry.pages[full], child.pages[full], rest) if rest else None

    def release(self, request: Hashable) -> None:
        """Take a request's row and pages back; pages that others hold stay theirs."""
        entry = self._entry(request)
        del self._live[request]
        self._free_rows.append(entry.row)
        self._updates[entry.row] = {0: -1}
        for page in entry.pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free_pages.append(page)

    def binding(self, requests: Iterable[Hashable]) -> Binding:
        """Rows and lengths of these requests, and all changes of the page table, each handed out once."""
        if not isinstance(requests, Iterable):
            raise TypeError(f"requests: expected names of live requests, given {type(requests).__name__}")
        entries = [self._entry(request) for request in requests]
        updates = [(row, column, page) for row, pages in self._updates.items() for column, page in pages.items()]
        self._updates.clear()
        return Binding([entry.row for entry in entries], [entry.seq_len for entry in entries], updates)

    def _entry(self, request: Hashable) -> _Entry:
        _check_name("request", request)
        if request not in self._live:
            raise KeyError(f"request: expected a live request, given {request!r}")
        return self._live[request]

    def _pages_for(self, seq_len: int, reserve: int) -> int:
        require_int("seq_len", seq_len, 0, self.max_pages * self.page_size)
        require_int("reserve", reserve, 0, self.max_pages * self.page_size - seq_len)
        return cdiv(seq_len + reserve, self.page_size)

    def _enter(self, name: str, request: Hashable, seq_len: int, shared: list[int], count: int) -> _Entry:
        """A new entry of `count` pages, of which the first are shared."""
        _check_name(name, request)
        if request in self._live:
            raise ValueError(f"{name}: expected a name that is not in use, given {request!r}")
        if not self._free_rows:
            raise PoolExhausted(f"no row is free: all {self.max_requests} are taken by live requests")
        self._check_free(count - len(shared))
        self._live[request] = entry = _Entry(self._free_rows.pop(), seq_len, [])
        self._updates[entry.row] = {0: -1}
        for page in shared:
            self._hold(entry, page)
        self._grow(entry, count)
        return entry

    def _check_free(self, pages: int) -> None:
        if pages > len(self._free_pages):
            raise PoolExhausted(f"{pages} pages are needed, {len(self._free_pages)} of {self.num_pages} are free")

    def _grow(self, entry: _Entry, count: int) -> None:
        self._check_free(count - len(entry.pages))
        while len(entry.pages) < count:
            self._hold(entry, self._free_pages.pop())

    def _hold(self, entry: _Entry, page: int) -> None:
        self._updates.setdefault(entry.row, {})[len(entry.pages)] = page
        self._holders[page] += 1
        entry.pages.append(page)


def _check_name(name: str, request: object) -> None:
    try:
        hash(request)
    except TypeError as error:
        raise TypeError(
            f"{name}: expected a hashable name of a request, given {type(request).__name__} ({error})"
        ) from None
