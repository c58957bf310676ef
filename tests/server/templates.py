"""Short chat templates with the rules of published ones: how calls look, and which turns they take."""

from pathlib import Path

_TURN = "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' }}"
_BEGIN = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}"
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"

CHATML = (
    f"{{% for m in messages %}}{_TURN}{{{{ m.content + '<|eot_id|>' }}}}{{% endfor %}}"
    f"{_BEGIN}{{% endif %}}"
)
QWEN3 = (
    f"{_TOOLS}{{% if tools %}}"
    """{{ 'Write <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>.' }}{% endif %}"""
    f"{{% for m in messages %}}{_TURN}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<tool_call>' }}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "{{ '</tool_call>' }}{% endfor %}{{ '<|eot_id|>' }}{% endfor %}"
    f"{_BEGIN}{{% endif %}}"
)
# one message of the system, at the start
QWEN35 = (
    f"{_TOOLS}{{% if tools %}}"
    "{{ 'Write <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    f"{_TURN}{{{{ m.content }}}}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\n' }}"
    "{{ v if v is string else v | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|eot_id|>' }}{% endfor %}"
    f"{_BEGIN}{{{{ '<think>\n' }}}}{{% endif %}}"
)
# one call in a message, whose text is left out
LLAMA3 = (
    f"{_TOOLS}{{% if tools %}}"
    """{{ 'Answer {"name": NAME, "parameters": OBJECT}.' }}{% endif %}"""
    f"{{% for m in messages %}}{_TURN}{{% if m.tool_calls %}}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call in a message') }}{% endif %}"
    """{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}"""
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}' }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    f"{_BEGIN}{{% endif %}}"
)
# turns that alternate and begin with the user, and ids of calls of nine characters
MISTRAL = (
    "{% set n = namespace(count=0) %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
    "{% if m.role in ('user', 'assistant') and m.tool_calls is not defined %}"
    "{% if (m.role == 'user') != (n.count % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set n.count = n.count + 1 %}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{{ 'Write [TOOL_CALLS] [CALL].' }}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    """{{ '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}"""
    """{{ ', "id": "' + c.id + '"}' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']' }}"""
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ '[TOOL_RESULTS]' + m.tool_call_id + ' ' + m.content }}"
    "{% else %}{{ '[' + m.role + ']' + m.content }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
)
# no message of the system at all
GEMMA = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}",
)
PUBLISHED = (Path(__file__).parents[1] / "data" / "qwen35.jinja").read_text()
TEMPLATES = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "qwen3.5": QWEN35,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "published": PUBLISHED,
}
