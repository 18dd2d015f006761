"""The list of messages is up to date, and has what users can read."""

from __future__ import annotations

import ast
import difflib

import pytest

from tests.messages import LIST, ROOT, errors_of, listed, texts


def test_the_list_is_up_to_date():
    old, new = LIST.read_text().splitlines(), listed().splitlines()
    diff = difflib.unified_diff(old, new, str(LIST.relative_to(ROOT)), "the source", n=1, lineterm="")
    changed = "\n".join(diff)
    assert not changed, f"read the changes, and take them over with python -m tests.messages:\n{changed}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise UserError('no port')", ["no port"]),
        ("raise UserError(f'{path}: {len(names)} ' 'names')", ["{path}: {len(names)} names"]),
        ("raise UserError('file ' + name + ' is gone')", ["file {name} is gone"]),
        ("raise UserError('up' if self.up else 'down') from error", ["up", "down"]),
        ("raise UserError(TEXTS['of one'])", []),
        ("return BadFile('empty')", ["empty"]),  # an error of the same source
        ("return Value('empty')", []),
        ("log.info('View %d', number)", ["View %d"]),
        ("print('done', file=sys.stderr)", ["done"]),
        ("sys.stderr.write(f'{name}: gone\\n')", ["{name}: gone\\n"]),
        ("file.write('empty')", []),
        ("TEXT = '{host} is not known'", ["{host} is not known"]),  # a template for .format
        ("why = f'{a.host} was lost: {why(error)}'", ["{host} was lost: {why(error)}"]),
        ('raise UserError(f\'{n} host{"" if n == 1 else "s"}\')', ["{n} host{|s}"]),
        ("raise UserError(f\"{', '.join(names)} of {each.of[0] + 1}\")", ["{names} of {of 1}"]),
        ("parser.add_argument('--hosts', help='hosts and their slots')", []),
        ("def f():\n    '''It has three words.'''", []),
        ("re.compile(r'a \\d+ b c')", []),
    ],
)
def test_what_users_can_read(source, found):
    tree = ast.parse(source)
    errors = errors_of(
        [ast.parse("class UserError(Exception): pass\nclass BadFile(UserError): pass\nclass Value: pass")]
    )
    assert list(texts(tree, errors)) == found


def test_lines_are_sorted_so_that_only_a_message_changes_them(tmp_path):
    for name, source in (("a.py", "print('two')\nprint('one')\nprint('two')"), ("b.py", "x = 1")):
        (tmp_path / "launch").mkdir(exist_ok=True)
        (tmp_path / "launch" / name).write_text(source)
    assert listed(tmp_path).splitlines() == ["launch/a.py", "    one", "    two"]
