"""Makes Triton's interpreter faster for tests, without a change of what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch_language_once_per_launch() -> None:
    """Let the interpreter replace the functions of triton.language once per launch, and not at every call within it.

    It looks through the whole language for what there is to replace whenever one device function calls another, and
    finds nothing after the first time: about half of all time that kernels take here.
    """
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    language = interpreter.tl
    visible: dict[int, frozenset[str]] = {}  # by the globals of a device function's module
    patched: set[str] = set()  # in the launch that runs

    def patch_once(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) not in visible:
            modules = [module for module in (language, language.core) if any(v is module for v in names.values())]
            visible[id(names)] = frozenset(module.__name__ for module in modules)
        if patched and visible[id(names)] <= patched:
            return None  # of a call within a launch: nobody asks what there is to restore
        scope = patch(fn)
        if not patched:
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        patched.update(visible[id(names)])
        return scope

    interpreter._patch_lang = patch_once
