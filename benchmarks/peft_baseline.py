"""The PEFT side of bench_cpu.py: one workload through Hugging Face transformers + PEFT on the CPU.

Runs in the PEFT environment (Python 3.11, torch, transformers, peft, gguf), normally as a subprocess of
bench_cpu.py, and prints one line of JSON on stdout. Three modes:

    mixed        one generate() over the whole left-padded batch, `adapter_names` naming each row's adapter
    sequential   one adapter at a time: a generate() per adapter over the rows that ask for it
    base         one generate() over the whole batch, adapters not even loaded

Every row produces exactly `max_tokens` tokens, greedily, in fp32. One warm-up run is not counted.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # PEFT otherwise asks the hub about the base model's config

import peft
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM

Batch = list[list[int]]


@dataclass(frozen=True)
class Request:
    """One prompt and the adapter it asks for (None: the base model)."""

    prompt_token_ids: list[int]
    adapter: str | None


@dataclass(frozen=True)
class Workload:
    """The JSON document bench_cpu.py writes: GGUF path, adapter folders, requests, output length, threads."""

    model: str
    adapters: dict[str, str]
    requests: list[Request]
    max_tokens: int
    threads: int

    @classmethod
    def read(cls, path: Path) -> "Workload":
        """The workload in the file; raises ValueError on an adapter that it does not list."""
        document = json.loads(path.read_text())
        requests = [Request(**request) for request in document.pop("requests")]
        workload = cls(requests=requests, **document)
        named = {request.adapter for request in requests if request.adapter is not None}
        unknown = sorted(named - workload.adapters.keys())
        if unknown:
            raise ValueError(f"{path}: requests name adapters missing from `adapters`: {unknown}")
        return workload


def load(workload: Workload, with_adapters: bool, attention: str) -> Any:
    """The fp32 model, as a PeftModel with every adapter of the workload or plain."""
    path = Path(workload.model)
    source = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if source else path
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, **source
    ).eval()
    if with_adapters:
        for name, adapter in workload.adapters.items():
            if isinstance(model, PeftModel):
                model.load_adapter(adapter, adapter_name=name)
            else:
                model = PeftModel.from_pretrained(model, adapter, adapter_name=name)
    return model.eval()


def generate(model: Any, prompts: Batch, max_tokens: int, **kwargs: Any) -> Batch:
    """Exactly `max_tokens` greedy tokens of every prompt, as one left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            **kwargs,
        )
    tokens: Batch = out[:, width:].tolist()
    return tokens


def run_mixed(model: Any, workload: Workload) -> Batch:
    """All requests in one batch, every row with its own adapter; PEFT loops over them in each layer."""
    names = [request.adapter or "__base__" for request in workload.requests]
    prompts = [request.prompt_token_ids for request in workload.requests]
    return generate(model, prompts, workload.max_tokens, adapter_names=names)


def run_base(model: Any, workload: Workload) -> Batch:
    """All requests in one batch, without adapters."""
    return generate(model, [request.prompt_token_ids for request in workload.requests], workload.max_tokens)


def run_sequential(model: Any, workload: Workload) -> Batch:
    """A batch per adapter, one after the other; outputs in the order of the requests."""
    outputs: Batch = [[] for _ in workload.requests]
    for name in dict.fromkeys(request.adapter for request in workload.requests):
        rows = [row for row, request in enumerate(workload.requests) if request.adapter == name]
        prompts = [workload.requests[row].prompt_token_ids for row in rows]
        if name is None:
            with model.disable_adapter():
                batch = generate(model, prompts, workload.max_tokens)
        else:
            model.set_adapter(name)
            batch = generate(model, prompts, workload.max_tokens)
        for row, tokens in zip(rows, batch, strict=True):
            outputs[row] = tokens
    return outputs


MODES: dict[str, Callable[[Any, Workload], Batch]] = {
    "mixed": run_mixed,
    "sequential": run_sequential,
    "base": run_base,
}


def measure(workload: Workload, mode: str, repeat: int, attention: str) -> dict[str, Any]:
    """The JSON document that is printed: throughput is the median of `repeat` runs after one warm-up."""
    torch.set_num_threads(workload.threads)
    model = load(workload, mode != "base" and bool(workload.adapters), attention)
    run = MODES[mode] if isinstance(model, PeftModel) else run_base
    outputs = run(model, workload)
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        outputs = run(model, workload)
        seconds.append(time.perf_counter() - start)
    output_tokens = sum(map(len, outputs))
    assert output_tokens == workload.max_tokens * len(workload.requests)
    per_kilobyte = 1024 if sys.platform == "linux" else 1  # ru_maxrss: KiB on Linux, bytes on macOS
    return {
        "mode": mode,
        "attention": attention,
        "threads": workload.threads,
        "num_requests": len(workload.requests),
        "num_adapters": len(workload.adapters),
        "output_tokens": output_tokens,
        "seconds": seconds,
        "output_tokens_per_s": output_tokens / statistics.median(seconds),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * per_kilobyte / 1e6,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
        "output_token_ids": outputs,
    }


def main() -> None:
    """Reads the workload, runs it, prints the result."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--workload", type=Path, required=True, metavar="FILE", help="JSON, see Workload")
    parser.add_argument("--mode", choices=sorted(MODES), default="mixed", help="default: mixed")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs after the warm-up (default: 3)")
    parser.add_argument(
        "--attention", choices=["sdpa", "eager"], default="sdpa", help="default: sdpa, the faster on a CPU"
    )
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(json.dumps(measure(Workload.read(args.workload), args.mode, args.repeat, args.attention)))


if __name__ == "__main__":
    main()
