"""The model of notebook 06: SmolLM2, or, where its weights are not installed, a small model with random weights."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import splitkv  # noqa: F401 - before anything imports triton: without a GPU it chooses the interpreter
from splitkv.integrations.llama import Llama

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "data")]
import interpreting  # noqa: E402
import make_smollm2_activations as smollm2  # noqa: E402


class Tokenizer(Protocol):
    def __call__(self, text: str) -> Any: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class RealModel:
    """What the notebook needs of a model.

    Attributes:
        name: Its name.
        tokenizer: From text to ids, and back.
        llama: As the engine runs it.
        greedy: The likeliest `count` tokens after a prompt, without splitkv.
    """

    name: str
    tokenizer: Tokenizer
    llama: Llama
    greedy: Callable[[list[int], int], list[int]]


class Letters:
    """A tokenizer of letters, for a model that has learnt no language."""

    def __call__(self, text: str) -> Any:
        ids = [ord(letter) % 128 for letter in text]
        return type("Encoded", (), {"input_ids": ids})

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def load(device: str, max_len: int) -> RealModel:
    """SmolLM2-135M-Instruct in float32 on a CPU, bfloat16 on a GPU; random weights where it is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars, which a kept output has no use for
            tokenizer, model = smollm2.load(smollm2.find_weights())
    except (ImportError, FileNotFoundError) as error:
        print(f"Random weights, since SmolLM2 is not installed: {error}.")
        llama = random_llama(device, max_len)
        return RealModel("A small random Llama", Letters(), llama, lambda *what: dense_greedy(llama, *what))
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)

    def greedy(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt], device=device)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return RealModel("SmolLM2-135M-Instruct", tokenizer, Llama.from_transformers(model, max_len), greedy)


def random_llama(device: str, max_len: int, layers: int = 2, hidden: int = 48, width: int = 16) -> Llama:
    """A Llama whose tokens depend on all that came before."""
    generator = torch.Generator().manual_seed(1)

    def weight(rows: int, columns: int, gain: float = 2.0) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * gain / columns**0.5).to(device)

    weights = {"model.embed_tokens.weight": weight(128, hidden, 4.0), "lm_head.weight": weight(128, hidden)}
    weights["model.norm.weight"] = torch.ones(hidden, device=device)
    for i in range(layers):
        layer = f"model.layers.{i}"
        sizes = dict(q_proj=(4 * width, hidden), k_proj=(2 * width, hidden), v_proj=(2 * width, hidden))
        sizes |= dict(o_proj=(hidden, 4 * width))
        weights |= {f"{layer}.self_attn.{name}.weight": weight(*size) for name, size in sizes.items()}
        for name, size in dict(gate=(96, hidden), up=(96, hidden), down=(hidden, 96)).items():
            weights[f"{layer}.mlp.{name}_proj.weight"] = weight(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(hidden, device=device)
    angles = torch.outer(torch.arange(max_len), 100.0 ** -(torch.arange(width // 2) / (width // 2))).repeat(1, 2)
    return Llama(weights, 4, 2, 1e-5, angles.cos().to(device), angles.sin().to(device))


def dense_greedy(model: Llama, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens, by PyTorch's attention over the whole sequence."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.dense_logits(tokens).argmax()))
    return tokens[len(prompt) :]


def speed_up_interpreter() -> None:
    """Where kernels are interpreted: half the time, by leaving out what a correct kernel does not need."""
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import interpreter_builder

    interpreting.patch_language_once_per_launch()
    interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
