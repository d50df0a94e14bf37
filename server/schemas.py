"""Bodies of requests in OpenAI's form with vLLM's additions; `responses.py` has those of responses.

Unknown fields of a request are ignored with a line in the log, as vLLM does, for the sake of newer clients.
Fields that are known and would change the answer, but are not supported, are refused by name. Numbers are
read as vLLM reads them, in pydantic's lax mode: 16.0 and "16" are 16. Token ids of prompts must be integers.
"""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    model_validator,
)

from slora_jax.checks import MAX_TENANT_CHARACTERS
from slora_jax.errors import printable
from slora_jax.request import MAX_PRIORITY
from slora_jax.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from slora_jax.server.errors import ApiError, bad_request

logger = logging.getLogger(__name__)

MAX_MESSAGES = 4096  # of a conversation
MAX_UNKNOWN_FIELDS = 256  # of a request; they are ignored
_LOGGED_FIELDS = 8


def _at_most(count: int) -> BeforeValidator:
    """Refuses a longer list or map before its entries are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"may have at most {count} entries, got {len(value)}")
        return value

    return BeforeValidator(check)


class RequestBody(BaseModel):
    """Base of all requests: reports what it ignores and refuses what it cannot do."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, hide_input_in_errors=True)
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}  # field -> values that ask for nothing

    @model_validator(mode="after")
    def _judge_extras(self) -> RequestBody:
        ignored, extras = [], self.model_extra or {}
        if len(extras) > MAX_UNKNOWN_FIELDS:
            raise bad_request(f"the request has {len(extras)} unknown fields; at most {MAX_UNKNOWN_FIELDS}")
        for name, value in extras.items():
            if name not in self.unsupported:
                ignored.append(name)
            elif value is not None and value not in self.unsupported[name]:
                raise bad_request(f"{name} is not supported; leave it out", name)
        if ignored:
            shown = ", ".join(printable(name, 64) for name in sorted(ignored)[:_LOGGED_FIELDS])
            more = ", ..." if len(ignored) > _LOGGED_FIELDS else ""
            logger.info("%d request fields are ignored: %s%s", len(ignored), shown, more)
        return self


def _prompt(value: Any) -> list[str] | list[list[int]]:
    """OpenAI's four forms of a prompt as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return [value]
        if all(isinstance(p, str) for p in value) or all(
            isinstance(p, list) and _is_token_ids(p) for p in value
        ):
            return value
    raise ValueError(
        "must be a string, a list of strings, of token ids or of lists of token ids, and not empty"
    )


def _is_token_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(t) is int for t in value)


def _stop(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _model_name(value: str) -> str:
    if not value:
        raise ValueError("must not be empty; leave it out for the base model")
    return value


ModelName = Annotated[StrictStr, AfterValidator(_model_name)]


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the token counts."""

    include_usage: bool = False


_SAMPLING_NAMES = (  # fields of SamplingBody that SamplingParams has under the same name
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


class SamplingBody(RequestBody):
    """What both generating routes share. None is the default, as clients send it for "not set"."""

    model: ModelName | None = None  # None: the base
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, _at_most(MAX_LOGIT_BIAS)] = None
    seed: int | None = None
    stop: Annotated[list[StrictStr], _at_most(MAX_STOP_STRINGS), BeforeValidator(_stop)] = []
    stop_token_ids: Annotated[list[int] | None, _at_most(MAX_STOP_TOKEN_IDS)] = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # vLLM's: logprobs name tokens "token_id:N"
    # The tenant, unless the header X-Tenant names it.
    user: Annotated[StrictStr, Field(max_length=MAX_TENANT_CHARACTERS)] | None = None
    # vLLM's: lower is earlier.
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    # Ours: not finished so many seconds after arrival, it is aborted.
    deadline_s: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        return self

    @property
    def own_names(self) -> dict[str, str]:
        """The fields of this request that the engine knows under other names, by those."""
        return {"tenant": "user"}

    def blame(self, error: ValueError) -> ApiError:
        """400 for a reason of the engine's, which begins with a name: in names of this request."""
        names = self.own_names
        reason = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        first = re.match(r"(?:the )?(\w+)", reason)
        field = first[1] if first and first[1] in type(self).model_fields else None
        return bad_request(reason, field)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises ApiError 400 naming the field that is out of range."""
        given = {name: value for name in _SAMPLING_NAMES if (value := getattr(self, name)) is not None}
        try:
            return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, stop=tuple(self.stop), **given)
        except ValueError as error:
            raise self.blame(error) from error


_UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "structured_outputs": ({},),
    "logits_processors": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
}


class CompletionRequest(SamplingBody):
    """POST /v1/completions."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_UNSUPPORTED_SAMPLING,
        "suffix": ("",),
        "best_of": (1,),
        "prompt_embeds": ([],),
    }
    prompt: Annotated[Any, AfterValidator(_prompt)]
    max_tokens: int | None = 16  # null: up to the model's length
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise bad_request(
                "echo with logprobs is not supported: logprobs of a prompt are not computed", "echo"
            )
        return self


def _joined_parts(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(
        isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts
    ):
        raise ValueError('must be a string or a list of {"type": "text", "text": ...}: text only')
    return "\n".join(part["text"] for part in parts)


class ChatMessage(BaseModel):
    """One turn. Content parts are joined by newlines; other keys (name, tool_calls, ...) go to the
    template.
    """

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)
    role: StrictStr
    content: Annotated[Any, AfterValidator(_joined_parts)] = None


class ChatCompletionRequest(SamplingBody):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_UNSUPPORTED_SAMPLING,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "documents": ([],),
        "continue_final_message": (False,),
        "echo": (False,),
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = None  # both null: up to the model's length
    max_completion_tokens: int | None = None  # OpenAI's newer name; wins
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_generation_prompt: bool = True

    @property
    def own_names(self) -> dict[str, str]:
        """The fields of this request that the engine knows under other names, by those."""
        names = {**super().own_names, "prompt": "messages", "logprobs": "top_logprobs"}
        return (
            names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}
        )

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        return self


class LoadLoraRequest(RequestBody):
    """POST /v1/load_lora_adapter. Empty names are the route's to refuse, in vLLM's words."""

    lora_name: StrictStr = ""
    lora_path: Annotated[StrictStr, Field(max_length=4096)] = ""  # Linux's limit
    load_inplace: bool = False


class UnloadLoraRequest(RequestBody):
    """POST /v1/unload_lora_adapter."""

    lora_name: StrictStr = ""


class PinLoraRequest(RequestBody):
    """POST /v1/pin_lora_adapter and /v1/unpin_lora_adapter."""

    lora_name: StrictStr = ""


class TokenizeRequest(RequestBody):
    """POST /tokenize, of a prompt or of chat messages."""

    model: ModelName | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise bad_request("give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    model: ModelName | None = None
    tokens: list[Annotated[StrictInt, Field(ge=0)]]
