"""`IncrementalDetokenizer`: new tokens in, text that may be shown out, stop strings found on the way."""

from __future__ import annotations

from collections.abc import Sequence

from slora_jax.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one growing token sequence, released as soon as it is final and never taken back.

    Held back are: an unfinished UTF-8 sequence (until it is whole or the sequence is over) and text that may
    be the beginning of a stop string (until it is decided). Without a match, the released pieces together
    equal `tokenizer.decode(all_ids, skip_special_tokens=...)`, however the ids were cut into calls.

    The stop string whose end comes first in the text wins; of several that end there, the longest. The text
    then ends before it, or after it with `include_stop_str_in_output`. The text of the first `min_tokens`
    tokens is never matched.

    A call costs O(its tokens + the longest stop string), whatever the length so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if isinstance(stop, str) or "" in stop:
            raise ValueError("stop must be a sequence of strings that are not empty")
        self._stream = tokenizer.text_stream(skip_special_tokens)
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._include_stop = include_stop_str_in_output
        self._unmatched_tokens = min_tokens  # tokens still to come whose text is not matched
        self._released: list[str] = []
        self._held = ""  # beginning of a stop string, perhaps
        self._stop_reason: str | None = None
        self._final = False

    @property
    def text(self) -> str:
        """All text released so far."""
        self._released = ["".join(self._released)]
        return self._released[0]

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was matched; from then on, tokens are ignored."""
        return self._stop_reason

    def append(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Take the sequence's next tokens and return the newly released text.

        `final` says that there will be no more: whatever is held back is released (an unfinished UTF-8
        sequence as U+FFFD). Raises ValueError when called again after that.
        """
        if self._stop_reason is not None:
            return ""
        if self._final:
            raise ValueError("append: this sequence was ended by final=True")
        self._final = final
        free = min(self._unmatched_tokens, len(token_ids))
        self._unmatched_tokens -= free
        text = "".join([self._stream.push(i) for i in token_ids[:free]])
        matched = "".join([self._stream.push(i) for i in token_ids[free:]])
        if final:
            matched += self._stream.finish()
        text += self._release(matched)
        self._released.append(text)
        return text

    def _release(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        match = self._find_stop(text)
        if match is not None:
            end, start, self._stop_reason = match
            self._held = ""
            return text[: end if self._include_stop else start]
        keep = len(text) if self._final else self._partial_stop(text)
        self._held = text[keep:]
        return text[:keep]

    def _find_stop(self, text: str) -> tuple[int, int, str] | None:
        """(end, start, stop string) of the match that ends first."""
        starts = ((text.find(stop), stop) for stop in self._stop)
        return min(((start + len(stop), start, stop) for start, stop in starts if start >= 0), default=None)

    def _partial_stop(self, text: str) -> int:
        """Where the longest end of `text` that begins a stop string starts; len(text) where there is none."""
        for start in range(max(0, len(text) - self._longest_stop + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                return start
        return len(text)
