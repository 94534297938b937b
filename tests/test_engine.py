"""The example engine on small random models, against the same model run densely over whole sequences."""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv.integrations.engine import Engine, Request
from splitkv.integrations.llama import Llama

VOCABULARY, HIDDEN, HEADS, KV_HEADS, WIDTH = 61, 48, 4, 2, 16
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7], [9], [2, 7, 1, 8, 2, 8, 1])


def random_llama(device: torch.device, dtype: torch.dtype = torch.float32, layers: int = 2, max_len: int = 64) -> Llama:
    """A Llama whose tokens depend on all that came before."""
    generator = torch.Generator().manual_seed(1)

    def weight(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * gain / math.sqrt(columns)).to(device, dtype)

    weights = {"model.embed_tokens.weight": weight(VOCABULARY, HIDDEN, 4.0)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.{name}.weight": weight(rows, columns, gain)
            for name, rows, columns, gain in (
                ("self_attn.q_proj", HEADS * WIDTH, HIDDEN, 2.0),
                ("self_attn.k_proj", KV_HEADS * WIDTH, HIDDEN, 2.0),
                ("self_attn.v_proj", KV_HEADS * WIDTH, HIDDEN, 2.0),
                ("self_attn.o_proj", HIDDEN, HEADS * WIDTH, 2.0),
                ("mlp.gate_proj", 2 * HIDDEN, HIDDEN, 1.0),
                ("mlp.up_proj", 2 * HIDDEN, HIDDEN, 1.0),
                ("mlp.down_proj", HIDDEN, 2 * HIDDEN, 1.0),
            )
        }
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(HIDDEN, device=device, dtype=dtype)
    weights["model.norm.weight"] = torch.ones(HIDDEN, device=device, dtype=dtype)
    weights["lm_head.weight"] = weight(VOCABULARY, HIDDEN, 3.0)
    angles = torch.outer(torch.arange(max_len), 100.0 ** -(torch.arange(WIDTH // 2) / (WIDTH // 2))).repeat(1, 2)
    return Llama(weights, HEADS, KV_HEADS, 1e-5, angles.cos().to(device), angles.sin().to(device))


def dense_answer(model: Llama, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.dense_logits(tokens).argmax()))
    return tokens[len(prompt) :]


def watch(engine: Engine) -> list[tuple[list[int], int]]:
    """What the engine's steps are from now on: the new tokens of each request in them, and how many steps at once."""
    seen: list[tuple[list[int], int]] = []
    run = engine._run

    def watched(batch: list[Request], counts: list[int], steps: int) -> list[list[int]]:
        seen.append((counts, steps))
        return run(batch, counts, steps)

    engine._run = watched  # type: ignore[method-assign]
    return seen


@pytest.fixture
def model(device: torch.device) -> Llama:
    return random_llama(device)


def test_answers_of_requests_that_join_and_leave(model: Llama) -> None:
    engine = Engine(model, max_len=32, num_pages=24, page_size=4, max_batch_size=3, max_tokens=6, burst=3)
    seen = watch(engine)
    counts = (7, 4, 9, 5)
    requests = [Request(list(prompt), count) for prompt, count in zip(PROMPTS, counts, strict=True)]
    finished: list[Request] = []
    for request in requests[:2]:
        engine.submit(request)
    finished += engine.step()
    finished += engine.step()
    for request in requests[2:]:
        engine.submit(request)
    while engine.busy:
        finished += engine.step()
    wanted = [dense_answer(model, prompt, count) for prompt, count in zip(PROMPTS, counts, strict=True)]
    assert [request.generated for request in requests] == wanted
    assert len(set(wanted[2])) > 3  # a model that says one thing only would show little
    assert set(finished) == set(requests) and len(finished) == len(requests)
    # Chunks beside decode rows in one call, bursts, and all pages back.
    assert any(1 in counts and max(counts) > 1 for counts, _ in seen)
    assert max(steps for _, steps in seen) == 3
    assert all(sum(counts) <= 6 for counts, _ in seen)
    assert engine.pool.num_free_pages == 24


def test_youngest_gives_way_where_pages_run_out(model: Llama) -> None:
    # Each ends with 5 pages, and both begin with 3.
    engine = Engine(
        model, max_len=32, num_pages=8, page_size=4, max_batch_size=2, max_tokens=16, burst=2, split_tokens=32
    )
    seen = watch(engine)
    prompts = (PROMPTS[0], PROMPTS[0][:9])
    answers = engine.generate([Request(list(prompt), 8) for prompt in prompts])
    assert answers == [dense_answer(model, prompt, 8) for prompt in prompts]
    read_again = [counts for counts, _ in seen if max(counts) > len(prompts[1]) and len(counts) == 1]
    assert read_again, "nobody gave way: no prompt came back longer, with what it had generated"
    assert engine.pool.num_free_pages == 8


class Replayed:
    """In the place of a CUDA graph: runs what was run in its capture again."""

    def __init__(self) -> None:
        self.run: Callable[[], None] = lambda: None

    def replay(self) -> None:
        self.run()


def test_graphs_are_captured_once_and_of_batches_rounded_up(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(
        model, max_len=16, num_pages=16, page_size=4, max_batch_size=4, max_tokens=16, burst=2, split_tokens=16
    )
    step, seen = engine._decode_step, []

    @contextmanager
    def capture(graph: Replayed) -> Iterator[None]:
        before = len(seen)
        yield
        graph.run = functools.partial(step, *seen[before])

    def watched(batch: int, greedy: bool) -> None:
        seen.append((batch, greedy))
        step(batch, greedy)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(engine, "_decode_step", watched)
    engine.on_gpu = True
    counts = (3, 5, 4)
    answers = engine.generate([Request(list(PROMPTS[i]), count) for i, count in zip((1, 2, 3), counts, strict=True)])
    assert answers == [dense_answer(model, PROMPTS[i], count) for i, count in zip((1, 2, 3), counts, strict=True)]
    assert list(engine.graphs) == [(4, True), (2, True), (1, True)]
    assert seen == [(4, True)] * 2 + [(2, True)] * 2 + [(1, True)] * 2  # to compile, and in the capture


@pytest.mark.parametrize("split_tokens", [None, 8])
def test_parts(model: Llama, split_tokens: int | None) -> None:
    engine = Engine(
        model, max_len=40, num_pages=16, page_size=4, max_batch_size=2, max_tokens=16, split_tokens=split_tokens
    )
    assert engine.workspace.config.split_tokens == split_tokens
    prompt = PROMPTS[0] * 2
    assert engine.generate([Request(prompt, 3)]) == [dense_answer(model, prompt, 3)]


def test_stop_token_ends_an_answer_within_a_burst(model: Llama) -> None:
    answer = dense_answer(model, PROMPTS[0], 8)
    stop = answer[2]
    first = answer.index(stop)
    engine = Engine(model, max_len=32, num_pages=8, page_size=4, max_batch_size=1, max_tokens=16, burst=8)
    request = Request(list(PROMPTS[0]), 8, stop=frozenset([stop]))
    assert engine.generate([request]) == [answer[: first + 1]]
    assert engine.pool.num_free_pages == 8


def test_sampling_draws_from_the_softmax(model: Llama) -> None:
    rows = 4000
    engine = Engine(model, max_len=8, num_pages=1, page_size=8, max_batch_size=rows, max_tokens=rows)
    x = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2)).to(model.device).expand(rows, -1)
    logits = model.logits(x[:1])[0]
    engine.temperature.fill_(2.0)
    engine.temperature[0] = 0.0
    engine._sample(x, greedy=False)
    assert engine.sampled[0] == logits.argmax()
    drawn = engine.sampled[1:].bincount(minlength=VOCABULARY).double() / (rows - 1)
    expected = (logits.double() / 2).softmax(-1)
    # Half the summed distance of 60 frequencies from their probabilities: 0.03 on average, at most 0.06 by far.
    assert (drawn - expected).abs().sum() / 2 < 0.06
    engine._sample(x, greedy=True)
    assert (engine.sampled == logits.argmax()).all()


def test_sampled_and_greedy_requests_in_one_step(model: Llama) -> None:
    engine = Engine(model, max_len=32, num_pages=16, page_size=4, max_batch_size=2, max_tokens=16, split_tokens=32)
    answers = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        requests = [Request(list(PROMPTS[2]), 4), Request(list(PROMPTS[1]), 4, temperature=1.5)]
        answers.append(engine.generate(requests))
    assert answers[0][0] == answers[2][0] == dense_answer(model, PROMPTS[2], 4)
    assert answers[0][1] == answers[1][1] != answers[2][1]


@pytest.mark.parametrize(
    ("request_", "given"),
    [(Request([], 1), "given 0 and 1"), (Request([1], 0), "given 1 and 0"), (Request([1] * 20, 13), "given 20 and 13")],
    ids=["empty", "no answer", "too long"],
)
def test_requests_that_cannot_run_are_refused(model: Llama, request_: Request, given: str) -> None:
    engine = Engine(model, max_len=32, num_pages=16, page_size=4, max_batch_size=1, max_tokens=8)
    with pytest.raises(ValueError, match=f"request: .*{given}"):
        engine.submit(request_)
    assert not engine.busy


@pytest.mark.parametrize(
    "fields",
    [
        dict(prompt=(1, 2)),
        dict(prompt=torch.tensor([1, 2])),
        dict(prompt="once"),
        dict(prompt=[1, 2.0]),
        dict(prompt=[1, "a"]),
        dict(prompt=[torch.tensor(1)]),
        dict(prompt=[[1, 2]]),
        dict(max_new_tokens=2.5),
        dict(max_new_tokens=None),
        dict(temperature=None),
        dict(temperature="0"),
        dict(stop=None),
        dict(stop=2),
        dict(stop="</s>"),
        [1, 2],
    ],
    ids=str,
)
def test_fields_of_other_types_are_refused(fields: Any) -> None:
    """Before they meet other requests in a step."""
    good, bad = dict(prompt=[1], max_new_tokens=4), fields
    if isinstance(fields, dict):
        bad = Request(**good | fields)
    engine = Engine(random_llama(torch.device("cpu")), max_len=32, num_pages=16, page_size=4, max_batch_size=1)
    for run in (engine.submit, lambda request: engine.generate([Request(**good), request])):
        with pytest.raises((TypeError, ValueError), match=r"^request: expected .*, given "):
            run(bad)
        assert not engine.busy


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"max_tokens": 2}, "max_tokens: expected at least 3"), ({"max_len": 65}, "max_len: expected at most 64")],
)
def test_sizes_that_do_not_fit_are_refused(model: Llama, changes: dict[str, Any], message: str) -> None:
    sizes = {"max_len": 32, "num_pages": 4, "max_batch_size": 3, "max_tokens": 8} | changes
    with pytest.raises(ValueError, match=message):
        Engine(model, **sizes)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:::torch")  # PyTorch's compiler warns of much
@pytest.mark.parametrize("compiled", [False, True], ids=["graphs", "compiled"])
def test_graphs_give_what_the_model_gives(device: torch.device, compiled: bool) -> None:
    model = random_llama(device, torch.bfloat16)
    engine = Engine(model, max_len=64, num_pages=64, page_size=4, max_batch_size=4, max_tokens=8, compile=compiled)
    requests = [Request(list(prompt), 24) for prompt in PROMPTS]
    engine.generate(requests)
    assert engine.graphs and all(len(request.generated) == 24 for request in requests)
    # Each token is the likeliest, or as likely up to rounding, after those that the engine itself chose.
    for request in requests:
        for i, token in enumerate(request.generated):
            logits = model.dense_logits(request.prompt + request.generated[:i])
            assert logits.max() - logits[token] <= 0.02 * logits.abs().max()


@pytest.mark.gpu
def test_sampling_in_a_graph_draws_anew_each_time(device: torch.device) -> None:
    engine = Engine(random_llama(device), max_len=64, num_pages=64, page_size=4, max_batch_size=4, max_tokens=8)
    answers = engine.generate([Request(list(PROMPTS[0]), 30, temperature=2.0) for _ in range(4)])
    assert len({tuple(answer) for answer in answers}) == 4


@pytest.mark.parametrize("split_tokens", [16, None])
def test_steps_have_one_form_where_parts_are_fixed(monkeypatch, split_tokens):
    """Bits of attention may depend on whether a call is ragged, so that with fixed parts decode steps are as others."""
    forms = []
    decode = splitkv.decode

    def noted(*arguments, qo_indptr=None, **more):
        forms.append(qo_indptr is not None)
        return decode(*arguments, qo_indptr=qo_indptr, **more)

    model = random_llama(torch.device("cpu"))
    engine = Engine(model, max_len=64, num_pages=32, page_size=4, max_batch_size=4, burst=2, split_tokens=split_tokens)
    monkeypatch.setattr(splitkv, "decode", noted)
    answers = engine.generate([Request(list(prompt), 5) for prompt in PROMPTS[:3]])
    assert answers == [dense_answer(model, prompt, 5) for prompt in PROMPTS[:3]]
    assert all(forms) if split_tokens else not all(forms)


def test_a_request_goes_on_where_it_stopped_and_is_refused_where_it_cannot():
    model = random_llama(torch.device("cpu"))
    engine = Engine(model, max_len=64, num_pages=32, page_size=4, max_batch_size=4, burst=2)
    request = Request(list(PROMPTS[0]), 3)
    engine.generate([request])
    engine.generate([Request(list(PROMPTS[1]), 5)])  # takes its pages
    with pytest.raises(ValueError, match=r"^request: expected one that is neither finished nor queued"):
        engine.submit(request)
    request.max_new_tokens = 6
    assert engine.generate([request, request]) == [dense_answer(model, PROMPTS[0], 6)] * 2
    queued = engine.submit(Request([5], 1))
    with pytest.raises(ValueError, match=r"^request: expected one that is neither finished nor queued"):
        engine.submit(queued)
    good, bad = Request([1, 2], 2), Request([1, VOCABULARY], 2)
    with pytest.raises(ValueError, match=rf"^request: expected tokens of 0…{VOCABULARY - 1}, given {VOCABULARY}$"):
        engine.generate([good, bad])
    assert engine.generate([good]) == [dense_answer(model, [1, 2], 2)] and queued.finished and not engine.busy


@pytest.mark.parametrize("name", ["max_len", "num_pages", "page_size", "max_batch_size", "burst", "split_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_sizes_of_an_engine(name, value):
    sizes = dict(max_len=64, num_pages=32, page_size=4, max_batch_size=4, burst=2) | {name: value}
    with pytest.raises(ValueError, match=rf"^{name}: expected an integer ≥ 1, given {re.escape(str(value))}$"):
        Engine(random_llama(torch.device("cpu")), **sizes)


@pytest.mark.parametrize("fault", ["head", "rope", "bias"])
def test_models_that_the_engine_would_get_wrong_are_refused(fault):
    config = SimpleNamespace(model_type="llama", attention_bias=fault == "bias", mlp_bias=False, hidden_act="silu")
    inner = SimpleNamespace(rotary_emb=SimpleNamespace(rope_type="dynamic" if fault == "rope" else "default"))
    model = SimpleNamespace(config=config, model=inner, lm_head=None if fault == "head" else object())
    with pytest.raises(ValueError, match=r"^model: expected (a Llama|rotary)"):
        Llama.from_transformers(model, 64)
