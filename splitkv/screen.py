"""What the command line prints with: tables, lines and progress, by rich."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

SLOW = 2.0  # seconds after which a progress bar appears


class Screen:
    """Tables, lines and progress on the terminal, by rich.

    Raises:
        SystemExit: rich is not installed; says which extra brings it.
    """

    def __init__(self) -> None:
        try:
            from rich.console import Console
        except ImportError:
            raise SystemExit(
                "splitkv's tables need rich, which is not installed: pip install 'splitkv[bench]'"
            ) from None
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = 120  # a file or a pipe has no width to keep to

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> None:
        """Print a table; columns whose name begins with ">" are numbers, flush right."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
        for column in columns:
            table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
        for row in rows:
            table.add_row(*map(str, row))
        self.line(title, style="bold")
        self.console.print(table)
        if note:
            self.line(note + "\n")

    def line(self, text: str, style: str = "") -> None:
        """Print a line of text."""
        self.console.print(text, style=style, markup=False)

    @contextlib.contextmanager
    def progress(self, steps: int) -> Iterator[Callable[[str], None]]:
        """A progress bar over a number of steps that appears once they have taken two seconds.

        Yields a function that is called with a text before each step.
        """
        from rich.progress import Progress

        bar = Progress(console=self.console, transient=True, disable=not self.console.is_terminal)
        task = bar.add_task("", total=steps)
        begun = False

        def begin(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, advance=1 if begun else 0)
            begun = True

        appear = threading.Timer(SLOW, bar.start)
        appear.daemon = True
        appear.start()
        try:
            yield begin
        finally:
            appear.cancel()
            appear.join()
            bar.stop()


def mebibytes(nbytes: int) -> str:
    """12.3 style text of bytes in MiB."""
    return f"{nbytes / 2**20:.{1 if nbytes < 100 * 2**20 else 0}f}"
