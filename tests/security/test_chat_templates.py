"""A run's chat template is a stranger's program: it ends with a refusal, in bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import TemplateError
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.models.chat_template import compile_template
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_protocol import limits
from prime_protocol.errors import LocalError

SHOWN = "{{ messages[0].content }}"
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set n.x = EXPRESSION %}{% endfor %}{{ n.x }}"
NESTING = "{% set n = namespace(x=['a']) %}{% for i in range(12) %}{% set n.x = [n.x] * 7 %}{% endfor %}"

SHARED = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
TUPLES = SHARED.replace("[1]", "(1, 1)").replace("[n.x, n.x]", "(n.x, n.x)")
HUGE = "{% set x = ('f' * 400000) | int(0, 16) %}{% set y = ('f' * 200000) | int(0, 16) %}{% for i in range(999) %}"

EXHAUSTING = {
    "shared nesting marked safe": SHARED + "{% set y = n.x | safe %}",
    "shared nesting tested": SHARED + "{{ n.x is lower }}",
    "shared nesting called": SHARED + "{{ n.x() }}",
    "shared nesting as an indent": SHARED + "{{ 'x' | indent(n.x) }}",
    "shared nesting as a key": TUPLES + "{% set y = {n.x: 1} %}",
    "shared nesting as an index": TUPLES + "{{ {}[n.x] }}",
    "huge numbers divided": HUGE + "{{ x % y }}{% endfor %}",
    "huge numbers tested": HUGE + "{{ x is divisibleby y }}{% endfor %}",
    "a text tested for division": "{{ '%2000000000d' is divisibleby(5) }}",
    "a text tested as even": "{{ '%2000000000d' is even }}",
    "a text tested as odd": "{% set x = '%2000000000d' %}{{ x is odd }}",
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop over text": "{% for a in 'x' * 99999 %}{% for b in 'x' * 99999 %}{% endfor %}{% endfor %}",
    "a long range": "{% for a in range(10**9) %}{% endfor %}",
    "multiplied text": "{{ 'a' * 10**10 }}",
    "multiplied text in a constant": "{% set x = 'a' * 10**10 %}",
    "multiplied list": "{{ ([0] * 10**9) | length }}",
    "power": "{{ 10 ** 999999999 }}",
    "power of powers": "{{ 9 ** 60 ** 60 }}",
    "large numbers": DOUBLING.replace("'ab'", "3").replace("EXPRESSION", "n.x * n.x"),
    "doubling by ~": DOUBLING.replace("EXPRESSION", "n.x ~ n.x"),
    "doubling by +": DOUBLING.replace("EXPRESSION", "n.x + n.x"),
    "doubling by join": DOUBLING.replace("EXPRESSION", "[n.x, n.x] | join"),
    "doubling by a method": DOUBLING.replace("EXPRESSION", "n.x.join([n.x, n.x])"),
    "doubling by replace": DOUBLING.replace("EXPRESSION", "n.x | replace('a', 'aa')"),
    "doubling by replacing nothing": DOUBLING.replace("EXPRESSION", "n.x.replace('', n.x)"),
    "doubling by slices": DOUBLING.replace("EXPRESSION", "n.x[:] ~ n.x[::-1]"),
    "doubling by blocks": "{% set x = 'ab' %}"
    + "".join("{% set x %}{{ x }}{{ x }}{% endset %}" for _ in range(64))
    + "{{ x }}",
    "doubling by output": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}a{% endmacro %}{{ m(60) }}",
    "a macro without an end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a value with itself inside": NESTING + "{{ n.x }}",
    "comparing nested values": NESTING + "{% set y = n.x %}" + NESTING + "{{ n.x == y }}",
    "JSON of nested values": NESTING + "{{ n.x | tojson }}",
    "indented JSON": "{{ [1] | tojson(indent=10**9) }}",
    "indented text": "{{ 'a\nb' | indent(10**9) }}",
    "centred text": "{{ 'a'.center(10**9) }}",
    "padded text": "{{ 'a'.zfill(10**9) }}",
    "formatted text": "{{ '{:1000000000}'.format(1) }}",
    "text formatted by %": "{{ '%1000000000d' % 1 }}",
    "text formatted by a filter": "{{ '%1000000000d' | format(1) }}",
    "words out of nothing": "{{ lipsum(n=10**9) }}",
    "batches": "{{ [1] | batch(10**9, 0) | list }}",
    "text searched again and again": "{% set x = 'a' * 100000 %}{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}",
    "dictionaries made again": "{% set x = [[1, 2]] * 99999 %}{% for i in range(999) %}{% set y = dict(x) %}{% endfor %}",
    "a recursive loop": "{% for x in [[1]] recursive %}{{ loop(x) }}{{ loop(x) }}{% endfor %}",
    "a block that shows itself": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "nested parentheses": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "negations": "{{ " + "not " * 20_000 + "1 }}",
    "a long sum": "{{ " + "1+" * 40_000 + "1 }}",
    "many branches": "{% if 0 %}" * 5_000 + "{% endif %}" * 5_000,
    "a long source": " " * (limits.CHAT_TEMPLATE_CHARS_MAX + 1),
    "a number of many digits": "{{ " + "9" * 100_000 + " }}",
}
LOOP = "{% for j in range(99999) %}{% for i in range(99999) %}BODY{% endfor %}{% endfor %}"
MACRO = "{% macro m(i) %}BODY{% endmacro %}" + LOOP.replace("BODY", "{% set y = m(i) %}")
WORDS = "{% set x = ['x'] * 90000 %}{% for i in range(9) %}{% set y = EXPRESSION %}{% endfor %}"
TEXT = "{% set x = '\u1234' * 400000 %}{% set y = ('\u1235' * 400000) ~ '\u1234' %}EXPRESSION"
EXHAUSTING |= {  # each does more work than it was charged for, until the fifth review
    "arguments by a star": "{% macro v() %}{% endmacro %}{% for i in range(9999) %}{{ v(*range(99999)) }}{% endfor %}",
    "named arguments by stars": "{% macro v() %}{% endmacro %}{{ v(**{'a': 1}) }}",
    "a star in a filter": "{{ 'x' | replace(*['x', 'y']) }}",
    "a caller": "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}x{% endcall %}",
    "separators of JSON": "{% set x = 'a' * 200000 %}{% set y = range(12000) | list | tojson(separators=(x, x)) %}",
    "a function for JSON": "{% macro m(x) %}{{ x }}{% endmacro %}{{ [1] | tojson(default=m) }}",
    "indented JSON of nested lists": NESTING.replace("['a']", "[1] * 99").replace("] * 7", "]")
    + "{% set y = [n.x] * 999 %}{{ y | tojson(indent=16) }}",
    "an attribute of many parts": WORDS.replace("EXPRESSION", f"x | map(attribute='{'.'.join('0' * 9000)}') | list"),
    "parts that never end": WORDS.replace(
        "EXPRESSION", f"x | map(attribute='{'.'.join('a' * 9000)}', default=[]) | list"
    ),
    "sorting by many attributes": WORDS.replace("EXPRESSION", f"x | sort(attribute='{','.join('0' * 9000)}')"),
    "selecting by many parts": WORDS.replace("EXPRESSION", f"x | selectattr('{'.'.join('0' * 9000)}') | list"),
    "the largest by many parts": WORDS.replace("EXPRESSION", f"x | max(attribute='{'.'.join('0' * 9000)}')"),
    "a search from the end": TEXT.replace("EXPRESSION", "{% set z = x.rfind('a' ~ x[1:200000]) %}"),
    "a split from the end": TEXT.replace("EXPRESSION", "{% set z = x.rsplit('a' ~ x[1:200000]) %}"),
    "stripping many characters": TEXT.replace("EXPRESSION", "{% set z = x.strip(y) %}"),
    "trimming many characters": TEXT.replace("EXPRESSION", "{% set z = x | trim(y) %}"),
    "a long list in a loop": LOOP.replace("BODY", f"{{% set x = [{'0,' * 2000}] %}}"),
    "many attributes in a loop": LOOP.replace("BODY", f"{{% set x = [{'loop.index,' * 400}] %}}"),
    "many tests in a loop": LOOP.replace("BODY", f"{{% set x = [{'i is string,' * 400}] %}}"),
    "a large mapping in a loop": LOOP.replace("BODY", f"{{% set x = {{{'1:i,' * 1000}}} %}}"),
    "many assignments in a loop": LOOP.replace("BODY", "{% set x = i %}" * 350),
    "many macros in a loop": LOOP.replace("BODY", "{% macro m() %}{% endmacro %}" * 170),
    "many names and branches": "".join(f"{{% set a{i}=1 %}}" for i in range(3000)) + "{% if a %}{% endif %}" * 3000,
    "a long list in a macro": MACRO.replace("BODY", f"{{% set x = [{'0,' * 4000}] %}}"),
    "many attributes in a macro": MACRO.replace("BODY", f"{{% set x = [{'messages.a,' * 800}] %}}"),
}
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ ['__class__'] | map('attr', 'x') | list }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ range.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ loop.__class__ }}",
    "{% for a in [1] %}{{ loop._iterable.__class__.__base__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}{{ m._func.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ joiner() }}",
    "{{ dict.mro() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'content': 'x'}) }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends 'x' %}",
    "{% autoescape true %}{{ 1 }}{% endautoescape %}",
]
CHILD = """
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
from prime_node.adapters.models.chat_template import compile_template
for name, source in json.load(sys.stdin).items():
    began = time.process_time()
    try:
        outcome = "rendered " + compile_template(source)({"messages": [{"role": "user", "content": "x"}]})[:50]
    except MemoryError:
        outcome = "no memory"
    except Exception as error:
        outcome = "refused"
    print(json.dumps([name, outcome, time.process_time() - began]), flush=True)
"""


def write(folder: Path, template: str) -> Path:
    write_tiny_model(folder, hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "chat_template": template}))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_template_takes_more_than_seconds_or_a_gibibyte() -> None:
    cases = {name: source + SHOWN for name, source in EXHAUSTING.items()}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    outcomes = {name: (outcome, seconds) for name, outcome, seconds in map(json.loads, child.stdout.splitlines())}
    assert {name: outcome for name, (outcome, _) in outcomes.items()} == dict.fromkeys(cases, "refused")
    slow = {name: seconds for name, (_, seconds) in outcomes.items() if seconds > 10}
    assert not slow


@pytest.mark.parametrize("template", ["{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"])
def test_a_template_that_takes_too_long_is_a_local_error_that_names_the_folder(tmp_path: Path, template: str) -> None:
    with pytest.raises(LocalError, match=rf"{tmp_path}.*chat template.*CHAT_TEMPLATE_COST_MAX"):
        HfTokenizer(write(tmp_path, template + SHOWN))


@pytest.mark.parametrize("template", ESCAPES)
def test_no_template_reaches_pythons_inside_or_changes_what_it_is_given(template: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    shown = ""
    with contextlib.suppress(TemplateError, TypeError, ValueError):
        shown = compile_template(template)({"messages": messages})
    assert not any(word in shown for word in ("class", "root:", "function", "<", "{"))
    assert messages == [{"role": "user", "content": "x"}]


def test_templates_of_the_usual_kind_render_as_they_do_in_plain_jinja() -> None:
    """Features that published templates use, compared with jinja itself."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = (
        "{%- macro show(m, last=false) %}<{{ m.role | upper }}>{{ m['content'].strip() | trim }}{{ '!' if last }}{% endmacro %}"
        "{%- set ns = namespace(system='', seen=[], count=0) -%}"
        "{%- for m in messages if m.role != 'tool' %}{% if loop.first and m.role == 'system' %}"
        "{% set ns.system = m.content ~ '\\n' %}{% continue %}{% endif %}{{ show(m, loop.last) }}{{ loop.index0 }}"
        "{%- set ns.count = ns.count + 1 %}{% set ns.seen = ns.seen + [m.role] %}"
        "{% if loop.previtem is defined and loop.previtem.role == m.role %}twice{% endif %}{% endfor %}"
        "{% for m in messages[::-1] %}{% if m.content is string and '</think>' in m.content %}"
        "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{{ m.content | replace('a', 'b') }}{% break %}{% endif %}{% endfor %}"
        "{% for name, value in {'a': 1, 'b': [2, 3]}.items() %}{{ name }}={{ value | tojson(indent=2) }}{% endfor %}"
        "{{ ns.system }}{{ ns.seen | join(', ') }}{{ ns.count % 2 }}{{ (messages | length) * 2 // 3 }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | tojson }}"
        "{{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | join(' ') }}"
        "{% for m in messages %}{% set here = namespace(x=', '.join(['a', m.role])) %}{{ here.x }}{% endfor %}"
        "{{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}"
        "{{ missing | default('none') }}{{ 'x' * 3 }}{{ [1, 2] + [3] }}{{ {'b': 1, 'a': 2} | dictsort }}"
        "{% set block %}in {{ 'a block' }}{% endset %}{{ block | length }}{{ 'text' | indent(2, true) }}{{ 7 is divisibleby(7) }}"
    )
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": " question "},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "<think>a</think>\nanswer"},
        {"role": "tool", "content": "4"},
    ]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    plain.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    expected = plain.from_string(template).render(messages=messages)
    assert compile_template(template)({"messages": messages}) == expected
    assert "twice" in expected


def test_a_long_conversation_stays_within_the_meter() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{% elif loop.last %}<|last|>{% else %}<|other|>{% endif %}"
        "{{ m.content | trim }}{% if not loop.last and loop.nextitem.role != m.role %}<|end|>{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 100} for _ in range(limits.TURNS_MAX)]
    assert len(compile_template(template)({"messages": messages})) > 500_000


def test_refusals_leave_this_process_small(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LocalError):
        HfTokenizer(write(tmp_path, DOUBLING.replace("EXPRESSION", "n.x ~ n.x") + SHOWN))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
