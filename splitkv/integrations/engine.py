"""A small inference engine over a paged KV cache, to be read and copied: everything it needs of splitkv is public.

Requests join and leave between steps (continuous batching). A step in which prompts are still being read attends chunks
of them and the decode rows of all others in one ragged call; a step in which every request decodes is one replay of a
CUDA graph, and the graph itself prepares the next one, so that several run without the host. Without a GPU the same
code runs eagerly. A request that finds no free page later starts again; the youngest gives way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import splitkv
from splitkv.integrations.llama import Llama


@dataclass(eq=False)
class Request:
    """A prompt and what became of it.

    Attributes:
        prompt: Token ids, at least one.
        max_new_tokens: When to stop at the latest.
        temperature: ≤ 0 takes the likeliest token; else tokens are drawn from softmax(logits / temperature).
        stop: Ids that end the answer; they are part of it.
        generated: The answer so far.
        cached: How many tokens have their keys and values in the cache.
    """

    prompt: list[int]
    max_new_tokens: int = 64
    temperature: float = 0.0
    stop: frozenset[int] = frozenset()
    generated: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def finished(self) -> bool:
        return len(self.generated) >= self.max_new_tokens or bool(self.generated and self.generated[-1] in self.stop)


class Engine:
    """Runs requests on one device.

        engine = Engine(Llama.from_transformers(model, max_len=2048), max_len=2048, num_pages=4096)
        request = engine.submit(Request(tokenizer("Once").input_ids, temperature=0.7))
        while engine.busy:
            engine.step()  # request.generated grows
        print(tokenizer.decode(request.generated))

    Sampling draws from torch's generator of the device (`torch.manual_seed`).

    Args:
        model: The model.
        max_len: Most tokens of a request, its answer included.
        num_pages, page_size: The KV cache: pages in all, and tokens per page.
        max_batch_size: Most requests in one step.
        max_tokens: Most new tokens in one step, of all requests: longer prompts are read in chunks.
        burst: Most decode steps between two looks at what was generated. Requests that stop in between have computed
            in vain, and new ones wait as long.
        split_tokens: Cut every request into parts of as many tokens, so that what attention answers it does not depend
            on the others in its step (nor on whether it is ragged: all are then); None: as fills the GPU best.
        compile: Fuse what lies between two attention calls by torch.compile.
    """

    def __init__(
        self,
        model: Llama,
        *,
        max_len: int,
        num_pages: int,
        page_size: int = 16,
        max_batch_size: int = 32,
        max_tokens: int = 1024,
        burst: int = 8,
        split_tokens: int | None = None,
        compile: bool = False,
    ) -> None:
        sizes = dict(max_len=max_len, num_pages=num_pages, page_size=page_size, max_batch_size=max_batch_size)
        sizes |= dict(burst=burst, split_tokens=1 if split_tokens is None else split_tokens)
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: expected an integer ≥ 1, given {size!r}")
        if max_tokens < max_batch_size:
            raise ValueError(f"max_tokens: expected at least {max_batch_size} (max_batch_size), given {max_tokens}")
        if max_len > model.cos.shape[0]:
            raise ValueError(f"max_len: expected at most {model.cos.shape[0]} (the model's positions), given {max_len}")
        self.model, self.max_len, self.max_batch_size, self.burst = model, max_len, max_batch_size, burst
        device, dtype, width = model.device, model.dtype, model.head_dim
        heads = model.num_q_heads, model.num_kv_heads
        self.max_tokens, self.on_gpu, self.invariant = max_tokens, device.type == "cuda", split_tokens is not None
        self.before, self.after = model.before, model.after
        if compile:
            self.before, self.after = torch.compile(model.before), torch.compile(model.after)

        max_pages = -(-max_len // page_size)
        self.pool = splitkv.PagePool(num_pages, page_size, max_batch_size, max_pages)
        page_table = torch.full((max_batch_size, max_pages), -1, dtype=torch.int32, device=device)
        step_config = splitkv.StepConfig(max_batch_size, max_total_q=max_tokens)
        self.state = splitkv.StepState.allocate(step_config, page_table, page_size, device)
        cut = {} if split_tokens is None else {"split_tokens": split_tokens, "max_parts": -(-max_len // split_tokens)}
        config = splitkv.WorkspaceConfig(max_batch_size, *heads, width, max_total_q=max_tokens, dtype=dtype, **cut)
        self.workspace = splitkv.Workspace.allocate(config, device)
        shape = (len(model.layers), 2, num_pages, page_size, model.num_kv_heads, width)
        lens, rows = self.state.seq_lens, self.state.req_pool_indices
        self.schedule = splitkv.Schedule.allocate(config, device)
        self.kvs = [
            splitkv.PagedKV(k, v, page_table, lens, rows=rows, schedule=self.schedule)
            for k, v in torch.zeros(shape, dtype=dtype, device=device)
        ]
        self.temperature = torch.zeros(max_batch_size, device=device)
        self.sampled = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.history = torch.zeros(burst, max_batch_size, dtype=torch.int64, device=device)
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # by age

    # What runs on the device.

    def _layers(self, tokens: int, qo_indptr: Tensor | None) -> Tensor:
        """Hidden states of this step's tokens; all sizes come from the host, all values from the device."""
        state, model = self.state, self.model
        position_ids, slots = state.position_ids[:tokens], state.out_cache_loc[:tokens]
        x = model.embedding[state.input_ids[:tokens]]
        cos, sin = model.cos[position_ids, None], model.sin[position_ids, None]
        for weights, kv in zip(model.layers, self.kvs, strict=True):
            q, k, v = self.before(weights, x, cos, sin)
            splitkv.append_kv(k, v, kv, slots)
            x = self.after(weights, x, splitkv.decode(q, kv, self.workspace, qo_indptr=qo_indptr))
        return x

    def _sample(self, x: Tensor, greedy: bool) -> None:
        """One token per row of x [batch, hidden], into `sampled`."""
        logits = self.model.logits(x)
        tokens = logits.argmax(-1)
        if not greedy:
            # The largest of logits / t plus Gumbel noise is a draw from softmax(logits / t).
            temperature = self.temperature[: x.shape[0], None]
            noise = torch.empty_like(logits).exponential_().log_()
            drawn = (logits / temperature.clamp_min(1e-6) - noise).argmax(-1)
            tokens = torch.where(temperature[:, 0] > 0, drawn, tokens)
        self.sampled[: x.shape[0]].copy_(tokens)

    def _decode_step(self, batch: int, greedy: bool) -> None:
        """One token for every request, and the state of the next step."""
        self.schedule.update(self.kvs[0])  # all layers have the same lengths
        self._sample(self._layers(batch, self.state.qo_indptr[: batch + 1] if self.invariant else None), greedy)
        self.state.fill_input_ids_from_device(self.sampled[:batch])
        self.state.advance()

    def _graph(self, batch: int, greedy: bool) -> torch.cuda.CUDAGraph:
        if (batch, greedy) not in self.graphs:
            self.state.bind([], [], tokens=[], pad_to=batch)  # nobody's tokens: nothing is written to the cache
            self._decode_step(batch, greedy)  # compiles what it needs
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._decode_step(batch, greedy)
            self.graphs[batch, greedy] = graph
        return self.graphs[batch, greedy]

    # What the host decides.

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def submit(self, request: Request) -> Request:
        """Queue a request, and return it.

        Raises:
            TypeError, ValueError: fields of other types than `Request` says; no prompt, tokens that the model does not
                know, more than max_len or the cache holds with the answer; one that is finished, or queued already.
        """
        self._check(request)
        request.cached = 0  # what it had in a cache is another's by now
        self.waiting.append(request)
        return request

    def _check(self, request: Request) -> None:
        kinds: dict[str, tuple[type, ...]] = dict(prompt=(list,), max_new_tokens=(int,), temperature=(int, float))
        kinds["stop"] = set, frozenset
        for name, kind in kinds.items():
            if not isinstance(value := getattr(request, name, request), kind):
                raise TypeError(f"request: expected a Request with {name} as documented, given {type(value).__name__}")
        longest = min(self.max_len, self.pool.num_pages * self.pool.page_size)
        if not request.prompt or request.max_new_tokens < 1 or len(request.prompt) + request.max_new_tokens > longest:
            raise ValueError(
                f"request: expected a prompt and an answer of at least a token each and at most {longest} in all, "
                f"given {len(request.prompt)} and {request.max_new_tokens}"
            )
        vocabulary, tokens = self.model.embedding.shape[0], request.prompt + request.generated
        if unknown := [token for token in tokens if type(token) is not int or not 0 <= token < vocabulary]:
            raise ValueError(f"request: expected tokens of 0…{vocabulary - 1}, given {unknown[0]!r}")
        if request.finished or request in [*self.waiting, *self.running]:
            raise ValueError("request: expected one that is neither finished nor queued already")

    def generate(self, requests: Iterable[Request]) -> list[list[int]]:
        """Run these requests, and all others, to their ends; the answers."""
        submitted = list(requests)
        for request in submitted:
            self._check(request)  # all of them before any is queued
        for request in dict.fromkeys(submitted):
            self.submit(request)
        while self.busy:
            self.step()
        return [request.generated for request in submitted]

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one step, or a burst of them where all requests decode; the requests that finished."""
        self._admit()
        decoding = [request for request in self.running if request.cached + 1 == request.length]
        reading = [request for request in self.running if request.cached + 1 < request.length]
        steps = 1
        if decoding and not reading:
            steps = min(self.burst, *(request.max_new_tokens - len(request.generated) for request in decoding))
            if self.pool.num_free_pages < len(decoding) * -(-steps // self.pool.page_size):
                steps = 1
        plan: dict[Request, int] = {}
        budget = self.max_tokens
        for request in decoding + reading:
            count = min(request.length - request.cached, budget)
            if request in self.running and count and self._make_room(request, count, steps - 1):
                plan[request] = count
                budget -= count
        batch = [request for request in plan if request in self.running]
        if not batch:
            return []
        drawn = self._run(batch, [plan[request] for request in batch], steps)
        for column, request in enumerate(batch):
            complete = request.cached + plan[request] == request.length
            request.cached += plan[request] + steps - 1
            for row in drawn if complete else ():
                if not request.finished:
                    request.generated.append(row[column])
        done = [request for request in batch if request.finished]
        for request in done:
            self._leave(request)
        return done

    def _run(self, batch: list[Request], counts: list[int], steps: int) -> list[list[int]]:
        """Run steps for these requests; [steps][len(batch)] tokens, which mean nothing where a prompt goes on."""
        state, live, total = self.state, len(batch), sum(counts)
        decoding = all(request.cached + 1 == request.length for request in batch)
        greedy = all(request.temperature <= 0 for request in batch)
        size = min(self.max_batch_size, 1 << (live - 1).bit_length()) if decoding else live
        graph = self._graph(size, greedy) if decoding and self.on_gpu else None
        tokens: list[int] = []
        for request, count in zip(batch, counts, strict=True):
            tokens += (request.prompt + request.generated)[request.cached : request.cached + count]
        rows, seq_lens, updates = self.pool.binding(batch)
        state.bind(rows, seq_lens, q_lens=counts, tokens=tokens, page_updates=updates, pad_to=size)
        self.temperature[:live].copy_(torch.tensor([request.temperature for request in batch]), non_blocking=True)
        for i in range(steps):
            if graph is not None:
                graph.replay()
            elif decoding:
                self._decode_step(size, greedy)
            else:
                qo_indptr = state.qo_indptr[: live + 1]
                self._sample(self._layers(total, qo_indptr)[qo_indptr[1:] - 1], greedy)
            self.history[i].copy_(self.sampled)
        return [row[:live] for row in self.history[:steps].tolist()]

    def _admit(self) -> None:
        """Let requests in, in turn, while there are rows and the pages for all that they have to read."""
        while self.waiting:
            try:
                self.pool.admit(self.waiting[0], 0, reserve=self.waiting[0].length)
            except splitkv.PoolExhausted:
                return
            self.running.append(self.waiting.popleft())

    def _make_room(self, request: Request, count: int, reserve: int) -> bool:
        """Pages for a request's new tokens; False where it had to give way itself."""
        while True:
            try:
                self.pool.extend(request, request.cached + count, reserve=reserve)
                return True
            except splitkv.PoolExhausted:
                youngest = self.running[-1]
                self._leave(youngest)
                youngest.cached = 0  # its tokens are read again, the generated ones too
                self.waiting.appendleft(youngest)
                if youngest is request:
                    return False

    def _leave(self, request: Request) -> None:
        self.pool.release(request)
        self.running.remove(request)
