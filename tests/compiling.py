"""Compiles kernels for GPUs that are not here, as calls on them would, and says what the code takes of such a GPU.

Run as a program it is a worker: a line of JSON in, a `Case`; a line of JSON out, what each of its kernels takes. It
needs a process of its own, since the interpreter, which tests use, is chosen once per process.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before anything imports triton

import torch

import splitkv
from splitkv import api, append, masks, step, tiles, work_list
from splitkv.compat import flash_attention
from splitkv.config import StepConfig
from splitkv.kernels import prepared, read
from splitkv.kernels.launch import compile_options
from splitkv.tiles import Target

KB = 1024


@dataclass(frozen=True)
class Gpu:
    """A model of GPU: what splitkv reads of a device, and what more tells whether programs fit one multiprocessor."""

    name: str
    target: Target
    reserved_shared: int = KB  # of each program, for the system
    max_warps: int = 64
    registers: int = 65536  # NVIDIA: of one multiprocessor
    lane_registers: int = 512  # AMD: of each of four SIMDs, per lane, for the waves on it

    @property
    def backend(self) -> tuple[str, str]:
        family, _, arch = self.target.arch.partition(":")
        return family, arch

    @property
    def amd(self) -> bool:
        return self.backend[0] == "hip"

    @property
    def lanes(self) -> int:
        """Of a warp (wave)."""
        return 64 if self.target.arch.startswith("hip:gfx9") else 32


def _nvidia(name: str, arch: int, num_sms: int, shared: int, sm_shared: int, max_warps: int, reserved: int = KB) -> Gpu:
    target = Target(f"cuda:{arch}", num_sms, shared * KB, sm_shared * KB)
    return Gpu(name, target, reserved, max_warps)


def _amd(name: str, arch: str, num_cus: int, lane_registers: int = 512) -> Gpu:
    # As Target.of makes it. A program of 4 waves has one on each of the 4 SIMDs.
    return Gpu(
        name, Target(f"hip:{arch}", num_cus, 64 * KB, sm_shared_memory=64 * KB), 0, 32, lane_registers=lane_registers
    )


GPUS = {
    gpu.target.arch: gpu
    for gpu in (
        _nvidia("T4", 75, 40, 64, 64, 32, reserved=0),
        _nvidia("A100", 80, 108, 163, 164, 64),
        _nvidia("RTX 3090", 86, 82, 99, 100, 48),
        _nvidia("L40S", 89, 142, 99, 100, 48),
        _nvidia("H100", 90, 132, 227, 228, 64),
        _nvidia("B200", 100, 148, 227, 228, 64),
        _nvidia("RTX 5090", 120, 170, 99, 100, 48),
        _amd("MI250X", "gfx90a", 110),
        _amd("MI300X", "gfx942", 304),
        _amd("RX 7900 XTX", "gfx1100", 48, lane_registers=1536),
    )
}


@dataclass(frozen=True)
class Case:
    """A call of decode, or with `others` of everything else that launches kernels, on one GPU.

    Attributes:
        arch: A key of GPUS.
        dtype: Of queries and cache.
        heads, group: KV heads, and query heads of each; 0: 8 and 4, or one and 16 for wide rows.
        cache: Of the cache where it is quantised.
        head_dim, head_dim_v: Widths; a value that is narrower than its key is the first columns of the key's row.
        rows: Rows of the query tile: 16 for one query token, else as many tokens as it takes.
        aligned: Whether cache rows are aligned to 16 bytes.
        few: Whether there are few tiles beside the multiprocessors.
        layout: "paged", "contiguous", "ragged", "csr" or "latent" (with "gaps" among the rules: between its rows).
        page_size: Tokens per page.
        schedule: "balanced", "tokens" (fixed parts of so many) or "parts" (fixed number).
        rules: Names of further arguments of the call.
        merge: Compile the kernel that merges the partials too.
        others: Compile all kernels but those of decode, instead.
        only: Compile none but this kernel of the call.
    """

    arch: str
    dtype: str = "bfloat16"
    head_dim: int = 128
    head_dim_v: int = 0
    rows: int = 16
    aligned: bool = True
    few: bool = False
    layout: str = "paged"
    page_size: int = 16
    schedule: str = "balanced"
    rules: tuple[str, ...] = ()
    merge: bool = False
    others: bool = False
    cache: str = ""
    heads: int = 0
    group: int = 0
    only: str = ""

    def __str__(self) -> str:
        if self.others:
            return f"{self.arch} others"
        words = [self.arch, self.dtype, f"{self.head_dim}x{self.width_v}", f"rows{self.rows}", self.layout]
        words += [self.cache] if self.cache else []
        words += [f"heads{self.heads}x{self.group}"] if self.heads else []
        words += [f"page{self.page_size}"] if self.layout in ("paged", "csr", "latent") else []
        words += [self.schedule, "few" if self.few else "many", "aligned" if self.aligned else "unaligned"]
        return " ".join([*words, *self.rules, *filter(None, [self.only])])

    @property
    def kv_dtype(self) -> torch.dtype:
        return getattr(torch, self.cache or self.dtype)  # type: ignore[no-any-return]

    @property
    def latent(self) -> bool:
        return self.layout == "latent"

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.arch]


@dataclass(frozen=True)
class Used:
    """What a compiled kernel takes.

    Attributes:
        kernel: Its name.
        seconds: That its compilation took.
        num_warps, programs: Warps of a program; programs that are meant to run on a multiprocessor at a time (0: not
            said).
        max_registers: The limit given to the compiler, per thread.
        rows: Rows of its query tile.
        tiles: Tokens per block and stages.
        shared: Bytes of shared memory of a program.
        estimate: As many as `splitkv.tiles` expects at most; 0: it does not say.
        registers: Per thread.
        stack, spills: Bytes of a thread's local memory, and those of them (AMD: registers) that spilling takes.
        spills_in_loop: Loads and stores of them within the loops that hold products (AMD: as spills).
        copies: 16-byte asynchronous copies in the code.
        waits_for_others: Whether it waits for the kernel before it (programmatic dependent launch).
        continued: Products (`tl.dot`) that add to a sum rather than to 0.
    """

    kernel: str
    seconds: float
    num_warps: int
    programs: int
    max_registers: int
    rows: int
    tiles: tuple[int, int]
    shared: int
    estimate: int
    registers: int
    stack: int
    spills: int
    spills_in_loop: int
    copies: int
    waits_for_others: bool
    continued: int


# What a call would launch. Tensors on the meta device have shapes, strides and addresses (0) but no memory.


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(case: Case, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of this shape before the width, with rows that are an odd number of elements apart where unaligned."""
    dtype, pad = case.kv_dtype, 0 if case.aligned else 1
    k = _empty(*shape, case.head_dim + pad, dtype=dtype)[..., : case.head_dim]
    if case.width_v < case.head_dim:
        return k, k[..., : case.width_v]
    return k, _empty(*shape, case.width_v + pad, dtype=dtype)[..., : case.width_v]


def plan(case: Case) -> tuple[api.Plan, dict[int, int]]:
    """The launches of the case's call, and by rows of tiles how many programs are meant to share a multiprocessor."""
    dtype = getattr(torch, case.dtype)
    heads, group = (1, 16) if case.head_dim > 512 else (8, 4)
    if case.heads:
        heads, group = case.heads, case.group
    q_len = case.rows // group if case.rows > 16 else 1
    batch = 1 if case.few else 512
    config = splitkv.WorkspaceConfig(
        batch, heads * group, heads, case.head_dim, case.width_v, max_total_q=batch * q_len, dtype=dtype,
        max_splits=2**17, q_tile_rows=case.rows, split_tokens=512 if case.schedule == "tokens" else None,
    )  # fmt: skip
    workspace = splitkv.Workspace.allocate(config, "meta")
    workspace.target = case.gpu.target
    lens = _empty(batch)
    listed = splitkv.Schedule.allocate(config, "meta") if "listed" in case.rules else None
    if listed is not None:
        listed.target = case.gpu.target
    scales: dict[str, Any] = dict(k_scale=0.5, v_scale=0.5) if case.cache else {}
    if case.layout == "contiguous":
        kv: Any = splitkv.ContiguousKV(*_cache(case, batch, 4096, heads), lens, **scales)
    elif case.layout == "ragged":
        kv = splitkv.RaggedKV(*_cache(case, 4096, heads), _empty(batch + 1), **scales)
    elif case.latent:
        heads, group = 1, heads * group
        rows = _empty(4096, case.page_size, case.head_dim + (64 if "gaps" in case.rules else 0), dtype=case.kv_dtype)
        own = _empty(4096, case.page_size, dtype=torch.float32) if "token_scales" in case.rules else 0.5
        kv = splitkv.LatentKV(
            rows[..., : case.head_dim], _empty(batch, 4096), lens, head_dim_v=case.width_v, schedule=listed,
            scale=own if case.cache else None,
        )  # fmt: skip
    elif case.layout == "csr":
        pages = _cache(case, 4096, case.page_size, heads)
        kv = splitkv.PagedKV.from_csr(*pages, _empty(batch + 1), _empty(4096), lens, **scales)
    else:
        starts = _empty(batch) if "kv_start" in case.rules else None
        pages = _cache(case, 4096, case.page_size, heads)
        if "token_scales" in case.rules:
            scales = {name: _empty(4096, case.page_size, heads, dtype=torch.float32) for name in scales}
        kv = splitkv.PagedKV(*pages, _empty(batch, 4096), lens, schedule=listed, kv_start=starts, **scales)
    rules: dict[str, Any] = dict(
        window=dict(window_left=1023),
        softcap=dict(softcap=30.0),
        sinks=dict(sinks=_empty(heads * group, dtype=torch.float32)),
        alibi=dict(alibi_slopes=_empty(heads * group, dtype=torch.float32)),
        tree=dict(tree_mask=_empty(batch, q_len, math.ceil(q_len / 32))),
        noncausal=dict(causal=False),
        lse=dict(want_lse=True),
        qo_indptr=dict(qo_indptr=_empty(batch + 1)),
        listed={},  # the view has a work list
        token_scales={},  # tokens have scales of their own
        gaps={},
        kv_start={},  # the view hides tokens
        shared=dict(group_ids=_empty(batch), prefix_lens=_empty(batch)),
    )
    arguments: dict[str, Any] = {"num_splits": 4} if case.schedule == "parts" else {}
    if case.latent:
        arguments["sm_scale"] = 0.1
    for rule in case.rules:
        arguments |= rules[rule]
    shape = (batch * q_len,) if "qo_indptr" in case.rules else (batch, q_len) if q_len > 1 else (batch,)
    q = _empty(*shape, heads * group, case.head_dim, dtype=dtype)
    programs: dict[int, int] = {}
    choose = api.tile_sizes.choose

    def remember(*args: Any, **kwargs: Any) -> Any:
        chosen = choose(*args, **kwargs)
        programs[args[4]] = chosen.programs_per_sm
        return chosen

    with mock.patch.object(api.tile_sizes, "choose", remember):
        found = api.plan_decode(q, kv, workspace, **arguments)
    return found, programs


def other_launches(case: Case) -> Iterator[api.Launch]:
    """The launches of merge, append_kv, move_kv, the masks, the step state and the benchmark's read."""
    recorded: list[api.Launch] = []

    def record(
        kernel: Any,
        grid: Any,
        device: Any,
        operands: Any,
        constants: Any,
        num_warps: int,
        dependent: bool = False,
        max_registers: int = 0,
    ) -> None:
        recorded.append(api.Launch(kernel, grid, dict(operands), dict(constants), num_warps, dependent, max_registers))

    dtype = getattr(torch, case.dtype)
    modules = (api, append, flash_attention, masks, prepared, read, step, work_list)
    # Calls on the meta device end where they would launch: here they go on.
    no_refusal = mock.patch.object(splitkv._interpreter, "why_not", lambda _: None)
    with no_refusal, mock.patch.object(splitkv.operators, "tracing", lambda _: False):
        patches = [mock.patch.object(module, "launch", record) for module in modules if hasattr(module, "launch")]
        for patch in patches:
            patch.start()
        try:
            splitkv.merge(_empty(3, 5, 32, 128, dtype=dtype), _empty(3, 5, 32, dtype=torch.float32))
            for aligned in (True, False):
                kv = splitkv.PagedKV(
                    *_cache(dataclasses.replace(case, aligned=aligned), 64, 16, 8), _empty(4, 4), _empty(4)
                )
                new = _empty(4, 8, 128, dtype=dtype)
                splitkv.append_kv(new, new, kv, _empty(4))
                splitkv.move_kv(kv, _empty(4), _empty(4))
                for cache in ("float8_e4m3fn", "float8_e5m2", "int8"):
                    # Scales that are computed, and one that is read.
                    own, one = _empty(64, 16, 8, dtype=torch.float32), _empty(dtype=torch.float32)
                    quantized = dataclasses.replace(case, aligned=aligned, cache=cache)
                    kv = splitkv.PagedKV(
                        *_cache(quantized, 64, 16, 8), _empty(4, 4), _empty(4), k_scale=own, v_scale=one
                    )
                    splitkv.append_kv(new, new, kv, _empty(4))
                    splitkv.move_kv(kv, _empty(4), _empty(4))
            for indptr, rows, table in ((None, None, None), (_empty(5), _empty(4), _empty(4, 4))):
                tokens = new if table is not None else new.unsqueeze(1)
                appended = flash_attention.NewTokens(tokens, tokens, indptr, 4, kv.k, kv.v)
                appended.write(kv, _empty(4), rows, table, _empty(4), 64)
            listed = splitkv.Schedule.allocate(splitkv.WorkspaceConfig(4, 32, 8, 128, dtype=dtype), "meta")
            listed.target = case.gpu.target
            listed.update(kv)
            out = _empty(4, 3, 100, dtype=torch.uint8).view(torch.bool)
            masks.attention_mask(out, _empty(4), window_left=7)
            out = _empty(12, 100, dtype=torch.uint8).view(torch.bool)
            masks.ragged_mask(out, _empty(5), _empty(4), kv_start=_empty(4))
            masks.position_mask(_empty(4, 1, 100, dtype=torch.bool), _empty(4, dtype=torch.int64))
            words = _empty(4, 40, 2)
            masks.pack_tree_mask(_empty(4, 40, 40, dtype=torch.uint8).view(torch.bool), words)
            masks.tree_mask_from_parents(_empty(4, 40), words)
            masks.tree_mask_from_parents(_empty(4, 40, dtype=torch.int64), words)
            read.read_all(_empty(1 << 20), _empty(64), block=2048, programs=64, num_stages=3, num_warps=4)
            # The step state stages on the host, so it must have memory.
            table = torch.zeros(8, 16, dtype=torch.int32)
            state = splitkv.StepState.allocate(StepConfig(max_batch_size=8, max_total_q=16), table, 16, "cpu")
            state.bind([0, 1], [5, 17], q_lens=[1, 2], page_updates=[(0, 0, 3)], tokens=[1, 2, 3])
            state.advance()
            state.advance(torch.ones(8, dtype=torch.int64))
        finally:
            for patch in patches:
                patch.stop()
    yield from recorded


# Compiling.


def _type_of(value: Any, annotation: str | None) -> str:
    from triton.runtime.jit import mangle_type

    if isinstance(value, torch.Tensor):
        return str(mangle_type(value))
    assert annotation, "an operand that is no tensor has a type"
    return annotation


def signature_of(launch: api.Launch) -> tuple[dict[str, str], dict[tuple[int], Any]]:
    """Types by parameter, and constants by place: what a launch's kernel is compiled for."""
    signature, constants = {}, {}
    for parameter in launch.kernel.params:
        values = launch.constants if parameter.is_constexpr else launch.operands
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(parameter.num,)] = value
        else:
            signature[parameter.name] = _type_of(value, parameter.annotation_type)
    return signature, constants


def compile_launch(launch: api.Launch, gpu: Gpu, programs: int) -> Used:
    """Compile a launch's kernel for a GPU without specialising on any argument: no integer is 1, no address aligned."""
    import time

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants = signature_of(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs={})
    family, arch = gpu.backend
    target = GPUTarget("hip", arch, gpu.lanes) if family == "hip" else GPUTarget("cuda", int(arch), 32)
    options = compile_options(launch.num_warps, launch.dependent, launch.max_registers)
    start = time.perf_counter()
    compiled = triton.compile(source, target=target, options=options)
    seconds = time.perf_counter() - start
    assembly = compiled.asm["amdgcn" if gpu.amd else "ptx"]
    measured = _amd_usage(assembly) if gpu.amd else _nvidia_usage(compiled.asm["cubin"])
    return Used(
        kernel=launch.kernel.__name__,
        seconds=round(seconds, 2),
        num_warps=launch.num_warps,
        programs=programs,
        max_registers=launch.max_registers,
        rows=launch.constants.get("BLOCK_M", 0),
        tiles=(launch.constants.get("BLOCK_N", 0), launch.constants.get("NUM_STAGES", 0)),
        shared=compiled.metadata.shared,
        estimate=estimate_of(launch, gpu),
        copies=len(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*, (?:0x10|16)\b", assembly)),
        waits_for_others="griddepcontrol.wait" in assembly,
        continued=len(re.findall(r"= tt\.dot %\w+, %\w+, %(?!cst)", compiled.asm["ttir"])),
        **measured,
    )


def estimate_of(launch: api.Launch, gpu: Gpu) -> int:
    """The shared memory that attention is expected to take at most, by which its tiles were chosen; 0 of others."""
    if launch.kernel is not api.split_decode_kernel:
        return 0
    given, constants = launch.operands, launch.constants
    names = ("HEAD_DIM", "HEAD_DIM_V", "BLOCK_M", "BLOCK_N", "NUM_STAGES")
    return tiles.shared_bytes(
        gpu.target, given["q_ptr"].dtype, *(constants[name] for name in names), kv_dtype=given["k_ptr"].dtype,
        latent=given["v_ptr"] is None, tree=given["tree_ptr"] is not None,
    )  # fmt: skip


def _nvidia_usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def tell(what: str) -> str:
            return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout

        told = tell("-res-usage")
        found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
        assert found, told
        registers, stack, local = map(int, found.groups())
        spills, inside = max(stack, local), 0
        if spills:
            inside = _spills_in_loops(tell("-sass"))
    return dict(registers=registers, stack=stack, spills=spills, spills_in_loop=inside)


def _spills_in_loops(code: str) -> int:
    """Loads and stores of spilled registers in the innermost loops with products; if none is found, among products."""
    lines = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)]
    loops = []
    for address, text in lines:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target.group(1), 16) < address:
            loops.append((int(target.group(1), 16), address))
    products = [address for address, text in lines if re.search(r"\b(HMMA|HGMMA|UTCHMMA)\b", text)]
    loops = [loop for loop in loops if any(loop[0] <= at <= loop[1] for at in products)]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    if products and not inner:
        inner = [(products[0], products[-1])]
    spilled = [address for address, text in lines if re.search(r"\b(LDL|STL)\b", text)]
    return sum(any(first <= at <= last for first, last in inner) for at in spilled)


def _amd_usage(assembly: str) -> dict[str, int]:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert found, name
        return int(found.group(1))

    spills = number("vgpr_spill_count")
    # .vgpr_count counts accumulation registers too.
    return dict(
        registers=number("vgpr_count"),
        stack=number("private_segment_fixed_size"),
        spills=spills,
        spills_in_loop=spills,
    )


def compile_case(case: Case) -> list[Used]:
    """Compile what the case launches."""
    if case.others:
        return [compile_launch(launch, case.gpu, 0) for launch in other_launches(case)]
    found, programs = plan(case)
    used = []
    for launch in found.launches:
        if case.only and launch.kernel.__name__ != case.only:
            continue
        if launch.kernel is api.split_decode_kernel:
            used.append(compile_launch(launch, case.gpu, programs[launch.constants["BLOCK_M"]]))
        elif case.merge or case.only:
            used.append(compile_launch(launch, case.gpu, 0))
    return used


# A worker, and how to talk to one.


class Worker:
    """A process that compiles one case at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip

    def compile(self, case: Case) -> list[Used] | str:
        """What the case's kernels take, or why it does not compile."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(dataclasses.asdict(case)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            return f"the compiler ended with exit status {self._process.wait()}"
        answer = json.loads(line)
        return (
            answer if isinstance(answer, str) else [Used(**{**used, "tiles": tuple(used["tiles"])}) for used in answer]
        )

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def main() -> None:
    """Answer cases from standard input until it ends."""
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever compilers print is no reply
    for line in sys.stdin:
        given = json.loads(line)
        case = Case(**{**given, "rules": tuple(given["rules"])})
        try:
            answer: Any = [dataclasses.asdict(used) for used in compile_case(case)]
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
