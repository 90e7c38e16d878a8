"""A model folder's tokenizer and chat template, without its remote code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forebay.diffusion.errors import DiffusionError

Encode = Callable[[str], list[int]]
Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Messages, and whether an answer is to follow, -> text."""


def read_tokenizer(folder: Path) -> Any:
    """The folder's `tokenizers.Tokenizer`.

    Raises:
        DiffusionError: the folder has no `tokenizer.json`, or `tokenizers` is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DiffusionError("tokenizers is missing; install it with `pip install forebay[dlm]`") from None
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise DiffusionError(f"{path} cannot be read ({error}); save the model's fast tokenizer there") from None


def read_encoder(folder: Path) -> Encode:
    """Text -> tokens, no special ones added.

    Raises:
        DiffusionError: as `read_tokenizer`.
    """
    tokenizer = read_tokenizer(folder)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def read_template(folder: Path) -> Render:
    """How the model writes chats; contents one after the other, a blank line between them, where it does not say.

    Raises:
        DiffusionError: the folder's template is none.
    """
    settings = _read_settings(folder / "tokenizer_config.json")
    beside = folder / "chat_template.jinja"
    found = beside.read_text() if beside.exists() else settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((one["template"] for one in found if one["name"] == "default"), None)
    if not found:
        return lambda messages, _: "\n\n".join(str(message["content"]) for message in messages)
    return _compile(folder, found, settings)


def _compile(folder: Path, template: str, settings: dict[str, Any]) -> Render:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    special = {name: _text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "mask_token")}
    try:
        compiled = environment.from_string(template)
    except TemplateError as error:
        raise DiffusionError(f"{folder}: its chat template cannot be read ({error})") from None

    def render(messages: Sequence[Message], answer: bool) -> str:
        try:
            return compiled.render(messages=list(messages), add_generation_prompt=answer, **special)
        except TemplateError as error:
            raise DiffusionError(f"{folder}: its chat template refuses a chat ({error})") from None

    return render


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
