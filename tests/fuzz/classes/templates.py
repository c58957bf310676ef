"""Chat templates built from operations with huge operands, nested data, and ways out of a sandbox."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

from mlx_mmfree.tokenizer import chat
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from tests.fuzz.case import FuzzClass
from tests.fuzz.tokenizing import MESSAGES
from tests.hub.checkpoints import GOLDENS

_SIZES = (0, 1, 3, 25, 100, 10_000, 1_000_000, 2_000_000, 8_000_000, 900_000_000, 10**12, -1)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_STRING_METHODS = _words(
    """
    capitalize casefold center count encode endswith expandtabs find format format_map index
    isalnum isidentifier join ljust lower lstrip maketrans partition removeprefix replace rfind
    rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title
    translate upper zfill unescape striptags
    """
)
_OTHER_METHODS = _words(
    """
    copy get items keys values pop update setdefault append extend count index sort bit_length
    to_bytes as_integer_ratio cycle next changed __init__ __class__ mro __getitem__
    """
)
_FILTERS = _words(
    """
    abs attr batch capitalize center count d default dictsort e escape filesizeformat first
    float forceescape format groupby indent int items join last length list lower map max min
    pprint random reject rejectattr replace reverse round safe select selectattr slice sort
    string striptags sum title tojson trim truncate unique upper urlencode urlize wordcount
    wordwrap xmlattr
    """
)
_TESTS = _words(
    """
    defined none string number iterable mapping even divisibleby(3) in([1,2]) eq(1) sameas(1)
    callable escaped filter('x') sequence lower
    """
)
_NAMES = _words(
    """
    messages bos_token tools x y ns loop self range dict lipsum cycler joiner namespace
    raise_exception strftime_now caller varargs undefined_name true none
    """
)
_ATTRIBUTES = _words(
    """
    __class__ __mro__ __subclasses__ __globals__ __init__ __self__ __dict__ __builtins__
    gi_frame f_globals _environment __wrapped__ __call__ format func_globals im_func __name__
    """
)
_ATTACKS = (
    "{{ ('a'*N).rfind('ab'~'a'*M) }}",
    "{{ ('ab'*N).rsplit('a', M)|length }}",
    "{{ ('f'*N)|int(0,16) // (('f'*M)|int(0,16) + 1) }}",
    "{{ ('f'*N)|int(0,16) % (('1'*M)|int(0,7) + 3) }}",
    "{{ ('{0:>N}'|safe).format('x') }}",
    "{% autoescape true %}{{ ('%Ns'|e) % 'x' }}{% endautoescape %}",
    "{% autoescape true %}{{ ('{0.__class__}'|e).format(x) }}{% endautoescape %}",
    "{% set ns = namespace(v=['a'*9]) %}{% for i in range(N) %}{% set ns.v = [ns.v, ns.v] %}{% endfor %}"
    "{{ ns.v }}",
    "{% set ns = namespace(v={}) %}{% for i in range(25) %}{% set ns.v = {1: ns.v, 2: ns.v}.values() %}"
    "{% endfor %}{{ ns.v }}",
    "{% set ns = namespace() %}{% for i in range(25) %}{% set ns.v = namespace(a=ns, b=ns) %}"
    "{% endfor %}{{ ns }}{{ ns.v|tojson }}",
    "{{ [messages]*M|tojson(separators=['a'*N, 'b'*M]) }}",
    "{{ messages|tojson(indent=N) }}",
    "{% set ns = namespace(v=[]) %}{% for i in range(N) %}{% set ns.v = ns.v + ['a'*M] %}{% endfor %}",
    "{% for i in range(N) %}{% for j in range(M) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n-1) }}{{ f(n-1) }}{% endmacro %}{{ f(N) }}",
    "{{ raise_exception('\\x1b[2J'*N) }}",
    "{{ strftime_now('%Y'*N) }}",
    "{{ ''.join(cycler(*range(N)).next()|string for _ in x) }}",
    "{{ 'x'|attr('__class__')|attr('__mro__') }}",
    "{{ ''['format']('{0.__class__.__mro__[1].__subclasses__}', x) }}",
    "{{ ['{0.__class__}']|map('format', x)|list }}",
    "{{ 'a'.translate({97: 'b'*N}) }}",
    "{{ (('a'*N)|list|sort)|join('b'*M)|replace('a', 'c'*M)|length }}",
    "{{ dict(a=1, **{'b'*N: 2})|dictsort|tojson }}",
    "{{ 10 ** N ** M }}{{ 7 % -0.0 }}{{ N // 0 }}{{ 1e308 * N * 1e308 }}",
    "{{ (N|float) ** 0.5 }}{{ 1|round(N) }}{{ 1e300|int ** M }}",
    "{{ x is divisibleby(0) }}{{ 'a' * (x|length) * N }}",
    "{{ '%s' % (('f'*N)|int(0,16)) }}{{ (('9'*N)|int)|string|length }}",
    "{{ ((('a'*N)|e)~('b'|e))|upper|length }}{{ ('<'*N)|e|e|e|length }}",
    "{{ ('a'*N) == ('a'*N) and ('a'*N) in ('b'*M) }}",
    "{{ ('a '*N)|title|trim|wordcount }}{{ ('a '*N)|truncate(M)|length }}",
    "{% set x = ('a'*N)[::-1] %}{{ x[::2]|reverse|first }}{{ x|unique|list|length }}",
    "{% import 'x' as y %}{% include messages %}{% extends 'z' %}",
    "{% filter indent(N) %}a\n{% endfilter %}{% filter upper %}{{ 'a'*M }}{% endfilter %}",
    "{% call(a) f() %}{% endcall %}{{ loop }}{{ self }}{{ caller }}",
)


def make_sources(folder: Path) -> None:
    """A byte-level tokenizer without a template."""
    shutil.copytree(GOLDENS / "tokenizer_bpe", folder, dirs_exist_ok=True)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Writes a template: an attack with other sizes, a random program, or both."""
    shutil.copytree(sources, target)
    parts = []
    for _ in range(rng.choice((1, 1, 2))):
        is_attack = rng.random() < 0.4
        parts.append(_attack(rng) if is_attack else _block(rng, depth=rng.choice((1, 2, 3))))
    source = "\n".join(parts)
    (target / "chat_template.jinja").write_text(source)
    return source.replace("\n", " ")[:600]


def exercise(folder: Path, rng: random.Random) -> None:
    """Writes a conversation; neither internals nor files may show in the text."""
    # long templates are ended early, so that many can be tried
    chat.TEMPLATE = replace(chat.TEMPLATE, seconds=0.3)
    tokenizer = Tokenizer.from_folder(folder)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, x=["a", {"b": 1}], y=3)
    for shown in ("<class 'object'>", "<class 'type'>", "<frame ", "<module ", "__builtins__'"):
        if shown in text:
            raise AssertionError(f"the text shows internals: {text[:200]!r}")
    if len(text) < 10_000:
        tokenizer.apply_chat_template(MESSAGES, x=["a", {"b": 1}], y=3)


def _attack(rng: random.Random) -> str:
    text = rng.choice(_ATTACKS)
    for name in ("N", "M"):
        text = text.replace(name, str(rng.choice(_SIZES)))
    return text


def _block(rng: random.Random, depth: int) -> str:
    def expression() -> str:
        return _expression(rng, depth)

    if depth == 0 or rng.random() < 0.3:
        return f"{{{{ {expression()} }}}}"
    body = "".join(_block(rng, depth - 1) for _ in range(rng.choice((1, 1, 2))))
    formats = (
        "{% for x in " + expression() + " %}" + body + "{% endfor %}",
        "{% for x, y in " + expression() + " recursive %}" + body + "{{ loop(x) }}{% endfor %}",
        "{% if " + expression() + " %}" + body + "{% elif " + expression() + " %}{% endif %}",
        "{% set x = " + expression() + " %}" + body,
        "{% set x %}" + body + "{% endset %}{{ x }}",
        "{% set ns = namespace(v=" + expression() + ") %}{% for i in range("
        f"{rng.choice(_SIZES)}"
        + ") %}{% set ns.v = "
        + _expression(rng, 1).replace("x", "ns.v")
        + " %}{% endfor %}{{ ns.v }}",
        "{% macro f(x) %}" + body + "{% endmacro %}{{ f(" + expression() + ") }}",
        "{% filter " + rng.choice(_FILTERS) + " %}" + body + "{% endfilter %}",
        "{% autoescape true %}" + body + "{% endautoescape %}",
        "{% generation %}" + body + "{% endgeneration %}",
        "{% with x = " + expression() + " %}" + body + "{% endwith %}",
    )
    return rng.choice(formats)


def _expression(rng: random.Random, depth: int) -> str:
    if depth <= 0 or rng.random() < 0.15:
        return _literal(rng)

    def inner() -> str:
        return _expression(rng, depth - 1)

    arguments = ", ".join(inner() for _ in range(rng.choice((0, 1, 1, 2, 3))))
    operator = rng.choice(("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or"))
    formats = (
        f"({inner()} {operator} {inner()})",
        f"({inner()} {operator} {inner()})",
        f"({inner()}).{rng.choice(_STRING_METHODS)}({arguments})",
        f"({inner()}).{rng.choice(_STRING_METHODS)}({arguments})",
        f"({inner()}).{rng.choice(_OTHER_METHODS)}({arguments})",
        f"({inner()})|{rng.choice(_FILTERS)}({arguments})",
        f"({inner()})|{rng.choice(_FILTERS)}",
        f"({inner()})|map('{rng.choice(_FILTERS)}', {inner()})|list",
        f"({inner()})|safe",
        f"({inner()})[{inner()}]",
        f"({inner()})[{inner()}:{inner()}:{rng.choice((1, 2, -1, 0))}]",
        f"({inner()}).{rng.choice(_ATTRIBUTES)}",
        f"({inner()})|attr('{rng.choice(_ATTRIBUTES)}')",
        f"({inner()}) is {rng.choice(_TESTS)}",
        f"({inner()} if {inner()} else {inner()})",
        f"[{inner()}, {inner()}]",
        f"{{{inner()}: {inner()}}}",
        f"{rng.choice(_NAMES)}({arguments})",
        f"range({rng.choice(_SIZES)}, {rng.choice(_SIZES)})",
    )
    return rng.choice(formats)


def _literal(rng: random.Random) -> str:
    size = rng.choice(_SIZES)
    formats = (
        rng.choice(_NAMES),
        str(size),
        f"('{rng.choice(('a', 'f', '<', '{0}', '%s', ' ', chr(0x130)))}'*{size})",
        f"(('{rng.choice('f19')}'*{size})|int(0, {rng.choice((2, 10, 16, 36))}))",
        f"([{rng.choice(('x', 'messages', '1'))}]*{size})",
        rng.choice(("'a'", "''", "'{0.__class__}'", "'{0:>99999999}'", "'%99999999d'", "'%(x)s'")),
        rng.choice(("1e308", "0.0", "-0.0", "1e-320", "true", "none", "[]", "{}", "()", "-1")),
    )
    return rng.choice(formats)


# the process that renders may take half a gigabyte
CLASS = FuzzClass(make_sources, mutate, exercise, memory_bytes=700_000_000)
