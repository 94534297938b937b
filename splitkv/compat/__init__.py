"""The calls of FlashAttention and FlashInfer, computed by splitkv: same names, argument order, layouts and LSE forms.

Each argument is honoured or refused; none is ignored. "void" are those that have no meaning here, as nothing that they
could change is left: they are checked and change nothing. What is refused raises before anything is attended or
written, naming the argument, what was expected, and what was given. Nothing is copied, cast or made contiguous, where
those libraries may do so: tensors have a last stride of 1, indices and lengths are int32.

`flash_attn_with_kvcache` takes the arguments of FlashAttention 2 (package flash_attn), `flash_attn_3_with_kvcache`
those of FlashAttention 3 (module flash_attn_interface):

| argument | of | here |
|---|---|---|
| q, k_cache, v_cache | 2, 3 | honoured; head widths 1…576; float32 too; 8-bit caches under 16-bit queries too |
| k, v | 2, 3 | honoured: appended in place at cache_seqlens, with two more launches and two small allocations |
| qv | 3 | refused: `splitkv.LatentKV` with one query [q of the values' width, q] attends latent caches |
| rotary_cos, rotary_sin | 2, 3 | refused: rotate q and k before the call |
| rotary_interleaved | 2, 3 | void without rotary_cos, as there |
| rotary_seqlens | 3 | refused, as rotary_cos |
| cache_seqlens | 2, 3 | honoured: tensor, integer (one fill), or None for full caches (one fill) |
| cache_batch_idx | 2, 3 | honoured; with a page table, too |
| cache_leftpad | 2, 3 | honoured; with a page table, too |
| block_table | 2 | honoured; any page size |
| page_table | 3 | honoured; any page size |
| cu_seqlens_q | 3 | honoured: q is [total_q, heads, head_dim] |
| cu_seqlens_k_new | 3 | honoured: k and v are [total_new, heads, head_dim] |
| max_seqlen_q | 3 | honoured where a window ends right of the query token; else it bounds nothing |
| q_descale | 3 | refused: 8-bit queries are |
| k_descale, v_descale | 3 | honoured with 8-bit caches where all requests share one row, as expand() makes it |
| softmax_scale | 2, 3 | honoured |
| causal | 2, 3 | honoured |
| window_size | 2, 3 | honoured; a right side within a request's query tokens takes a small mask, made per call |
| attention_chunk | 3 | refused |
| softcap | 2, 3 | honoured |
| alibi_slopes | 2 | honoured: [heads], or [batch, heads] of one row; 2's causal LSE lacks a constant per row |
| scheduler_metadata | 3 | refused: nothing is planned |
| num_splits | 2, 3 | honoured; 0 balances over the GPU by the lengths on the device |
| pack_gqa | 3 | refused where False: the query heads of a KV head are always packed |
| sm_margin | 3 | refused |
| return_softmax_lse | 2, 3 | honoured: [batch, heads, q_len] or [heads, total_q] float32, natural log |
| workspace, out | ours | keywords of both: scratch and output of the caller |

A query token that sees no key gets exactly 0 and an LSE of -inf (FlashAttention 2 marks it by +inf).

`BatchDecodeWithPagedKVCacheWrapper` takes those of FlashInfer. Its plan only records, since nothing needs planning:

| argument | of | here |
|---|---|---|
| float_workspace_buffer | init, reset | honoured: the `splitkv.Workspace` lies in it; more than it needs is not used |
| int_workspace_buffer | reset | void: nothing is planned |
| kv_layout | init | honoured |
| use_cuda_graph | init | honoured |
| paged_kv_indptr_buffer | init | honoured with use_cuda_graph, else refused |
| paged_kv_indices_buffer | init | honoured with use_cuda_graph, else refused |
| paged_kv_last_page_len_buffer | init | honoured with use_cuda_graph, else refused |
| use_tensor_cores | init | void: they are always used |
| backend | init | refused but for "auto" |
| jit_args | init | refused |
| indptr, indices, last_page_len | plan | honoured, on the host or the device |
| num_qo_heads, num_kv_heads, head_dim, page_size | plan | honoured: what run is given must agree |
| pos_encoding_mode | plan, forward | refused but for "NONE" |
| window_left | plan, forward | honoured |
| window_left | run | honoured: None, or as planned |
| window_right | plan | honoured |
| logits_soft_cap | plan, forward | honoured |
| q_data_type, kv_data_type, data_type | plan | honoured: what run is given must agree |
| o_data_type | plan | honoured: that of q, or float32 |
| sm_scale | plan, forward | honoured |
| rope_scale, rope_theta | plan, forward | refused, as pos_encoding_mode |
| non_blocking | plan | honoured |
| block_tables, seq_lens | plan | refused: indptr, indices and last_page_len say it |
| fixed_split_size | plan | honoured: equal bits whatever the batch; the buffer then holds 32 parts of each request |
| disable_split_kv | plan | honoured |
| q_len_per_req | plan | honoured |
| q_len_per_req | run | honoured: None, or as planned |
| q, paged_kv_cache | run, forward | honoured |
| args | run | refused |
| q_scale, k_scale, v_scale | run, forward | honoured |
| out, lse | run | honoured |
| return_lse | run | honoured: [tokens, heads] float32, base 2 |
| enable_pdl | run | refused: it is used where the GPU has it |
| sinks | run | honoured |
| skip_softmax_threshold_scale_factor, kv_cache_sf | run | refused |
"""

from splitkv.compat.flash_attention import flash_attn_3_with_kvcache, flash_attn_with_kvcache
from splitkv.compat.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "flash_attn_3_with_kvcache",
    "flash_attn_with_kvcache",
]
