"""Sources that are templates: rendered with the axes, into a place of their own, the same bytes wherever that lies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2.filters import FILTERS

from kartifacts.build import sandbox, templates
from kartifacts.build.jit import build_one
from kartifacts.build.library import open_library
from kartifacts.config import Settings
from kartifacts.errors import ConfigError
from kartifacts.model.arch import parse_arch
from kartifacts.model.spec import Spec

from .conftest import CPU, OP_TOML, Compiler, answer_of, write_library

MakeSettings = Callable[..., Settings]

TOML = OP_TOML.replace("answer_cpu.cpp", "special.cpp.jinja").replace("answer.cu", "special.cu.jinja")
TEMPLATE = """\
#include "answer.h"
#include "scale.h"
{% include "factor.jinja" %}
extern "C" __attribute__((used)) const char* kart_file() { return __FILE__; }
long kart_answer() { return SCALE * KART_SIZE * {{ factor }}; }
"""
FILES = {
    "demo/op.toml": TOML,
    "demo/special.cpp.jinja": TEMPLATE.replace("{{ factor }}", "FACTOR"),
    "demo/special.cu.jinja": (
        '#include "answer.h"\n#include "scale.h"\n{% include "factor.jinja" %}\n'
        "__global__ void fill(long* out, const char** file) { *out = SCALE * FACTOR; *file = __FILE__; }\n"
        "long kart_answer() { fill<<<1, 1>>>(nullptr, nullptr); return (long)cudaGetLastError(); }\n"
    ),
    "demo/factor.jinja": "#define FACTOR {{ 2 if size == 'small' else 3 }}L  // {{ axes['size'] }}\n",
}


@pytest.fixture
def rendering(tmp_path: Path) -> Path:
    return write_library(tmp_path / "templates", FILES)


def spec_of(root: Path, size: str = "small", arch: str = "") -> Spec:
    return open_library(root).spec("answer", {"size": size}, parse_arch(arch) if arch else CPU)


def test_a_template_is_compiled_as_rendered_for_each_specialisation(rendering: Path, settings: Settings) -> None:
    small, large = (build_one(spec_of(rendering, size), settings) for size in ("small", "large"))
    assert (answer_of(small.path), answer_of(large.path)) == (14, 21000)
    assert small.op_digest != large.op_digest


def test_the_identity_covers_templates_what_they_include_and_what_they_render_to(rendering: Path) -> None:
    spec = spec_of(rendering)
    paths = [source.path for source in spec.sources]
    assert {"demo/special.cpp.jinja", "demo/factor.jinja", "demo/special.cpp", "include/scale.h"} <= set(paths)
    for name, old, new in (
        ("demo/special.cpp.jinja", "SCALE *", "2 * SCALE *"),
        ("demo/factor.jinja", "// ", "// say: "),
        ("include/deep/scale.h", "7L", "8L"),
        ("demo/factor.jinja", "2 if", "4 if"),
    ):
        before = spec_of(rendering).op_digest
        path = rendering / name
        path.write_text(path.read_text().replace(old, new))
        assert spec_of(rendering).op_digest != before


def test_the_places_of_the_library_and_of_generated_sources_change_no_byte(rendering: Path, tmp_path: Path) -> None:
    made = []
    for number, place in enumerate(("a", "another/place with space")):
        root = rendering if number == 0 else write_library(tmp_path / "moved" / "library", FILES)
        settings = settings_in(tmp_path / place)
        built = build_one(spec_of(root), settings)
        made.append((built.key, built.op_digest, built.path.read_bytes()))
        assert b"demo/special.cpp\0" in made[-1][2]  # what __FILE__ says
        for hidden in (str(tmp_path).encode(), b"generated"):
            assert hidden not in made[-1][2]
    assert made[0] == made[1]


@pytest.mark.nvcc
def test_the_places_change_no_byte_of_device_code_either(rendering: Path, tmp_path: Path, real_toolkit: Path) -> None:
    made = []
    for place in ("a", "another/place"):
        built = build_one(spec_of(rendering, arch="8.0"), settings_in(tmp_path / place, CUDA_HOME=str(real_toolkit)))
        made.append(built.path.read_bytes())
    assert made[0] == made[1]
    assert str(tmp_path).encode() not in made[0]


def settings_in(place: Path, **environ: str) -> Settings:
    from kartifacts import config

    place.mkdir(parents=True)
    named = {f"KARTIFACTS_{name.upper()}": str(place / name) for name in ("workspace", "generated")}
    return config.read({"HOME": str(place), "PATH": os.environ["PATH"], **named, **environ})


# -- the tree ----------------------------------------------------------------------------------------------------------


def test_sources_are_written_only_where_they_differ(rendering: Path, settings: Settings) -> None:
    tree = Path(templates.written(spec_of(rendering), settings.generated).root)
    files = sorted(path for path in tree.rglob("*") if path.is_file())
    assert str(tree / "demo/special.cpp") in map(str, files)
    assert not [path for path in files if path.suffix == ".jinja"]
    for path in files:
        os.utime(path, ns=(10**18, 10**18))
    assert templates.written(spec_of(rendering), settings.generated).root == str(tree)
    assert {path.stat().st_mtime_ns for path in files} == {10**18}
    damaged = tree / "demo/special.cpp"
    damaged.write_text("edited by hand")
    templates.written(spec_of(rendering), settings.generated)
    assert damaged.read_text() != "edited by hand"
    assert [path for path in files if path.stat().st_mtime_ns != 10**18] == [damaged]


def test_an_edited_template_is_written_beside_what_others_may_be_compiling(rendering: Path, settings: Settings) -> None:
    first = templates.written(spec_of(rendering), settings.generated)
    template = rendering / "demo/special.cpp.jinja"
    template.write_text(template.read_text().replace("SCALE *", "2 * SCALE *"))
    second = templates.written(spec_of(rendering), settings.generated)
    assert first.root != second.root
    assert "2 * SCALE" not in Path(first.root, "demo/special.cpp").read_text()


def test_what_changed_since_it_was_read_is_not_written(rendering: Path, settings: Settings) -> None:
    spec = spec_of(rendering)
    (rendering / "demo/factor.jinja").write_text("#define FACTOR 9L\n")
    with pytest.raises(ConfigError, match=r"'demo/special.cpp' of demo/answer\?size=small has changed"):
        templates.written(spec, settings.generated)


def test_a_library_without_templates_generates_nothing(settings: Settings, make_spec: Callable[..., Spec]) -> None:
    spec = make_spec()
    assert templates.written(spec, settings.generated) is spec
    build_one(spec, settings)
    assert not settings.generated.exists()


def test_who_renders_nothing_does_not_import_jinja2(rendering: Path, root: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom kartifacts.build.library import open_library\n"
        "from kartifacts.model.arch import parse_arch\n"
        "open_library(Path(sys.argv[1]), workspace=Path(sys.argv[2]))"
        f".spec('answer', {{'size': 'small'}}, parse_arch({str(CPU)!r}))\nprint('jinja2' in sys.modules)"
    )
    workspace = tmp_path / "remembering"
    workspace.mkdir()
    os.utime(rendering / "demo/factor.jinja")

    def imports(library: Path) -> str:
        command = [sys.executable, "-c", code, str(library), str(workspace)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert imports(root) == "False"
    assert imports(rendering) == "True"
    if list((workspace / "libraries").glob("*")):  # else the files were too young to be remembered
        assert imports(rendering) == "False"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("{{ unknown }}", 1, "'unknown' is undefined"),
        ("\n\n{{ axes.unknown }}", 3, "has no attribute 'unknown'"),
        ("\n{% if %}", 2, "Expected an expression"),
        ("{{ size", 1, "unexpected end of template"),
        ("\n{{ size | no_filter }}", 2, "no_filter"),
        ("\n{% macro m() %}\n{{ unknown }}\n{% endmacro %}\n{{ m() }}", 3, "'unknown' is undefined"),
        ("{{ 1 / 0 }}", 1, "division by zero"),
        ("{{ none }}", 1, "a text or a number is expected"),
        ("{{ [1, 2] }}", 1, "a text or a number is expected"),
        ("{{ range }}", 1, "a text or a number is expected"),
        ("{{ ''.__class__.__mro__ }}", 1, "unsafe"),
        ("{{ axes.__init__.__globals__ }}", 1, "unsafe"),
        ("{{ axes.clear() }}", 1, "unsafe"),
        ("{{ 'x' * 10000000000 }}", 1, "for numbers alone"),
        ("{{ 10 ** 10000000 }}", 1, "for numbers alone"),
        ("{{ '%9999999999d' % 1 }}", 1, "for numbers alone"),
        ("{{ 'x'.ljust(9999999999) }}", 1, "unsafe"),
        ("{% for i in range(10000000) %}x{% endfor %}", 1, "too big"),
        ("{{ [1, 2] | random }}", 1, "random"),
        ("{{ lipsum() }}", 1, "'lipsum' is undefined"),
        ("\n{% include 'broken.jinja' %}", (2, "demo/broken.jinja"), "'unknown' is undefined"),
        ("{% include 'special.cpp.jinja' %}", None, "recursion"),
        ("\n{{ size | dictsort }}", 2, "no attribute 'items'"),  # whatever Python says is an error of the template
        ("\n{{ size | truncate(-5) }}", 2, "expected length"),
        ("\n{{ size.encode('nothing') }}", 2, "unknown encoding"),
        ("\n{{ '\\ud800' }}", None, "surrogate"),
        ("{{ size | xmlattr }}", 1, "xmlattr"),
        ("\n" + "{% for a in 'x' %}\n" * 25 + "{% endfor %}" * 25, 22, "too many statically nested blocks"),
        ("\n" + "{{ " + "(" * 900 + "1" + ")" * 900 + " }}", None, ""),
    ],
)
def test_a_template_that_cannot_be_rendered_is_named_with_the_line(
    rendering: Path, text: str, line: int | tuple[int, str] | None, message: str
) -> None:
    write_library(rendering, {**FILES, "demo/special.cpp.jinja": text, "demo/broken.jinja": "\n{{ unknown }}\n"})
    number, name = line if isinstance(line, tuple) else (line, "demo/special.cpp.jinja")
    with pytest.raises(ConfigError) as caught:
        spec_of(rendering)
    assert (f"{name}:{number}" if number else name) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "loop", ["{% for a in range(99999) %}{% for b in range(999) %}xxxxxxxxxx{% endfor %}{% endfor %}"]
)
def test_a_template_that_never_ends_is_stopped_by_the_size_of_its_text(
    rendering: Path, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_TEXT", 1 << 16)
    write_library(rendering, {**FILES, "demo/special.cpp.jinja": loop})
    with pytest.raises(ConfigError, match=r"'demo/special.cpp.jinja' renders to more than 65536 bytes"):
        spec_of(rendering)


UNSTEADY = ["cycler('a')", "joiner('a')", "size.upper", "axes.values", "namespace(a=1)", "range", "m", "self.block"]


@pytest.mark.parametrize("value", [*UNSTEADY, "[size.upper]", "{'a': [size.upper]}", "{size.upper: 1}"])
@pytest.mark.parametrize(
    "way",
    [
        "{{ VALUE }}",
        "{{ VALUE ~ '' }}",
        "{% set text = 'a' ~ VALUE %}",
        "{{ VALUE | string }}",
        "{{ [VALUE] | join }}",
        "{{ [VALUE] | map('string') | join }}",
        "{% set text = VALUE | upper %}",
        "{{ VALUE | indent }}",
        "{{ VALUE | wordcount }}",
        "{{ VALUE | urlencode }}",
        "{{ 'a' | replace('a', VALUE) }}",
        "{{ (size | safe).join([VALUE]) }}",
        "{{ (size | tojson).join([VALUE]) }}",
        "{% autoescape true %}{{ m().join([VALUE]) }}{{ VALUE ~ '' }}{% endautoescape %}",
    ],
)
def test_no_template_shows_what_is_another_text_in_another_process(rendering: Path, way: str, value: str) -> None:
    around = "{% macro m() %}m{% endmacro %}{% block block %}{% endblock %}"
    write_library(rendering, {**FILES, "demo/special.cpp.jinja": f"{around}\n{way.replace('VALUE', value)}"})
    with pytest.raises(ConfigError, match=r"demo/special\.cpp\.jinja:2 .*(is expected|can be worked on|expected str)"):
        spec_of(rendering)


def test_whatever_a_filter_is_given_gives_a_plain_text_or_an_error_with_the_line(rendering: Path) -> None:
    values = ["size", "[1, 'a', none]", "{'a': 1}", "size.upper"]
    given = ["", "(-5)", "(none, 'x')", "(size.upper)"]
    texts, errors = [], []
    for expression in (f"{value} | {name}{how}" for name in FILTERS for value in values for how in given):
        (rendering / "demo/special.cpp.jinja").write_text(f"\n{{{{ ({expression}) ~ '' }}}}")
        try:
            made, _ = templates.render(rendering, ["demo/special.cpp.jinja"], {"size": "small"})
            texts.append(made["demo/special.cpp"].decode())
        except ConfigError as error:  # and no other
            errors.append(error.message)
    assert not [error for error in errors if "demo/special.cpp.jinja:2 cannot be rendered" not in error]
    assert not [text for text in texts if re.search("0x[0-9a-f]{6}|<[a-z]", text)]
    assert min(len(texts), len(errors)) > 100


@pytest.mark.parametrize("text", ["{{ (axes.keys() - []) | join }}", "{{ [1, 2] | shuffle }}", "{{ [1] | pprint }}"])
def test_no_template_gets_at_what_has_no_order(rendering: Path, text: str) -> None:
    write_library(rendering, {**FILES, "demo/special.cpp.jinja": text})
    with pytest.raises(ConfigError, match=r"demo/special\.cpp\.jinja:1 cannot be rendered"):
        spec_of(rendering)


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("{{ size ~ 1 ~ 2.5 }}{{ [1, 'a'] | join(',') }}", "small12.51,a"),
        ("{{ axes.items() | map('join', '=') | join(';') }}{{ axes | length }}", "size=small1"),
        ("{% for a in [3, 1] | sort | reverse %}{{ loop.index ~ ':' ~ a }} {% endfor %}", "1:3 2:1 "),
        ("{% for row in range(5) | batch(2) %}{{ row | join }}{% endfor %}", "01234"),
        ("{{ [[1, 2], [3]] | map('sum') | list | tojson }}{{ 'a<' | tojson }}", '[3, 3]"a\\u003c"'),
        ("{% set n = namespace(x=1) %}{% for a in 'abc' %}{% set n.x = n.x * 2 %}{% endfor %}{{ n.x }}", "8"),
        ("{% set c = joiner(', ') %}{% for a in 'ab' %}{{ c() }}{{ a }}{% endfor %}", "a, b"),
        ("{% macro m(a, b=2) %}{{ a + b }}{{ caller() }}{% endmacro %}{% call m(1) %}!{% endcall %}", "3!"),
        ("{{ [{'a': 1}, {'a': 2}] | groupby('a') | length }}{{ unknown | default('x') }}", "2x"),
        ("{{ 'float32'.replace('float', 'f') | upper | indent }}{{ ([1, 2] + [3]) | length }}", "F323"),
    ],
)
def test_what_templates_are_for_still_renders(rendering: Path, text: str, rendered: str) -> None:
    write_library(rendering, {**FILES, "demo/special.cpp.jinja": text})
    texts, _ = templates.render(rendering, ["demo/special.cpp.jinja"], {"size": "small"})
    assert texts["demo/special.cpp"].decode() == rendered


@pytest.mark.parametrize(
    "text",
    [
        "{{ [1] | batch(1000000000, 1) | list | length }}",
        "{{ [1] | slice(1000000000) | list | length }}",
        "{{ size | indent(1000000000) }}",
        "{{ size | indent(width=1000000000, first=true) }}",
        "{{ size | wordwrap(1000000000) }}",
        "{{ 1.5 | round(1000000000) }}",
        "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='xx') %}{% for a in range(99) %}{% set n.x = n.x.replace('', n.x) %}{% endfor %}",
        "{% set n = namespace(x='xx') %}{% for a in range(99) %}{% set n.x = n.x | replace('', n.x) %}{% endfor %}",
        "{% set n = namespace(x='xx') %}{% for a in range(99) %}{% set n.x = n.x.join(n.x) %}{% endfor %}",
        "{% set n = namespace(x='xx') %}{% for a in range(99) %}{% set n.x = n.x | join(n.x) %}{% endfor %}",
        "{% set n = namespace(x=7) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
)
def test_no_template_takes_long_or_much_memory(rendering: Path, text: str) -> None:
    write_library(rendering, {**FILES, "demo/special.cpp.jinja": text})
    began = time.process_time()
    with pytest.raises(ConfigError, match=r"demo/special\.cpp\.jinja:1 cannot be rendered"):
        spec_of(rendering)
    assert time.process_time() - began < 20


def test_a_template_that_may_be_missing_is_passed_over_and_found_once_it_is_there(rendering: Path) -> None:
    text = "{% include 'extra.jinja' ignore missing %}{% include ['other.jinja', 'factor.jinja'] %}"
    write_library(rendering, {**FILES, "demo/special.cpp.jinja": text})
    before = spec_of(rendering)
    assert "demo/factor.jinja" in [source.path for source in before.sources]
    (rendering / "demo/extra.jinja").write_text("// extra\n")
    after = spec_of(rendering)
    assert "demo/extra.jinja" in [source.path for source in after.sources]
    assert after.op_digest != before.op_digest
    (rendering / "demo/extra.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"'demo/extra.jinja' is not text in UTF-8"):
        spec_of(rendering)


@pytest.mark.parametrize(
    ("include", "message"),
    [
        ("../../secret.txt", "reaches outside the library"),
        ("/etc/passwd", "reaches outside the library"),
        ("missing.jinja", "'demo/missing.jinja' cannot be read"),
        ("binary.jinja", "not text in UTF-8"),
    ],
)
def test_templates_are_included_from_inside_the_library_alone(rendering: Path, include: str, message: str) -> None:
    (rendering.parent / "secret.txt").write_text("secret")
    (rendering / "demo/binary.jinja").write_bytes(b"\xff\xfe")
    write_library(rendering, {**FILES, "demo/special.cpp.jinja": "{% include '" + include + "' %}"})
    with pytest.raises(ConfigError) as caught:
        spec_of(rendering)
    assert message in str(caught.value)


def test_a_template_beside_goes_before_one_in_include(rendering: Path, settings: Settings) -> None:
    write_library(rendering, {**FILES, "include/factor.jinja": "#define FACTOR 5L\n"})
    assert answer_of(build_one(spec_of(rendering), settings).path) == 14
    (rendering / "demo/factor.jinja").unlink()
    assert answer_of(build_one(spec_of(rendering), settings).path) == 35


def test_a_template_must_not_stand_in_for_a_file_that_is_there(rendering: Path) -> None:
    (rendering / "demo/special.cpp").write_text("")
    with pytest.raises(ConfigError, match=r"renders to 'demo/special.cpp', which is a file of the library too"):
        spec_of(rendering)


# -- what an op has not got --------------------------------------------------------------------------------------------

RULE = '[[op.unsupported]]\nwhen = { size = ["large"] }\nreason = "needs more registers than there are"\n'


def with_rule(tmp_path: Path, rule: str) -> Path:
    return write_library(tmp_path / "ruled", {"demo/op.toml": OP_TOML + rule})


def test_a_combination_that_an_op_has_not_got_is_refused_before_any_compiler_starts(
    tmp_path: Path, make_settings: MakeSettings, compiler: Compiler
) -> None:
    library = open_library(with_rule(tmp_path, RULE))
    with pytest.raises(ConfigError, match=r"no kernel for size=large: needs more registers than there are"):
        library.spec("answer", {"size": "large"}, CPU)
    assert compiler.compiled == []
    specs, skipped = library.specs([], [CPU])
    assert [spec.uri for spec in specs] == ["demo/answer?size=small"]
    assert skipped == []
    build_one(specs[0], make_settings(KARTIFACTS_CXX=str(compiler.path)))
    assert len(compiler.compiled) == 2


def test_rules_about_what_there_is_not_change_no_identity_of_what_there_is(tmp_path: Path) -> None:
    plain = open_library(write_library(tmp_path / "plain")).spec("answer", {"size": "small"}, CPU)
    ruled = open_library(with_rule(tmp_path, RULE)).spec("answer", {"size": "small"}, CPU)
    assert plain.op_digest == ruled.op_digest


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (RULE.replace("size =", "sise ="), "names sise=['large'], which no axis of the op declares"),
        (RULE.replace('"large"', '"huge"'), "names size=['huge'], which no axis of the op declares"),
        (RULE.replace('{ size = ["large"] }', "{}"), "names no axis"),
        (RULE.replace('["large"]', "[]"), "an axis without values"),
        (RULE.replace("needs more registers than there are", " "), "gives no reason"),
        (RULE.replace('["large"]', '["large", "small"]'), "leaves nothing"),
        (RULE.replace("reason", "why"), "why"),
    ],
)
def test_a_wrong_rule_is_refused_with_the_name_of_its_file(tmp_path: Path, rule: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_library(with_rule(tmp_path, rule))
    assert message in str(caught.value)
    assert "demo/op.toml" in str(caught.value)


def test_all_axes_of_a_rule_must_match(tmp_path: Path) -> None:
    toml = OP_TOML.replace('axes.size = ["small", "large"]', 'axes.size = ["small", "large"]\naxes.kind = ["a", "b"]')
    rule = RULE.replace('size = ["large"]', 'size = ["large"], kind = ["b"]')
    library = open_library(write_library(tmp_path / "two", {"demo/op.toml": toml + rule}))
    specs, _ = library.specs([], [CPU])
    assert [dict(spec.axes) for spec in specs] == [
        {"kind": "a", "size": "small"},
        {"kind": "a", "size": "large"},
        {"kind": "b", "size": "small"},
    ]


# -- flags of the linker -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["-lm", "-lstdc++", "-pthread", "-Wl,-z,now", "-Wl,--as-needed", "-Wl,--gc-sections"])
def test_what_may_be_said_to_the_linker_reaches_it_and_the_identity(
    tmp_path: Path, settings: Settings, make_spec: Callable[..., Spec], flag: str
) -> None:
    toml = OP_TOML.replace('toolchain = "cxx"', f'toolchain = "cxx"\nlink_flags = ["{flag}"]')
    spec = open_library(write_library(tmp_path / "linked", {"demo/op.toml": toml})).spec(
        "answer", {"size": "small"}, CPU
    )
    assert spec.op_digest != make_spec().op_digest
    if flag in ("-lm", "-Wl,-z,now"):  # the others are the same flow
        source = Path(spec.root, "demo/answer_cpu.cpp")
        source.write_text(
            "#include <cmath>\n"
            "volatile double number = 8;\n" + source.read_text().replace("SCALE *", "(long)std::cbrt(number) *")
        )
        spec = open_library(Path(spec.root)).spec("answer", {"size": "small"}, CPU)
        built = build_one(spec, settings)
        dynamic = subprocess.run(["readelf", "-dW", built.path], capture_output=True, text=True, check=True).stdout
        assert {"-lm": "libm.so", "-Wl,-z,now": "NOW"}[flag] in dynamic


@pytest.mark.parametrize(
    "flag",
    [
        "-L/opt/lib",
        "-l:libx.a",
        "-l/opt/libx.a",
        "-Wl,-rpath,/opt",
        "-Wl,--script=x",
        "/opt/libx.a",
        "-static",
        "-lm -L.",
        "-l",
    ],
)
def test_what_would_look_into_this_machine_is_not_said_to_the_linker(tmp_path: Path, flag: str) -> None:
    toml = OP_TOML.replace('toolchain = "cxx"', f'toolchain = "cxx"\nlink_flags = ["{flag}"]')
    with pytest.raises(ConfigError, match=r"link_flags: .* is not allowed") as caught:
        open_library(write_library(tmp_path / "linked", {"demo/op.toml": toml}))
    assert "demo/op.toml" in str(caught.value)
