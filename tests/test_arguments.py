"""ARGUMENTS.md has every public argument, with its default, and calls refuse what it says that they refuse."""

import dataclasses
import doctest
import inspect
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import splitkv
from splitkv import distributed, masks, reference
from splitkv.integrations import engine
from splitkv.integrations import transformers as integration
from splitkv.kv import KVView
from splitkv.workspace import aligned_bytes

TEXT = (Path(__file__).parents[1] / "ARGUMENTS.md").read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Row:
    """One argument of a call, as the page has it."""

    name: str
    dtype: str
    default: str
    refused: str


def read_tables() -> dict[str, list[Row]]:
    tables: dict[str, list[Row]] = {}
    call = ""
    for line in TEXT.splitlines():
        if line.startswith("### "):
            call = line.removeprefix("### ")
            tables[call] = []
        elif line.startswith("| `"):
            names, _, dtype, default, _, refused = (cell.strip() for cell in line.strip("|").split("|"))
            tables[call] += [Row(name, dtype, default, refused) for name in re.findall(r"`([^`]+)`", names)]
    return tables


TABLES = read_tables()
# Made by the library, not by its users.
RECORDS = (splitkv.Section, distributed.Views)
INTERNAL = (
    "Schedule.of_spec",
    "Workspace.of_parts",
    "Workspace.recall",
    "Workspace.remember",
    "distributed.Exchange.views",
)


def methods(owner: type, name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    for key in vars(owner):
        method = getattr(owner, key)
        if key.startswith("_") or not callable(method):
            continue
        parameters = [p for p in inspect.signature(method).parameters if p != "self"]
        if parameters:
            yield f"{name}.{key}", method


def public_calls() -> dict[str, Callable[..., Any]]:
    """Every public function, constructor and method that takes arguments, by its name on the page."""
    calls: dict[str, Callable[..., Any]] = dict(methods(KVView, "KVView"))
    for name in ("KVView.check_batch", "KVView.check_values", "KVView.check_shared", "KVView.lengths"):
        del calls[name]  # what decode asks a view
    scopes = [("", splitkv, splitkv.__all__), ("masks.", masks, masks.__all__)]
    own = [
        name for name, value in vars(distributed).items() if getattr(value, "__module__", "") == distributed.__name__
    ]
    scopes.append(("distributed.", distributed, [name for name in own if not name.startswith("_")]))
    for prefix, module, names in scopes:
        for name in names:
            value = getattr(module, name)
            if inspect.isclass(value) and not issubclass(value, (Exception, *RECORDS)):
                if not hasattr(value, "allocate"):
                    calls[prefix + name] = value
                calls.update(methods(value, prefix + name))
            elif inspect.isfunction(value):
                calls[prefix + name] = value
    for name in INTERNAL:
        del calls[name]
    calls["reference.decode_with_lse"] = reference.decode_with_lse
    calls["integrations.transformers.register"] = integration.register
    calls["integrations.engine.Request"] = engine.Request
    calls["integrations.engine.Engine"] = engine.Engine
    calls.update(methods(engine.Engine, "integrations.engine.Engine"))
    return calls


CALLS = public_calls()


def default_text(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return "–"
    if inspect.isfunction(parameter.default):
        return f"`{parameter.default.__module__.removeprefix('splitkv.')}.{parameter.default.__name__}`"
    if repr(parameter.default) == "<factory>":
        return "`[]`"
    if parameter.default == math.e:
        return "`math.e`"
    return f"`{parameter.default!r}`".replace("'", '"')


def test_the_page_lists_the_public_calls_and_no_others() -> None:
    assert sorted(TABLES) == sorted(CALLS)


@pytest.mark.parametrize("call", sorted(set(TABLES) & set(CALLS)))
def test_names_and_defaults_are_those_of_the_call(call: str) -> None:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = [p for p in inspect.signature(CALLS[call]).parameters.values() if p.name != "self"]
    expected = {stars.get(p.kind, "") + p.name: default_text(p) for p in parameters}
    assert {row.name: row.default for row in TABLES[call]} == expected
    assert len(TABLES[call]) == len(expected)


# Calls that go through, as keyword arguments, made on the default device; each refusal changes one of these.

CONFIG = splitkv.WorkspaceConfig(2, num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)


def here() -> torch.device:
    """Where tensors are made now."""
    return torch.empty(0).device


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged() -> dict[str, Any]:
    return dict(
        k_cache=torch.zeros(4, 8, 2, 16), v_cache=torch.zeros(4, 8, 2, 16),
        page_table=ints([[0, 1], [2, 3]]), seq_lens=ints([9, 16]),
    )  # fmt: skip


def contiguous() -> splitkv.ContiguousKV:
    return splitkv.ContiguousKV(torch.zeros(2, 16, 2, 16), torch.zeros(2, 16, 2, 16), ints([9, 16]))


def decoding() -> dict[str, Any]:
    return dict(q=torch.zeros(2, 4, 16), kv=contiguous(), workspace=splitkv.Workspace.allocate(CONFIG, here()))


def step() -> splitkv.StepState:
    config = splitkv.StepConfig(4, max_total_q=8, max_mask_len=8)
    return splitkv.StepState.allocate(config, torch.zeros(4, 4, dtype=torch.int32), page_size=8, device=here())


def pool() -> splitkv.PagePool:
    made = splitkv.PagePool(8, 4, 4, 4)
    made.admit("live", 5)
    return made


def mask_of(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def sharing() -> dict[str, Any]:
    return dict(
        q=torch.zeros(2, 4, 16), kv=splitkv.PagedKV(**paged()), workspace=splitkv.Workspace.allocate(CONFIG, here()),
        group_ids=ints([0, 0]), prefix_lens=ints([8, 8]),
    )  # fmt: skip


GOOD: dict[str, Callable[[], tuple[Callable[..., Any], dict[str, Any]]]] = {
    "WorkspaceConfig": lambda: (
        splitkv.WorkspaceConfig, dict(max_batch_size=2, num_q_heads=4, num_kv_heads=2, head_dim=16)
    ),
    "Workspace.allocate": lambda: (splitkv.Workspace.allocate, dict(config=CONFIG, device=here())),
    "Workspace.from_buffer": lambda: (
        splitkv.Workspace.from_buffer, dict(config=CONFIG, buffer=aligned_bytes(CONFIG.nbytes, here()))
    ),
    "PagedKV": lambda: (splitkv.PagedKV, paged()),
    "PagedKV.from_csr": lambda: (
        splitkv.PagedKV.from_csr,
        dict(
            k_cache=torch.zeros(4, 8, 2, 16), v_cache=torch.zeros(4, 8, 2, 16), page_indptr=ints([0, 2, 4]),
            page_indices=ints([0, 1, 2, 3]), last_page_len=ints([1, 8]),
        ),
    ),
    "ContiguousKV": lambda: (
        splitkv.ContiguousKV,
        dict(k=torch.zeros(2, 16, 2, 16), v=torch.zeros(2, 16, 2, 16), seq_lens=ints([9, 16])),
    ),
    "RaggedKV": lambda: (
        splitkv.RaggedKV, dict(k=torch.zeros(25, 2, 16), v=torch.zeros(25, 2, 16), kv_indptr=ints([0, 9, 25]))
    ),
    "LatentKV": lambda: (
        splitkv.LatentKV,
        dict(
            cache=torch.zeros(4, 8, 576), page_table=ints([[0, 1], [2, 3]]), seq_lens=ints([9, 16])
        ),
    ),
    "KVView.shard": lambda: (contiguous().shard, dict(seq_lens=ints([27, 48]), rank=0, size=3)),
    "decode": lambda: (splitkv.decode, decoding()),
    "decode_with_lse": lambda: (splitkv.decode_with_lse, decoding()),
    "decode_shared_prefix": lambda: (splitkv.decode_shared_prefix, sharing()),
    "merge": lambda: (splitkv.merge, dict(outs=torch.zeros(6, 4, 16), lses=torch.zeros(6, 4), indptr=ints([0, 2, 6]))),
    "append_kv": lambda: (
        splitkv.append_kv,
        dict(k_new=torch.zeros(2, 2, 16), v_new=torch.zeros(2, 2, 16), kv=contiguous(), slots=ints([3, 20])),
    ),
    "move_kv": lambda: (
        splitkv.move_kv, dict(kv=contiguous(), src_slots=ints([3]), dst_slots=ints([2]))
    ),
    "masks.validity_mask": lambda: (masks.validity_mask, dict(out=mask_of(2, 9), seq_lens=ints([3, 9]))),
    "masks.attention_mask": lambda: (masks.attention_mask, dict(out=mask_of(2, 3, 9), seq_lens=ints([3, 9]))),
    "masks.ragged_mask": lambda: (
        masks.ragged_mask, dict(out=mask_of(4, 9), qo_indptr=ints([0, 1, 4]), seq_lens=ints([3, 9]))
    ),
    "masks.position_mask": lambda: (masks.position_mask, dict(out=mask_of(2, 1, 9), position_ids=torch.tensor([3, 8]))),
    "masks.pack_tree_mask": lambda: (
        masks.pack_tree_mask, dict(mask=mask_of(2, 5, 5), out=mask_of(2, 5, 1, dtype=torch.int32))
    ),
    "masks.tree_mask_from_parents": lambda: (
        masks.tree_mask_from_parents,
        dict(parents=torch.full((2, 5), -1), out=mask_of(2, 5, 1, dtype=torch.int32)),
    ),
    "masks.validity_mask_shape": lambda: (masks.validity_mask_shape, dict(batch=2, max_len=9)),
    "masks.attention_mask_shape": lambda: (masks.attention_mask_shape, dict(batch=2, q_len=3, max_len=9)),
    "masks.ragged_mask_shape": lambda: (masks.ragged_mask_shape, dict(total_q=2, max_len=9)),
    "masks.position_mask_shape": lambda: (masks.position_mask_shape, dict(batch=2, total_len=9)),
    "masks.tree_mask_shape": lambda: (masks.tree_mask_shape, dict(batch=2, max_q_len=9)),
    "Schedule.allocate": lambda: (splitkv.Schedule.allocate, dict(config=CONFIG, device=here())),
    "Schedule.update": lambda: (splitkv.Schedule.allocate(CONFIG, here()).update, dict(kv=contiguous())),
    "StepConfig": lambda: (splitkv.StepConfig, dict(max_batch_size=4)),
    "StepState.allocate": lambda: (
        splitkv.StepState.allocate,
        dict(config=splitkv.StepConfig(2), page_table=ints([[0, 1]]), page_size=8, device=here()),
    ),
    "StepState.from_buffer": lambda: (
        splitkv.StepState.from_buffer,
        dict(
            config=splitkv.StepConfig(2), page_table=ints([[0, 1]]), page_size=8,
            buffer=aligned_bytes(splitkv.StepConfig(2).nbytes, here()),
        ),
    ),
    "StepState.bind": lambda: (step().bind, dict(rows=[0, 1], seq_lens=[3, 4])),
    "StepState.advance": lambda: (step().advance, dict(num_new=ints([1, 1]))),
    "StepState.fill_input_ids": lambda: (step().fill_input_ids, dict(ids=[1, 2])),
    "StepState.fill_input_ids_from_device": lambda: (
        step().fill_input_ids_from_device, dict(tokens=torch.tensor([1, 2]))
    ),
    "StepState.decode_mask": lambda: (step().decode_mask, dict(position_ids=torch.tensor([3]), total_len=8)),
    "PagePool": lambda: (splitkv.PagePool, dict(num_pages=8, page_size=4, max_requests=4, max_pages=4)),
    "PagePool.admit": lambda: (pool().admit, dict(request="new", seq_len=3)),
    "PagePool.extend": lambda: (pool().extend, dict(request="live", seq_len=6)),
    "PagePool.fork": lambda: (pool().fork, dict(request="live", new="new")),
    "distributed.round_robin_lens": lambda: (
        distributed.round_robin_lens, dict(seq_lens=ints([3, 9]), rank=0, size=3)
    ),
}  # fmt: skip
"""{call: what to call, and arguments that it takes}."""

TENSORS = ("int32", "int64", "uint8", "bool", "cache", "config", "float32", "any integer")


def refusals() -> Iterator[tuple[str, str, str]]:
    """(call, argument, an expression whose value it refuses)."""
    for call, rows in TABLES.items():
        if call not in GOOD:
            continue
        for row in rows:
            for code in re.findall(r"`([^`]+)`", row.refused):
                yield call, row.name, code


def tensor_arguments() -> Iterator[tuple[str, str]]:
    for call, rows in TABLES.items():
        for row in rows:
            kinds = [kind.strip() for kind in row.dtype.split(",")]
            if call in GOOD and any(kind in TENSORS or kind.startswith("as ") for kind in kinds):
                is_a_flag = kinds == ["bool"] and row.name in ("causal", "by_heads")
                if not is_a_flag and call != "WorkspaceConfig" and call != "distributed.round_robin_lens":
                    yield call, row.name


@pytest.mark.parametrize("call", GOOD)
def test_what_is_changed_below_goes_through(call: str, device: torch.device) -> None:
    with device:
        function, arguments = GOOD[call]()
    function(**arguments)


@pytest.mark.parametrize(("call", "name", "code"), list(refusals()))
def test_what_the_page_says_is_refused(call: str, name: str, code: str, device: torch.device) -> None:
    with device:
        function, arguments = GOOD[call]()
    with pytest.raises((TypeError, ValueError), match=rf"^{name}( \(\w+\))?: expected "):
        function(**{**arguments, name: eval(code)})


@pytest.mark.parametrize(("call", "name"), list(tensor_arguments()))
def test_tensors_of_another_dtype_or_rank_are_refused(call: str, name: str, device: torch.device) -> None:
    with device:
        function, arguments = GOOD[call]()
    given = arguments.get(name)
    tensor = given if isinstance(given, torch.Tensor) else torch.zeros(2, dtype=torch.int32, device=device)
    wrong = [tensor.to(torch.complex64), tensor[(None,) * 4]]
    for value in wrong:
        with pytest.raises((TypeError, ValueError), match=rf"^{name}( \(\w+\))?: expected "):
            function(**{**arguments, name: value})


def test_most_of_the_page_is_tried() -> None:
    """A page whose tables could not be read any more would make the tests above pass by doing nothing."""
    assert len(list(refusals())) > 90 and len(list(tensor_arguments())) > 60


# Those of the integrations would need a model.
@pytest.mark.parametrize("call", sorted(call for call in CALLS if not call.startswith("integrations.")))
def test_every_call_has_an_example(call: str) -> None:
    """In its own docstring, or calling it in that of its class. All of them run as doctests."""
    owner, _, method = call.rpartition(".")
    if any(example.source for example in examples(CALLS[call])):
        return
    holder: Any = splitkv
    for name in owner.split("."):
        holder = getattr(holder, name)
    assert any(f".{method}(" in example.source for example in examples(holder))


def examples(of: object) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(of) or "")
