"""The model that the example engine runs: Llama in plain PyTorch, from anyone's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Llama:
    """The Llama architecture in plain PyTorch, cut where attention goes: `before` it and `after` it in each layer.

    Args:
        weights: Tensors by their names in a checkpoint of transformers, `model.layers.0.self_attn.q_proj.weight` and
            so on; without `lm_head.weight` the embedding is used.
        num_q_heads, num_kv_heads, eps: As a config's num_attention_heads, num_key_value_heads and rms_norm_eps say.
        cos, sin: [max_len, head_dim], the rotary embedding of each position.
    """

    def __init__(
        self, weights: dict[str, Tensor], num_q_heads: int, num_kv_heads: int, eps: float, cos: Tensor, sin: Tensor
    ) -> None:
        def joined(layer: int, *names: str) -> Tensor:
            return torch.cat([weights[f"model.layers.{layer}.{name}.weight"] for name in names])

        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self.num_q_heads, self.num_kv_heads, self.head_dim, self.eps = num_q_heads, num_kv_heads, cos.shape[1], eps
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        # Rotation of (x1, x2) is x · cos + (x2, x1) · (-sin, sin): the swap is a roll by half the width.
        half = self.head_dim // 2
        self.cos, self.sin = cos.to(self.dtype), torch.cat((-sin[:, :half], sin[:, half:]), 1).to(self.dtype)
        count = len({name.split(".")[2] for name in weights if name.startswith("model.layers.")})
        self.layers = [
            (
                joined(i, "input_layernorm"),
                joined(i, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                joined(i, "self_attn.o_proj"),
                joined(i, "post_attention_layernorm"),
                joined(i, "mlp.gate_proj", "mlp.up_proj"),
                joined(i, "mlp.down_proj"),
            )
            for i in range(count)
        ]

    @classmethod
    def from_transformers(cls, model: Any, max_len: int) -> Llama:
        """Take the weights of a LlamaForCausalLM of transformers.

        Args:
            model: The model, loaded in the dtype and on the device to run with.
            max_len: Positions to prepare the rotary embedding for.

        Raises:
            ValueError: another architecture, linear layers with a bias, no head that tells tokens, or rotary
                embeddings that change with the length.
        """
        config = model.config
        if config.model_type != "llama" or config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
            raise ValueError(
                f"model: expected a Llama without biases, given {config.model_type} ({type(model).__name__})"
            )
        if getattr(model, "lm_head", None) is None or getattr(model, "model", None) is None:
            raise ValueError(f"model: expected a LlamaForCausalLM, given {type(model).__name__}")
        rope = getattr(model.model.rotary_emb, "rope_type", "default")
        if rope in ("dynamic", "longrope"):
            raise ValueError(f"model: expected rotary embeddings that do not change with the length, given {rope!r}")
        position_ids = torch.arange(max_len, device=model.device)[None]
        cos, sin = model.model.rotary_emb(model.get_input_embeddings().weight.float()[:1], position_ids)
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        return cls(weights, config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps, cos[0], sin[0])

    def before(self, weights: Sequence[Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [tokens, num_q_heads, head_dim], and k and v of as many tokens, of x [tokens, hidden]."""
        x = F.rms_norm(x, x.shape[-1:], weights[0], self.eps)
        qkv = F.linear(x, weights[1]).view(x.shape[0], -1, self.head_dim)
        qk, v = qkv.tensor_split((self.num_q_heads + self.num_kv_heads,), dim=1)
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
        return qk[:, : self.num_q_heads], qk[:, self.num_q_heads :], v

    def after(self, weights: Sequence[Tensor], x: Tensor, out: Tensor) -> Tensor:
        """The layer's result [tokens, hidden], of its input x and attention's out [tokens, num_q_heads, head_dim]."""
        x = x + F.linear(out.flatten(1), weights[2])
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], weights[3], self.eps), weights[4]).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, weights[5])

    def logits(self, x: Tensor) -> Tensor:
        """[tokens, vocabulary] float32."""
        return F.linear(F.rms_norm(x, x.shape[-1:], self.norm, self.eps), self.head).float()

    def dense_logits(self, ids: Sequence[int]) -> Tensor:
        """[vocabulary] float32, of the token after these, by PyTorch's attention over all of them: what is right."""
        tokens = torch.tensor(ids, device=self.device)
        x, cos, sin = self.embedding[tokens], self.cos[: len(ids), None], self.sin[: len(ids), None]
        for weights in self.layers:
            q, k, v = (t.transpose(0, 1)[None] for t in self.before(weights, x, cos, sin))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self.after(weights, x, out[0].transpose(0, 1))
        return self.logits(x[-1:])[0]
