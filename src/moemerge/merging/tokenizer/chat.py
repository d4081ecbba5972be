"""The output's chat template: one of the inputs', a well-known format, or the config's own text.

It is written as chat_template.jinja, where transformers looks first; the key in
tokenizer_config.json goes, so that no two places say different things.

The well-known formats are written from their public descriptions. Every line break that is part of
a format is text inside an expression; the templates' own line breaks are trimmed, so that the
layout here cannot leak into a prompt.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moemerge.config.models import ModelRef
from moemerge.errors import TokenizerError
from moemerge.merging.tokenizer.vocab import read_json
from moemerge.merging.tokenizer.write import to_json
from moemerge.registry import did_you_mean

FILE: Final = "chat_template.jinja"
MIN_LENGTH: Final = 20  # shorter text is a misspelt name rather than a template


# <|im_start|>role\ncontent<|im_end|>\n
CHATML: Final = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# <|begin_of_text|> once, then <|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|>
LLAMA3: Final = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
{{- message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

# <s> [INST] user [/INST] answer</s>; a system text opens the first instruction
MISTRAL: Final = """\
{%- set ns = namespace(system='', turn=0) -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'system' and loop.first -%}
{%- set ns.system = message['content'] + '\\n\\n' -%}
{%- elif message['role'] == 'user' and ns.turn % 2 == 0 -%}
{{- ' [INST] ' + ns.system + message['content'] + ' [/INST]' -}}
{%- set ns.system = '' -%}
{%- set ns.turn = ns.turn + 1 -%}
{%- elif message['role'] == 'assistant' and ns.turn % 2 == 1 -%}
{{- ' ' + message['content'] + eos_token -}}
{%- set ns.turn = ns.turn + 1 -%}
{%- else -%}
{{- raise_exception('expected user and assistant in turns, after at most one system message') -}}
{%- endif -%}
{%- endfor -%}
"""

# system text, then ### Instruction: / ### Input: / ### Response: paragraphs
ALPACA: Final = """\
{%- set headings = {
  'user': '### Instruction:\\n', 'user_context': '### Input:\\n', 'assistant': '### Response:\\n'
} -%}
{%- for message in messages -%}
{%- if not loop.first -%}{{- '\\n\\n' -}}{%- endif -%}
{{- headings.get(message['role'], '') + message['content'] | trim -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\\n\\n### Response:\\n' -}}{%- endif -%}
"""

# [|system|]text[|endofturn|]\n always first; [|user|]text\n; [|assistant|]text[|endofturn|]\n
EXAONE: Final = """\
{%- if messages[0]['role'] != 'system' -%}{{- '[|system|][|endofturn|]\\n' -}}{%- endif -%}
{%- for message in messages -%}
{%- set end = '\\n' if message['role'] == 'user' else '[|endofturn|]\\n' -%}
{{- '[|' + message['role'] + '|]' + message['content'] + end -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '[|assistant|]' -}}{%- endif -%}
"""

FORMATS: Final = {
    "alpaca": ALPACA,
    "chatml": CHATML,
    "exaone": EXAONE,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
}


def read_chat_template(folder: Path) -> str | None:
    """A folder's default template: the file, else the key in tokenizer_config.json."""
    path = folder / FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(
                f"{path}: cannot be read: {error}", hint="download the tokenizer files again"
            ) from error
    return _default((read_json(folder / "tokenizer_config.json") or {}).get("chat_template"))


def _default(value: Any) -> str | None:
    if isinstance(value, list):  # several named ones: [{"name": ..., "template": ...}]
        value = {entry.get("name"): entry.get("template") for entry in value}.get("default")
    return value if isinstance(value, str) else None


def resolve_chat_template(
    setting: str, folders: Mapping[ModelRef, Path], order: Sequence[ModelRef]
) -> str | None:
    """The text of `chat_template:`. None for `auto` when no input has one.

    `auto` is the most frequent among the inputs; of equally frequent ones the first in `order`.
    """
    if setting == "auto":
        texts = [read_chat_template(folders[m]) for m in order]
        counts = Counter(text for text in texts if text is not None)
        return counts.most_common(1)[0][0] if counts else None
    if setting in FORMATS:
        return FORMATS[setting]
    if len(setting) < MIN_LENGTH or "{" not in setting:
        known = ("auto", *FORMATS)
        raise TokenizerError(
            f"chat_template: {setting!r} is neither a known name nor a Jinja template"
            f"{did_you_mean(setting, known)}",
            hint=f"known: {', '.join(known)}; a template is longer and has `{{`",
        )
    return setting


def with_chat_template(files: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """Tokenizer files with this template in place of whatever they had."""
    out = {
        name: content
        for name, content in files.items()
        if not name.startswith("additional_chat_templates/")
    }
    out[FILE] = template.encode()
    config = json.loads(out.get("tokenizer_config.json", b"{}"))
    if "chat_template" in config:
        del config["chat_template"]
        out["tokenizer_config.json"] = to_json(config)
    return out
