"""Text to token ids and back: tokenizers, chat templates, incremental decoding."""

from slora_jax.text.detokenizer import IncrementalDetokenizer
from slora_jax.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "load_tokenizer"]
