"""Well-known chat formats as Jinja templates, from their public descriptions.

Every line break that is part of a format is written as text inside an expression; the templates'
own line breaks are trimmed, so that the layout here cannot leak into a prompt.
"""

from __future__ import annotations

from typing import Final

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
