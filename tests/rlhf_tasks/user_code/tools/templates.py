"""Small chat templates, one for each format of calls: they write calls and tools' answers as that format does."""

_TURN = (
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}@TOOL@{%- else -%}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}{%- set f = c.function -%}@CALL@{%- endfor -%}<|im_end|>\n"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
_ALTERNATE = (
    "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}"
    "{%- if m.role != 'tool' and m.tool_calls is not defined -%}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{%- set ns.n = ns.n + 1 -%}{%- endif -%}{%- endfor -%}"
)
"""As Mistral's templates check roles."""
_CALLED = (
    "{%- set ns = namespace(called=false) -%}{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{%- set ns.called = 'tool_calls' in m -%}{%- elif m.role == 'tool' and not ns.called -%}"
    "{{ raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}"
    "{%- endif -%}{%- endfor -%}"
)
"""As GPT-OSS's template does."""
_OFFERED = "{%- if tools -%}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif -%}"
_ANSWER = "<|im_start|>tool\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n"


def _template(call: str, answer: str = _ANSWER) -> str:
    template = _OFFERED + _TURN.replace("@CALL@", call).replace("@TOOL@", answer)
    return template.replace("\n", "{{ '\\n' }}")  # which jinja does not strip


TEMPLATES = {
    "hermes": _template(
        '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    ),
    "xml": _template(
        "\n<tool_call>\n<function={{ f.name }}>\n{%- for key, value in f.arguments | items -%}"
        "\n<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>{%- endfor -%}"
        "\n</function>\n</tool_call>"
    ),
    "glm": _template(
        "\n<tool_call>{{ f.name }}\n{%- for key, value in f.arguments | items -%}"
        "\n<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value if value is string else value | tojson }}</arg_value>"
        "{%- endfor -%}\n</tool_call>"
    ),
    "llama": _template(
        "{% if loop.first %}<|python_tag|>{% else %}; {% endif %}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    ),
    "mistral": _ALTERNATE
    + _template(
        "{% if loop.first %}[TOOL_CALLS] [{% else %}, {% endif %}"
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{% if loop.last %}]{% endif %}",
        '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]',
    ),
    "harmony": _CALLED
    + _template(
        "{% if not loop.first %}<|start|>assistant{% endif %} to=functions.{{ f.name }}<|channel|>commentary json"
        "<|message|>{{ f.arguments | tojson }}{% if not loop.last %}<|call|>{% endif %}",
        "<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}"
        "<|im_end|>",
    ),
}
