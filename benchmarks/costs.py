"""Seconds of the steps and loads of simulated servers (`virtual_server`), each with where it is from.

A `decode_step`, `mixed_step` or other bench named here is a line of results/engine.jsonl;
tests/benchmarks/test_costs.py holds `H200` to these lines.
"""

from __future__ import annotations

from benchmarks.virtual_server import LoadCost, StepCost

# Llama-2-7B on an H200, a batch of 256, 2048 tokens a step, pages of 16 tokens (8.4 MB).
H200 = StepCost(
    # decode_step without adapters, batches of 16, 64 (bfb9210) and 256 (59badf3) with 26 pages each: these
    # three numbers fit the three lines.
    step=4.217e-3,
    decode=6.6e-6,
    kv_page=1.936e-6,
    # decode_step, ranks 64/32/16/8 (59badf3): 32 and 256 adapters of 7.5 pages beside none.
    adapter_page=1.95e-6,
    adapter_step=0.75e-3,
    # mixed_step, 896 and 1792 tokens beside 0 (5683199); 48.7 ms of thrash's slowest steps (bfb9210), whose
    # prompts have adapters.
    prefill=19.9e-6,
    prefill_step=2.5e-3,
    decode_rungs=(2, 8, 32, 128, 256),
    prefill_rungs=(64, 224, 896, 1792, 2048),
)
# load_bandwidth beside decodes (789bf0a): 36.6 to 39.0 GB/s. All adapters have been read.
H200_LOADS = LoadCost(read_page=None, copy_page=220e-6)


def adapter_pages(rank: int) -> int:
    """Pages of an adapter on q, k, v, o of Llama-2-7B: load_bandwidth's `adapter_bytes`, 2.1 MB a rank."""
    return -(-rank // 4)


# By bytes, before any step was measured: 3.0 ms of weights, 48 us of KV a decode row at context 400, prefill
# at 600 TFLOP/s. Pages of adapters are of 4 tokens here: rank 64 has 65 of them. What is simulated with it
# compares policies by services and first tokens, not by throughput.
ROUGH_H200 = StepCost(step=3.5e-3, decode=48e-6, prefill=23e-6, adapter_page=1e-6, loaded_page=84e-6)
# Its loads, cold_first_token (b5783ac): 263 ms of reading and 2.8 ms of copying at rank 64, 65 pages.
ROUGH_H200_LOADS = LoadCost(read_page=4e-3, copy_page=43e-6)
# An A10G, roughly (0.6 TB/s, 70 TFLOP/s in use): it serves a little over two requests a second.
A10G = StepCost(step=0.028, decode=0.35e-3, prefill=0.2e-3, adapter_page=7e-6, loaded_page=0.35e-3)
