"""attn_implementation="splitkv" on small random models of transformers, against their own eager attention."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv.integrations import transformers as integration

transformers = pytest.importorskip("transformers", reason="the extra splitkv[transformers] is not installed")

SIZES: dict[str, Any] = dict(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
WINDOW = 5
# The argument that models take a cache by: another name since 5.18 or so.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"
MODELS = {
    "llama": ("LlamaConfig", {}),
    "window": ("MistralConfig", {"sliding_window": WINDOW}),
    # One layer of each kind, a scale of its own, and a cap that is reached.
    "softcap": (
        "Gemma2Config",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    ),
    "sinks": ("GptOssConfig", {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    # Unsplit, calls are cheap under the interpreter.
    integration.register(num_splits=1)
    yield
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop("splitkv")


def small_model(name: str, device: torch.device, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with random weights whose attention is not even."""
    kind, sizes = MODELS[name]
    config = getattr(transformers, kind)(**SIZES | sizes | changes)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation("eager")  # others have dtypes and GPUs of their own
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in parameter_name:
                gain = 1.0 if "sinks" in parameter_name else 0.3
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain)
    return model.eval().to(device, dtype)


def padded_batch(device: torch.device) -> dict[str, Tensor]:
    """Prompts of 9 and 5 tokens, padded on the left."""
    ids = torch.randint(3, SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def generated(model: Any, implementation: str, inputs: dict[str, Tensor], tokens: int = 5, **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    chosen = dict(do_sample=False, return_dict_in_generate=True, output_logits=True, disable_compile=True) | options
    return model.generate(**inputs, max_new_tokens=tokens, **chosen)


def assert_same_answers(got: Any, wanted: Any) -> None:
    assert got.sequences.tolist() == wanted.sequences.tolist()
    # float32 with sums in another order, through two layers.
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate(device: torch.device, name: str, cache: str | None) -> None:
    model, inputs = small_model(name, device), padded_batch(device)
    wanted = generated(model, "eager", inputs, cache_implementation=cache)
    assert_same_answers(generated(model, "splitkv", inputs, cache_implementation=cache), wanted)
    assert len(set(wanted.sequences[:, 9:].flatten().tolist())) > 1


def test_from_pretrained(device: torch.device, tmp_path: Path) -> None:
    model, inputs = small_model("llama", device), padded_batch(device)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="splitkv").to(device)
    assert loaded.config._attn_implementation == "splitkv"
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits[:, -1], model(**inputs).logits[:, -1], rtol=1e-4, atol=1e-4)


def test_beams(device: torch.device) -> None:
    """Beams reorder the cache between steps."""
    model, inputs = small_model("llama", device), padded_batch(device)
    wanted, got = (
        generated(model, implementation, inputs, tokens=3, num_beams=2) for implementation in ("eager", "splitkv")
    )
    assert got.sequences.tolist() == wanted.sequences.tolist()


@pytest.mark.parametrize(
    ("name", "change"),
    [("window", {"sliding_window": 64}), ("softcap", {"attn_logit_softcapping": None})],
    ids=["window", "softcap"],
)
def test_rules_of_the_small_models_matter(device: torch.device, name: str, change: dict[str, Any]) -> None:
    inputs = padded_batch(device)
    with torch.no_grad():
        ours, other = (small_model(name, device, **changes)(**inputs).logits[:, -1] for changes in ({}, change))
    assert (ours - other).abs().max() > 0.1


def test_splits_and_default_schedule(device: torch.device) -> None:
    model, inputs = small_model("llama", device), padded_batch(device)
    wanted = generated(model, "eager", inputs, tokens=2)
    for name, num_splits in (("splitkv-three", 3), ("splitkv-any", None)):
        integration.register(name, num_splits=num_splits)
        assert_same_answers(generated(model, name, inputs, tokens=2), wanted)


def test_several_tokens_after_a_cache(device: torch.device) -> None:
    """Chunks of a prompt: query tokens behind keys that are there already, in full and sliding layers."""
    model, inputs = small_model("softcap", device), padded_batch(device)
    whole = {}
    for implementation in ("eager", "splitkv"):
        model.set_attn_implementation(implementation)
        for cache in (
            transformers.DynamicCache(config=model.config),
            transformers.StaticCache(config=model.config, max_cache_len=12),
        ):
            logits = []
            with torch.no_grad():
                for columns in (slice(0, 4), slice(4, 7), slice(7, 9)):
                    ids, mask = inputs["input_ids"][:, columns], inputs["attention_mask"][:, : columns.stop]
                    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, columns]
                    out = model(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
                    logits.append(out.logits[:, -1])
            whole[implementation, type(cache).__name__] = torch.stack(logits[1:])
    first = whole["eager", "DynamicCache"]
    for logits in whole.values():
        torch.testing.assert_close(logits[-1], first[-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[0, 0], first[0, 0], rtol=1e-4, atol=1e-4)  # row 1 has few tokens by then


def test_attention_reads_the_caches_own_tensors(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = small_model("llama", device), padded_batch(device)
    model.set_attn_implementation("splitkv")
    seen: list[tuple[Tensor, Tensor]] = []
    decode = splitkv.decode

    def watched(q: Tensor, kv: Any, *args: Any, **rules: Any) -> Tensor:
        seen.append((kv.k, kv.v))
        return decode(q, kv, *args, **rules)

    monkeypatch.setattr(splitkv, "decode", watched)
    for cache in (transformers.DynamicCache(), transformers.StaticCache(config=model.config, max_cache_len=12)):
        with torch.no_grad():
            model(**inputs, **{CACHE: cache})
            mask = torch.cat((inputs["attention_mask"], inputs["attention_mask"][:, -1:]), 1)
            seen.clear()
            model(inputs["input_ids"][:, -1:], attention_mask=mask, **{CACHE: cache})
        assert len(seen) == 2
        for (k, v), layer in zip(seen, cache.layers, strict=True):
            assert (k.data_ptr(), v.data_ptr()) == (layer.keys.data_ptr(), layer.values.data_ptr())


def test_a_step_compiles_whole(device: torch.device) -> None:
    """The decode step that generate compiles over a static cache, whose mask is made outside of the graph."""
    model, inputs = small_model("softcap", device), padded_batch(device)
    model.set_attn_implementation("splitkv")
    ids, mask = inputs["input_ids"], torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    logits = []
    for backend in (None, "aot_eager"):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        with torch.inference_mode():
            model(**inputs, **{CACHE: cache})
            bounds = transformers.masking_utils.create_masks_for_generate(
                config=model.config, inputs_embeds=torch.empty(2, 1, 0, device=device), attention_mask=mask,
                **{CACHE: cache},
            )  # fmt: skip
            run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
            positions = mask.sum(1, keepdim=True) - 1
            logits.append(
                run(ids[:, -1:], attention_mask=bounds, position_ids=positions, **{CACHE: cache}).logits.clone()
            )
    torch.testing.assert_close(*logits, rtol=0, atol=0)


def test_layers_without_masks(device: torch.device) -> None:
    """A layer that transformers makes no mask for sees all keys, or what lies behind each token."""
    module = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 6, 16, device=device)
    for causal in (False, True):
        out, _ = integration.attention(module, q, k, v, None, is_causal=causal, num_splits=1)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"attention_mask: .* given None for 3 query tokens of 6"):
        integration.attention(module, q[:, :, :3], k, v, None, is_causal=True)


# What is refused.


def test_masks_of_ones_own_are_refused(device: torch.device) -> None:
    model, inputs = small_model("llama", device), padded_batch(device)
    model.set_attn_implementation("splitkv")
    for mask in (torch.ones(2, 1, 9, 9, dtype=torch.bool, device=device), torch.zeros(2, 1, 9, 9, device=device)):
        with torch.no_grad(), pytest.raises(ValueError, match=r"attention_mask: .*\[2, 1, 9, 9\].*'sdpa' can"):
            model(inputs["input_ids"], attention_mask=mask)


@pytest.mark.parametrize("hidden", [slice(7, 9), slice(4, 6)], ids=["right", "hole"])
def test_padding_elsewhere_than_left_is_refused(device: torch.device, hidden: slice) -> None:
    model, inputs = small_model("llama", device), padded_batch(device)
    model.set_attn_implementation("splitkv")
    mask = torch.ones_like(inputs["attention_mask"])
    mask[1, hidden] = 0
    with torch.no_grad(), pytest.raises(ValueError, match=r"attention_mask: .*, given a hidden token .* in row 1$"):
        model(inputs["input_ids"], attention_mask=mask)
    with torch.no_grad(), pytest.raises(ValueError, match=r"attention_mask: .* 9 tokens, given fewer columns \(7\)$"):
        model(inputs["input_ids"], attention_mask=mask[:, :7], **{CACHE: transformers.DynamicCache()})


def test_chunked_attention_is_refused(device: torch.device) -> None:
    config = transformers.Llama4TextConfig(
        **SIZES, attention_chunk_size=4, num_local_experts=1, intermediate_size_mlp=32, num_experts_per_tok=1
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="splitkv").eval().to(device)
    with torch.no_grad(), pytest.raises(ValueError, match="mask: expected causal attention"):
        model(padded_batch(device)["input_ids"])


def test_bidirectional_attention_is_refused(device: torch.device) -> None:
    model, inputs = small_model("llama", device), padded_batch(device)
    model.set_attn_implementation("splitkv")
    model.config.is_causal = False
    with torch.no_grad(), pytest.raises(ValueError, match=r"mask: expected causal attention.*bidirectional"):
        model(**inputs)


def test_packed_sequences_are_refused(device: torch.device) -> None:
    model, inputs = small_model("llama", device), padded_batch(device)
    model.set_attn_implementation("splitkv")
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]], device=device)
    with torch.no_grad(), pytest.raises(ValueError, match="mask: expected causal attention"):
        model(inputs["input_ids"][:1], position_ids=positions, use_cache=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.1}, "dropout: expected 0"),
        ({"position_bias": torch.zeros(1)}, "position_bias: expected it left out"),
        ({"output_attentions": True}, "output_attentions: expected it left out"),
        ({"sliding_window": 4}, "attention_mask: .*sliding_window=4"),
        ({"softcap": 0.0}, "softcap: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_are_not_honoured_are_refused(
    device: torch.device, arguments: dict[str, Any], message: str
) -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 16, device=device)
    with pytest.raises(ValueError, match=message):
        integration.attention(torch.nn.Module(), q, k, v, None, **arguments)


def test_windows_that_disagree_are_refused(device: torch.device) -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 16, device=device)
    mask = integration.key_bounds(1, 6, 6, mask_function=transformers.masking_utils.causal_mask_function, device=device)
    with pytest.raises(ValueError, match="sliding_window: expected None and causal"):
        integration.attention(torch.nn.Module(), q, k, v, mask, sliding_window=4)
    with pytest.raises(ValueError, match="is_causal=False"):
        integration.attention(torch.nn.Module(), q, k, v, mask, is_causal=False)


def test_training_is_refused(device: torch.device) -> None:
    model, inputs = small_model("llama", device), padded_batch(device)
    model.set_attn_implementation("splitkv")
    with pytest.raises(ValueError, match="requires grad"):
        model(**inputs)


# What is there.


def test_versions_out_of_range_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("4.57.1", "5.16.3", "5.25.0", "6.0"):
        monkeypatch.setattr("transformers.__version__", version)  # by name: transformers replaces its own module
        with pytest.raises(ImportError, match=rf"transformers: expected >=5.17,<5.25, given {re.escape(version)}"):
            integration.register("splitkv-other")


def test_missing_transformers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r">=5.17,<5.25: pip install 'splitkv\[transformers\]'"):
        integration.register()


def test_the_extra_names_the_range_that_is_checked() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    (first, last) = integration.SUPPORTED
    assert f'transformers = ["transformers>={first[0]}.{first[1]},<{last[0]}.{last[1]}"]' in text


@pytest.mark.parametrize("name", ["", "eager", "sdpa", "paged|splitkv"])
def test_names_of_others_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name: expected one that no other"):
        integration.register(name)


def test_numbers_of_splits_are_checked() -> None:
    for number in (0, 4097):
        with pytest.raises(ValueError, match=rf"^num_splits: expected an integer in 1…4096, given {number}"):
            integration.register(num_splits=number)


@pytest.mark.gpu
def test_a_step_over_a_static_cache_in_a_graph(device: torch.device) -> None:
    """Replays see the cache and the mask grow: nothing of the host's is in them."""
    integration.register("splitkv-gpu")
    model, inputs = small_model("llama", device, torch.bfloat16), padded_batch(device)
    columns = inputs["input_ids"].shape[1]
    logits = {}
    for implementation in ("eager", "splitkv-gpu"):
        model.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        mask = torch.zeros(2, 32, dtype=torch.int64, device=device)
        mask[:, :columns] = inputs["attention_mask"]
        positions = inputs["attention_mask"].sum(1, keepdim=True)
        ids, found, graph = inputs["input_ids"][:, -1:], [], None
        with torch.inference_mode():
            model(**inputs, **{CACHE: cache})
            for i in range(5):
                mask[:, columns + i] = 1
                if graph is None:
                    out = model(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache}).logits
                else:
                    graph.replay()
                found.append(out[:, -1].float().clone())
                positions += 1
                if implementation == "splitkv-gpu" and i == 1:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        out = model(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache}).logits
        logits[implementation] = torch.stack(found)
    largest = logits["eager"].abs().max()
    assert (logits["splitkv-gpu"] - logits["eager"]).abs().max() < 0.05 * largest
    assert (logits["eager"][2] - logits["eager"][3]).abs().max() > 0.05 * largest


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:::torch")  # PyTorch's compiler warns of much
def test_generate_compiles_around_attention(device: torch.device) -> None:
    """generate compiles a static cache's decode step by itself."""
    integration.register("splitkv-gpu")
    model, inputs = small_model("llama", device), padded_batch(device)
    wanted = generated(model, "eager", inputs, tokens=8)
    options = dict(cache_implementation="static", disable_compile=False)
    assert_same_answers(generated(model, "splitkv-gpu", inputs, tokens=8, **options), wanted)
